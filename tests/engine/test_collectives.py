"""Steps of a group of ranks: the same collectives on all, balanced loads, no byte out of place."""

import numpy as np
import pytest
import torch
from engine_world import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_group import SENTINEL, Group, blocks_for, item

from kvflow.comm.threads import run_ranks
from kvflow.engine.api import InvalidRequest, Request
from kvflow.engine.memory import balanced_deal
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner

# --- the same calls on every rank (A01, A10)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
@pytest.mark.parametrize(("pcp", "dcp"), [(2, 2), (4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("lengths", [[1], [2], [3], [5], [2, 9], [1, 1, 1]])
def test_a01_every_rank_makes_the_same_calls(pcp, dcp, lengths, kv_dtype):
    group = Group(pcp, dcp, kv_dtype=kv_dtype)
    items, first = [], 0
    for i, n in enumerate(lengths):
        table = blocks_for(group, n, first)
        first += len(table)
        items.append(item(f"r{i}", 0, n, table))
    traces, tokens = group.run([items])
    assert all(trace == traces[0] for trace in traces)
    assert len(traces[0]) > 0
    assert set(tokens) == {f"r{i}" for i in range(len(lengths))}
    # per layer and component one all-gather of new rows, whatever the ranks hold
    gathers = [op for op, _ in traces[0] if op == "all_gather"]
    assert len(gathers) >= len(group.layout.spec.names)


@pytest.mark.parametrize("lengths", [[1], [2], [3], [5], [2, 9]])
def test_a01_tokens_of_tiny_prompts_equal_one_rank(lengths):
    def tokens(pcp, dcp):
        group = Group(pcp, dcp)
        items, first = [], 0
        for i, n in enumerate(lengths):
            table = blocks_for(group, n, first)
            first += len(table)
            items.append(item(f"r{i}", 0, n, table))
        return group.run([items])[1]

    assert tokens(2, 2) == tokens(1, 1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_a10_ranks_without_tokens_join_every_call(length):
    """DCP=4 with block and interleave 16: up to three ranks own nothing of the cache."""
    group = Group(4, 4, interleave=16, block=16)
    table = blocks_for(group, length)
    traces, tokens = group.run([[item("a", 0, length, table)]])
    assert all(trace == traces[0] for trace in traces)
    assert tokens == Group(1, 1, block=16).run([[item("a", 0, length, [0, 1, 2])]])[1]


def test_a13_a_rank_alone_with_other_facts_is_caught_not_mixed_up():
    """Ranks decide nothing themselves: handed another step, a rank breaks the call for all."""
    group = Group(2, 2)

    def rank(comm):
        runner = StepRunner.over(
            group.models[comm.rank], group.layout, group.caches[comm.rank], comm
        )
        return runner.run([item("a", 0, 6 - comm.rank, [0, 1])])

    with pytest.raises(Exception, match="differs between ranks"):
        run_ranks(2, rank)


def test_a23_a_prompt_without_tokens_is_refused_at_the_door():
    with pytest.raises(InvalidRequest, match="at least one token id") as caught:
        Request("a", (), greedy(1))
    assert caught.value.param == "prompt"


# --- bytes (A02, A24)


def _assert_only(group, before, allowed):
    """Outside the cells, no byte of any rank's cache has changed since `before`."""
    for rank, cache in enumerate(group.caches):
        for name, view in cache.pages.items():
            same = view.memory == before[rank][name]
            for cell in allowed:
                if cell.rank == rank and cell.component == name:
                    same[group.places(cell)] = True
            assert bool(same.all()), (rank, name)


@pytest.mark.parametrize(("pcp", "dcp", "interleave"), [(2, 2, 1), (2, 1, 1), (2, 2, 3)])
@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
def test_a02_a_step_touches_exactly_its_slots(pcp, dcp, interleave, kv_dtype):
    """16 tokens, then 5 tokens of another request through the same buffers."""
    group = Group(pcp, dcp, interleave, kv_dtype=kv_dtype)
    first, second = blocks_for(group, 16), blocks_for(group, 5, 8)
    empty = group.images()
    group.run([[item("a", 0, 16, first)]])
    written = group.cells(first, 0, 16)
    _assert_only(group, empty, written)
    before = group.images()
    group.run([[item("b", 0, 5, second)]])
    fresh = group.cells(second, 0, 5)
    _assert_only(group, before, fresh)
    for cell in [c for c in fresh if len(c.at) >= 16]:  # shorter fields may hold any byte
        view = group.caches[cell.rank].pages[cell.component]
        assert not bool((view.memory[group.places(cell)] == SENTINEL).all())


@pytest.mark.parametrize(("dcp", "interleave"), [(1, 1), (2, 1), (2, 3)])
def test_a24_chunks_that_end_inside_a_block(dcp, interleave):
    """Chunk 6, block 4, prompt 13: rows equal those of the prompt in one piece, bit by bit."""
    whole, pieces = Group(2, dcp, interleave), Group(2, dcp, interleave)
    table = blocks_for(whole, 13)
    one = whole.run([[item("a", 0, 13, table)]])[1]
    steps = [[item("a", s, min(s + 6, 13), table, last=s + 6 >= 13)] for s in (0, 6, 12)]
    assert pieces.run(steps)[1] == one
    for a, b in zip(whole.images(), pieces.images(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# --- loads


@settings(max_examples=100)
@given(
    pcp=st.sampled_from([1, 2, 4, 8]),
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    starts=st.lists(st.integers(0, 50), min_size=6, max_size=6),
)
def test_loads_of_a_step_are_even(pcp, counts, starts):
    """max - min at most 1 (so below 2, and below 1.1 of the mean from 16 * PCP tokens on), however
    many requests share the step; every token is computed once."""
    items = [
        StepItem(f"r{i}", s, [0] * n, None, {}, None)
        for i, (n, s) in enumerate(zip(counts, starts, strict=False))
    ]
    loads, seen = [0] * pcp, []
    for one, deal in zip(items, balanced_deal([(r,) for r in range(pcp)])(items), strict=True):
        owners = [int(r) for r in deal.sharding.owner(np.arange(one.start, one.stop))]
        seen.append(len(owners))
        for r in owners:
            loads[r] += 1
    assert seen == counts
    assert max(loads) - min(loads) <= 1
    if sum(counts) >= 16 * pcp:
        assert max(loads) <= 1.1 * sum(loads) / pcp
