"""A decode rank as a sender, and blocks that two requests share."""

import numpy as np
import pytest
import torch
from hisparse_world import (
    TOPK,
    Blocks,
    bare_step,
    greedy_tokens,
    hisparse_memory,
    paged_memory,
    prefilled,
    pull,
    pulled,
    request_of,
    small_spec,
    step,
)

from kvflow.engine.hisparse import HiSparseSizes, plan_copies
from kvflow.engine.hisparse.shared import written_entries
from kvflow.errors import KvflowError
from kvflow.kernels.rows import gather_rows

torch.set_num_threads(1)
SPEC = small_spec()


def rows_held(blocks, tables, component, length):
    """Packed rows [0, length) as pages hold them."""
    memory = blocks.memory
    group = memory.layout.group_of(component).name
    slots = blocks.bind(tables, length).slots(group, np.arange(length), 0)
    return gather_rows(memory.cache.pages[component], torch.from_numpy(slots))


@pytest.mark.parametrize("length", [13, 16, 41])
def test_what_was_flushed_can_be_sent(length):
    """Rows computed here, written to tail pages and mirrored, arrive at a prefill-like layout as
    pages would have sent them."""
    sides = []
    for memory in (paged_memory(SPEC, 8, 8), hisparse_memory(HiSparseSizes(4, 1, 4), SPEC, 8, 8)):
        blocks, back = Blocks(memory, 1), Blocks(paged_memory(SPEC, 5, 16), 2)
        tables, returned = blocks.take(48), back.take(48)
        bare_step(memory, [request_of("a", 0, 9, tables)], 4, 0)
        for seed, position in enumerate(range(9, length), 1):
            bare_step(memory, [request_of("a", position, 1, tables)], 4, seed)
        assert memory.gauges.get("tail_pages_dirty") != 0
        memory.flush("a")
        pull(blocks, tables, back, returned, length)
        sides.append((back, returned))
    for component in SPEC.names:
        there = [rows_held(blocks, tables, component, length) for blocks, tables in sides]
        assert torch.equal(*there), component


def test_an_unflushed_page_is_not_complete():
    """The check above is real: without the flush the newest rows are not on the host."""
    memory = hisparse_memory(HiSparseSizes(4, 1, 4), SPEC, 8, 8)
    blocks = Blocks(memory)
    tables = blocks.take(13)
    bare_step(memory, [request_of("a", 0, 13, tables)], 4, 0)
    before = rows_held(blocks, tables, "latent.0", 13)
    memory.flush("a")
    assert not torch.equal(before, rows_held(blocks, tables, "latent.0", 13))


def test_a_shared_tail_is_copied_before_it_is_written():
    """Two requests continue one prefix of 37 tokens, whose last block is partly filled, one after
    the other; each decodes what it decodes alone, and the first one's rows stay as they were."""
    source = prefilled(60, 37, 96)
    memory = hisparse_memory(HiSparseSizes(TOPK, 2, TOPK))
    blocks, tables = pulled(source, memory, [1])
    first = tables[1]
    other = {name: ids[:5] for name, ids in first.items()}
    for name, ids in blocks.take(48).items():
        other[name] = other[name] + ids
    shared = {(name, i) for name, ids in first.items() for i in ids[:5]}

    def allocate(group):
        return blocks.free[group].pop()

    copies = plan_copies(
        memory.layout, other, 37, 38, lambda group, i: (group, i) in shared, allocate
    )
    assert sorted((c.group, c.source) for c in copies) == [
        ("indexer", first["indexer"][4]),
        ("latent", first["latent"][4]),
    ]
    memory.copy_blocks(copies)
    wanted = greedy_tokens(source.blocks.memory, source.tables, source, 6, [1])
    before = rows_held(blocks, first, "latent.2", 37)
    start = source.first[1]
    a = step(memory, [("a", 37, [start], first), ("b", 37, [7], other)])
    assert a["a"].argmax(-1).tolist() == wanted[1][1:2]
    memory.forget("a")
    assert greedy_tokens(memory, {1: first}, source, 6, [1]) == wanted
    assert torch.equal(before, rows_held(blocks, first, "latent.2", 37))
    alone = hisparse_memory(HiSparseSizes(TOPK, 2, TOPK))
    _, own = pulled(source, alone, [1])
    assert torch.equal(a["b"], step(alone, [("b", 37, [7], own[1])])["b"])


def test_a_copy_has_the_rows_that_only_the_device_had():
    """The last page of a request that decodes is copied for another one: all its rows are there."""
    memory = hisparse_memory(HiSparseSizes(4, 2, 4), SPEC, 8, 8)
    blocks = Blocks(memory)
    tables, other = blocks.take(16), blocks.take(16)
    bare_step(memory, [request_of("a", 0, 9, tables)], 4, 0)
    for seed, position in enumerate(range(9, 13), 1):
        bare_step(memory, [request_of("a", position, 1, tables)], 4, seed)
    assert memory.gauges["tail_pages_dirty"] > 0
    mine = {name: [*ids] for name, ids in tables.items()}
    copies = plan_copies(
        memory.layout, mine, 13, 14, lambda group, _: True, lambda group: other[group][1]
    )
    assert [copy.source for copy in copies] == [tables[copy.group][1] for copy in copies]
    memory.copy_blocks(copies)
    copied = {name: rows_held(blocks, mine, name, 13) for name in SPEC.names}
    memory.flush("a")
    for name, rows in copied.items():
        assert torch.equal(rows, rows_held(blocks, tables, name, 13)), name
        assert rows[8:].any(dim=1).all(), name


def test_writing_into_anothers_block_is_refused():
    memory = hisparse_memory(HiSparseSizes(4, 2, 4), SPEC, 4, 8)
    bare_step(memory, [request_of("a", 0, 6, {"latent": [3, 5], "indexer": [0, 1]})], 4, 0)
    tables = {"latent": [3, 5], "indexer": [2, 3]}
    with pytest.raises(
        KvflowError,
        match="request 'b' writes block 5 of group 'latent', which another request holds too: copy",
    ):
        memory.open([request_of("b", 6, 1, tables)], frozenset())
    memory.open([request_of("b", 6, 1, {"latent": [3, 6], "indexer": [2, 3]})], frozenset())
    memory.forget("b")
    memory.forget("a")
    memory.open([request_of("b", 6, 1, tables)], frozenset())


@pytest.mark.parametrize(
    ("start", "stop", "entries"), [(0, 0, []), (3, 4, [0]), (3, 5, [0, 1]), (8, 9, [2])]
)
def test_entries_that_a_step_writes(start, stop, entries):
    layout = hisparse_memory(HiSparseSizes(4, 2, 4), SPEC, 4, 8).layout
    assert written_entries(layout, "latent", start, stop).tolist() == entries
