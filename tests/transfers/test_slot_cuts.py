"""Cuts of the runs of a link, against its tokens one by one."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.transfers.lower import SlotRuns
from kvflow.transfers.slot_cuts import cut_runs, grains_of, mirrored, take_runs

Run = tuple[int, int, int, int, int]
"""First source slot, its stride, first target slot, its stride, number of tokens."""

RUNS = st.lists(
    st.tuples(*[st.integers(0, 50), st.integers(1, 5)] * 2, st.integers(1, 9)), max_size=6
)


def slot_runs(runs: list[Run]) -> SlotRuns:
    return SlotRuns(*np.array(runs, np.int64).reshape(-1, 5).T, (0, 1), (2, 3))


def tokens(runs: list[Run]) -> list[tuple[int, int]]:
    """Source and target slot of every token."""
    return [(s + k * ds, d + k * dd) for s, ds, d, dd, count in runs for k in range(count)]


def expanded(runs: SlotRuns) -> list[tuple[int, int]]:
    columns = (runs.src, runs.src_stride, runs.dst, runs.dst_stride, runs.count)
    return tokens(list(zip(*(c.tolist() for c in columns), strict=True)))


@given(RUNS, st.integers(1, 12))
def test_parts_hold_the_same_tokens_in_order_and_all_but_the_last_are_full(
    runs: list[Run], size: int
) -> None:
    parts = cut_runs(slot_runs(runs), size)
    wanted = tokens(runs)
    assert [t for part in parts for t in expanded(part)] == wanted
    sizes = [part.num_tokens for part in parts]
    assert sizes == [min(size, len(wanted) - low) for low in range(0, len(wanted), size)]
    for part in parts:
        assert (part.count > 0).all()
        assert (part.src_heads, part.dst_heads) == ((0, 1), (2, 3))
    assert sum(map(len, parts)) <= len(runs) + len(parts)


@given(RUNS, st.data())
def test_runs_are_taken_by_a_mask_or_by_places(runs: list[Run], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))
    wanted = tokens([run for run, kept in zip(runs, mask, strict=True) if kept])
    taken = take_runs(slot_runs(runs), np.array(mask, bool))
    assert expanded(taken) == wanted
    assert expanded(take_runs(slot_runs(runs), np.flatnonzero(mask))) == wanted
    assert taken.src_heads == (0, 1)


@given(RUNS)
def test_the_way_back_swaps_both_sides(runs: list[Run]) -> None:
    there = slot_runs(runs)
    back = mirrored(there)
    assert expanded(back) == [(d, s) for s, d in tokens(runs)]
    assert (back.src_heads, back.dst_heads) == ((2, 3), (0, 1))
    whole = mirrored(evolve(there, src_heads=None))
    assert (whole.src_heads, whole.dst_heads) == ((2, 3), None)


@pytest.mark.parametrize(
    ("counts", "grains"),
    [
        ([1], [1]),
        ([7], [7]),
        ([16, 16, 16], [16, 16, 16]),
        ([16, 16, 1], [16, 16, 1]),  # a tail
        ([3, 16, 32, 16, 9], [3, 16, 16, 16, 3]),  # a head, a tail, and two that met
        ([1, 16, 1, 16, 16, 8], [1, 16, 1, 16, 16, 1]),
        ([4, 4, 4, 4, 64], [4, 4, 4, 4, 64]),  # most tokens are in the longest
        ([2, 2, 2, 5], [2, 2, 2, 5]),
        ([6, 4], [6, 4]),
        ([12, 4, 8], [12, 4, 4]),
    ],
)
def test_grains_are_those_of_most_tokens_and_of_the_others(
    counts: list[int], grains: list[int]
) -> None:
    assert grains_of(np.array(counts)).tolist() == grains


@given(st.lists(st.integers(1, 70), min_size=1, max_size=12))
def test_grains_divide_their_runs(counts: list[int]) -> None:
    grains = grains_of(np.array(counts))
    assert (np.array(counts) % grains == 0).all()
    assert len(set(grains.tolist())) <= 2
