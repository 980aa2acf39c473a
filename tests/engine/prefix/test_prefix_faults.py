"""Faults of prefix reuse, each by name, with rows as words (`symbolic_ranks`)."""

import asyncio

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_world import reusable
from symbolic_ranks import SymbolicRanks, sampled_for, toy_spec
from test_symbolic import run_script, scripts, worlds

from kvflow.engine.prefix.cache import PrefixCache, Trail
from kvflow.engine.prefix.hashes import PrefixHasher, sha256
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, num_full_entries
from kvflow.layouts.sharding import RoundRobin

EXAMPLES = max(20, settings.default.max_examples // 3)


def served(ranks, *prompts):
    """How many tokens of each prompt were reused, one after the other."""

    async def run():
        reused = [await ranks.serve(f"r{i}", p) for i, p in enumerate(prompts)]
        await ranks.close()
        return reused

    return asyncio.run(run())


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize(("length", "reused"), [(20, 16), (40, 36)])
def test_fault_a14_hits_have_the_block_s_granularity_whatever_dcp_is(mtp, length, reused):
    """Block 4, DCP 4: a table entry holds 16 positions, a hit is a multiple of 4."""
    ranks = SymbolicRanks(4, 4, block=4, mtp=mtp)
    assert served(ranks, range(length), range(length)) == [0, reused]


@pytest.mark.parametrize("interleave", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("mtp", [False, True])
def test_hits_are_as_long_as_they_can_be_for_any_interleave(interleave, mtp):
    ranks = SymbolicRanks(4, 4, interleave, block=4, num_blocks=400, mtp=mtp)
    prompts = [tuple(range(n)) for n in (70, 69, 5, 50, 33)]
    prompts += [(*range(n), 500) for n in (16, 17, 23, 40, 52, 64)]
    wanted = [
        reusable(prompts[:i], p, 4, mtp, map(sampled_for, prompts[:i]))
        for i, p in enumerate(prompts)
    ]
    assert served(ranks, *prompts) == wanted


@pytest.mark.parametrize(("length", "reused"), [(16, 0), (17, 16), (31, 16), (33, 32)])
def test_fault_b12_a_repeated_prompt_loses_its_last_token_and_no_unit(length, reused):
    ranks = SymbolicRanks(block=16, num_blocks=40, mtp=True)
    assert served(ranks, range(length), range(length)) == [0, reused]
    assert ranks.engine.kv.num_short_hits == 0


@pytest.mark.parametrize(("mtp", "reused"), [(False, 16), (True, 15)])
def test_fault_b12_b14_the_row_that_another_token_made_is_computed_anew_and_counted(mtp, reused):
    """Two prompts equal in tokens 0 to 15 and different in token 16."""
    ranks = SymbolicRanks(block=16, num_blocks=40, mtp=mtp)
    stem = tuple(range(16))
    assert served(ranks, (*stem, 70, 1), (*stem, 71, 2), (*stem, 70, 3)) == [0, reused, 16]
    assert ranks.engine.kv.num_short_hits == int(mtp)


def test_fault_b14_a_prompt_that_ends_with_a_block_is_known_with_the_token_sampled_behind():
    stem = tuple(range(16))
    token = sampled_for(stem)
    ranks = SymbolicRanks(block=16, num_blocks=40, mtp=True)
    assert served(ranks, stem, (*stem, token, 1), (*stem, token + 1, 1)) == [0, 16, 15]

    async def unsampled():
        ranks = SymbolicRanks(block=16, num_blocks=40, mtp=True)
        ranks.submit("a", stem)
        await ranks.settle()
        ranks.run_step(ranks.steps[-1])
        assert len(ranks.engine.kv.cache.index) == 0  # nobody knows the token behind it yet

    asyncio.run(unsampled())


def test_fault_h07_an_index_entry_does_not_outlive_its_block():
    """Pool of 20, prefix of 16 blocks, pressure of 40, then the prefix again."""
    ranks = SymbolicRanks(block=4, num_blocks=20)
    prefix = range(64)
    pressure = [range(100 * i, 100 * i + 80) for i in (1, 2)]
    assert served(ranks, prefix, *pressure, prefix) == [0, 0, 0, 0]
    for node in ranks.engine.kv.cache.index:
        for group, named in node.named.items():
            assert set(named.ids) <= ranks.engine.pools[group].indexed


def test_fault_h01_h02_h03_a_preempted_request_resumes_by_what_it_computed():
    """Preempted while its stores are under way; others take its blocks; it comes back."""

    async def run():
        ranks = SymbolicRanks(
            2, 2, block=2, num_blocks=10, mtp=True, host_units=40, max_num_batched_tokens=8
        )
        first = ranks.submit("a", range(30))
        other = ranks.submit("b", range(100, 130))
        await ranks.settle()
        ranks.engine.preempt("a")
        assert len(ranks.engine._held["a"].kv.stores) == 4  # under way
        while not (first.done() and other.done()):
            ranks.answer()
            for work in ranks.engine._held.values():
                assert work.done <= len(work.request.prompt)
            await ranks.settle()
            for name, task in (("a", first), ("b", other)):
                if task.done():
                    ranks.engine.release(name)
        ranks.assert_idle()
        resumed = [s.items[0].start for s in ranks.steps if s.items[0].request_id == "a"]
        return ranks.told, resumed[1], dict(ranks.engine.kv.num_reused)

    told, resumed, reused = asyncio.run(run())
    assert resumed == 8  # the step it was in when it was preempted
    assert told == {"a": 0, "b": 0}  # and that was its own
    assert set(reused.values()) == {0}


@pytest.mark.parametrize("num_blocks", [30, 12])
def test_a_preempted_request_is_told_what_others_had_left_when_it_came(num_blocks):
    """12 of its 30 tokens, from device blocks or, where those were taken, from units; what it finds
    after each preemption is more."""

    async def run():
        ranks = SymbolicRanks(
            block=4, num_blocks=num_blocks, host_units=40, max_num_batched_tokens=4
        )
        await ranks.serve("x", range(14))
        if num_blocks == 12:
            await ranks.serve("y", range(200, 246))
        task = ranks.submit("a", (*range(12), *range(50, 68)))
        await ranks.settle()
        for _ in range(3):
            ranks.engine.preempt("a")
            ranks.answer()
            await ranks.settle()
        while not task.done():
            ranks.answer()
            await ranks.settle()
        starts = [s.items[0].start for s in ranks.steps if s.items[0].request_id == "a"]
        reused = dict(ranks.engine.kv.num_reused)
        ranks.engine.release("a")
        ranks.assert_idle()
        await ranks.close()
        return ranks.told["a"], starts, reused

    told, starts, reused = asyncio.run(run())
    assert told == 12
    assert starts == [12, 16, 20, 24, 28]
    assert (reused["device"], reused["host"]) == ((12, 0) if num_blocks == 30 else (0, 12))


def test_fault_d16_a_request_in_its_last_step_is_not_preempted():
    async def run():
        ranks = SymbolicRanks(block=4)
        task = ranks.submit("a", range(10))
        await ranks.settle()
        ranks.engine.preempt("a")
        ranks.answer()
        await task
        source = ranks.engine.source("a")
        assert len(source.tables["kv"]) == 3
        assert source.stop == 10

    asyncio.run(run())


@pytest.mark.parametrize(
    ("shards", "block", "length", "units"), [(2, 16, 601, 18), (4, 4, 33, 2), (1, 16, 601, 37)]
)
def test_fault_h04_full_entries_are_counted_over_all_ranks(shards, block, length, units):
    placement = Placement.simple(RoundRobin(shards))
    assert num_full_entries(placement, Paged(block), length) == units


def test_fault_h10_a_reset_empties_every_tier_and_says_so():
    async def run():
        ranks = SymbolicRanks(block=4, num_blocks=20, host_units=40)
        await ranks.serve("a", range(40))
        running = ranks.submit("b", range(50, 90))  # what runs now is known to nobody later
        await ranks.settle()
        assert ranks.engine.reset_prefix_cache() == {"device": 10, "host": 10}
        ranks.answer()
        await running
        ranks.engine.release("b")
        assert await ranks.serve("c", range(40)) == 0
        assert await ranks.serve("d", range(50, 90)) == 0
        ranks.assert_idle()

    asyncio.run(run())


def test_fault_h13_groups_of_different_blocks_share_one_hit():
    """Blocks of 4 and of 8 over DCP 2, 24 tokens known: both groups reuse 24, from whole entries
    and by rows."""
    spec = toy_spec(False)
    placement = Placement.simple(RoundRobin(2))
    groups = [
        CacheGroup("latent", spec.select(kind="latent"), Paged(4)),
        CacheGroup("indexer", spec.select(kind="indexer"), Paged(8)),
    ]
    cache = PrefixCache(KVLayout(spec, placement, groups), {"latent": 8, "indexer": 8})
    chain = PrefixHasher("content", 4).chain(range(30))
    first = cache.lease(cache.index.match(chain, 29), 30)
    cache.publish(chain, Trail(), first.tables, 24, None)
    again = cache.lease(cache.index.match(chain, 29), 30)
    assert again.length == 24
    assert again.tables["latent"][:3] == first.tables["latent"][:3]
    assert again.tables["indexer"][:1] == first.tables["indexer"][:1]
    assert again.copy.spans == {"indexer": [(16, 24)]}
    for lease in (first, again):
        cache.free(lease.sources)
        cache.free(lease.tables)
    cache.audit(idle=True)


def test_fault_f11_a_shared_length_that_no_block_ends_is_rounded_down():
    """Units of 4, two prompts that share 6 tokens."""
    ranks = SymbolicRanks(block=4, mtp=True)
    assert served(ranks, range(12), (*range(6), 50, 51, 52)) == [0, 4]


def test_tenants_share_nothing():
    async def run():
        ranks = SymbolicRanks(block=4, host_units=20)
        reused = []
        for i, salt in enumerate([None, "x", "y", "x", None]):
            reused.append(await ranks.serve(f"r{i}", range(20), salt))
        return reused

    assert asyncio.run(run()) == [0, 0, 0, 16, 16]


def one_bit(data):
    return bytes([sha256(data)[0] & 1])


@given(worlds(), scripts())
@settings(max_examples=EXAMPLES)
def test_fault_i05_a_hash_of_one_bit_serves_no_wrong_row(world, script):
    def weaken(ranks):
        ranks.engine.kv.hasher = evolve(ranks.engine.kv.hasher, digest=one_bit)

    asyncio.run(run_script(world, script, weaken))


@given(st.lists(st.integers(0, 1), min_size=9, max_size=9))
def test_fault_i05_block_tokens_alone_do_not_prove_a_hit(tokens):
    """All hashes are one: a block equal to another in another place is no hit."""
    ranks = SymbolicRanks(block=2, num_blocks=30, host_units=30)
    hasher = ranks.engine.kv.hasher
    ranks.engine.kv.hasher = evolve(hasher, digest=lambda data: b"")
    prompt = tuple(tokens)
    swapped = (*prompt[2:4], *prompt[:2], *prompt[4:])
    cached = served(ranks, prompt, swapped)[1]
    assert cached <= reusable([prompt], swapped, 2, False, [0])
