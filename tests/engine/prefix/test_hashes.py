"""Chains of hashes: equal everywhere, different wherever anything differs that rows depend on."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from symbolic_ranks import toy_spec

from kvflow.engine.prefix.hashes import PrefixHasher, said
from kvflow.layouts.identity import ContentIdentity
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.wire import layout_from_wire, layout_to_wire

HASHER = PrefixHasher("content", 4, shifted=True)
IN_A_CHILD = """
from kvflow.engine.prefix.hashes import PrefixHasher
chain = PrefixHasher("content", 4, shifted=True).chain(range(32), "salt")
print(*(h.hex() for h in (*chain.hashes, *chain.labels, chain.key(3, 16))))
"""


def all_of(chain):
    return {*chain.hashes, *chain.labels}


def test_fault_i01_hashes_are_equal_in_every_process():
    chain = HASHER.chain(range(32), "salt")
    here = " ".join(h.hex() for h in (*chain.hashes, *chain.labels, chain.key(3, 16)))
    for seed in ("", "0", "1"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        env |= {"PYTHONHASHSEED": seed} if seed else {}
        run = subprocess.run(
            [sys.executable, "-c", IN_A_CHILD], env=env, capture_output=True, text=True, check=True
        )
        assert run.stdout.split() == here.split()


def test_fault_i03_salt_adapter_and_tokens_never_stand_for_each_other():
    prompt = range(8)
    ways = [
        {"salt": "x"},
        {"adapter": "x"},
        {},
        {"salt": ""},
        {"adapter": ""},
        {"salt": "ab", "adapter": "c"},
        {"salt": "a", "adapter": "bc"},
    ]
    seen = [all_of(HASHER.chain(prompt, **way)) for way in ways]
    assert len(set.union(*seen)) == sum(map(len, seen))


@given(st.lists(st.lists(st.one_of(st.none(), st.text(), st.binary(), st.integers())), max_size=2))
def test_lists_that_differ_are_said_differently(lists):
    if len(lists) == 2:
        a, b = ([(type(x), x) for x in each] for each in lists)
        assert (said(*lists[0]) == said(*lists[1])) == (a == b)


def test_a_hash_stands_for_all_tokens_before_it():
    one, other = HASHER.chain([1, 2, 3, 4, 5, 6, 7, 8]), HASHER.chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert not all_of(one) & all_of(other)
    longer = HASHER.chain([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert longer.hashes == one.hashes
    assert len(longer) == 2


def fingerprint(spec):
    return ContentIdentity.of(spec).fingerprint


def test_fault_h11_i06_weights_formats_and_block_sizes_are_part_of_every_key():
    specs = [
        toy_spec(False),
        toy_spec(False, weights="newer"),
        toy_spec(False, kv_dtype="bfloat16"),
        toy_spec(False, kv_dtype="fp8"),
        toy_spec(True),
    ]
    chains = [PrefixHasher(fingerprint(s), 4).chain(range(8)) for s in specs]
    chains.append(PrefixHasher(fingerprint(specs[0]), 8).chain(range(8)))
    seen = [all_of(chain) for chain in chains]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_fault_a16_scheduler_and_worker_build_one_identity():
    """From the same configuration (DCP 8, interleave 1, block 1536), once here and once from what
    crossed the wire."""
    layout = KVLayout.uniform(toy_spec(True), Placement.simple(RoundRobin(8, 1)), Paged(1536))
    again = layout_from_wire(layout_to_wire(layout))
    assert again == layout
    assert fingerprint(again.spec) == fingerprint(layout.spec)
    with pytest.raises(AttributeError):
        layout.spec = again.spec


def test_the_token_behind_a_block_is_part_of_what_names_its_rows():
    chain = HASHER.chain(range(8))
    assert chain.following(0) == 4
    assert chain.following(1, sampled=99) == 99
    with pytest.raises(LookupError, match="behind position 7"):
        chain.following(1)
    assert len({chain.key(1, 5), chain.key(1, 6), chain.key(1, None), chain.key(0, 5)}) == 4
    assert len({chain.label(1, 5), chain.label(1, 6), chain.label(0, 5)}) == 3
    assert PrefixHasher("content", 4).chain(range(8)).following(1) is None
