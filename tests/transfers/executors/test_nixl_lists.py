"""Prepared lists and staging: index arithmetic against slots written out, without NIXL."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import CapacityError
from kvflow.layouts.record import Field, Record
from kvflow.transfers.executors.nixl_lists import elements, grains
from kvflow.transfers.executors.staging import ALIGNMENT, StagingArea
from kvflow.transfers.lower import PageGeometry, SlotRuns
from kvflow.transfers.slot_cuts import cut_runs, take_runs

ROW = Record((Field("x", "uint8", 10), Field("y", "uint8", 2)))


def pages(block_size: int, record: Record = ROW) -> PageGeometry:
    return PageGeometry(record, block_size, 0, record.page_pitch(block_size), 64)


@st.composite
def slot_runs(draw: st.DrawFn) -> SlotRuns:
    run = st.tuples(
        st.integers(0, 64), st.integers(1, 3), st.integers(0, 64), st.integers(1, 3),
        st.integers(1, 40),
    )  # fmt: skip
    rows = draw(st.lists(run, min_size=1, max_size=6))
    return SlotRuns(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def pairs(runs: SlotRuns) -> list[tuple[int, int]]:
    """Token by token, the slow way."""
    columns = (runs.src, runs.src_stride, runs.dst, runs.dst_stride, runs.count)
    return [
        (int(s + k * a), int(d + k * b))
        for s, a, d, b, n in zip(*columns, strict=True)
        for k in range(n)
    ]


@given(runs=slot_runs(), sizes=st.tuples(*[st.sampled_from([4, 6, 16])] * 2))
def test_elements_of_every_grain_are_the_tokens_of_the_runs(runs, sizes) -> None:
    seen = []
    for grain, some in grains(runs, pages(sizes[0]), pages(sizes[1])):
        assert sizes[0] % grain == sizes[1] % grain == 0
        src, dst = elements(some, grain)
        seen += [(s * grain + k, d * grain + k) for s, d in zip(src, dst, strict=True)
                 for k in range(grain)]  # fmt: skip
    assert sorted(seen) == sorted(pairs(runs))


def test_a_grain_is_as_coarse_as_both_sides_allow() -> None:
    runs = SlotRuns(*np.array([[0, 1, 16, 1, 16], [3, 1, 3, 1, 5], [64, 2, 0, 1, 4]]).T.copy())
    found = {n: len(some) for n, some in grains(runs, pages(16), pages(64))}
    assert found == {1: 2, 16: 1}
    heads = Record((Field("x", "uint8", 4, 2),), "t h e")
    cut = evolve(runs, src_heads=(0, 1), dst_heads=(1, 2))
    assert [n for n, _ in grains(cut, pages(16, heads), pages(16, heads))] == [1]


@given(runs=slot_runs(), size=st.integers(1, 50))
def test_cutting_keeps_every_token_and_its_order(runs, size) -> None:
    runs = evolve(runs, src_heads=(0, 1), dst_heads=(2, 3))
    parts = cut_runs(runs, size)
    assert [p for part in parts for p in pairs(part)] == pairs(runs)
    assert all(part.num_tokens == size for part in parts[:-1])
    assert all((p.src_heads, p.dst_heads) == ((0, 1), (2, 3)) for p in parts)
    assert len(take_runs(runs, np.zeros(len(runs), bool))) == 0


@given(
    loans=st.lists(st.tuples(st.integers(1, 300), st.sampled_from([64, 96, 100]), st.booleans())),
)
def test_staging_never_lends_a_byte_twice(loans) -> None:
    area, lent = StagingArea(1000), {}
    for nbytes, alignment, end_one in loans:
        if end_one and lent:
            area.give_back(lent.popitem()[0])
        at = area.lend(nbytes, alignment)
        if at is None:
            free = 1000 - sum(lent.values())
            assert free < nbytes + alignment or len(lent) > 0
            continue
        assert at % alignment == 0
        assert at + nbytes <= 1000
        assert all(at + nbytes <= a or a + n <= at for a, n in lent.items())
        lent[at] = nbytes
    assert area.num_lent == len(lent)


def test_staging_waits_and_refuses() -> None:
    area = StagingArea(2 * ALIGNMENT)
    first = area.lend(100)
    assert area.lend(100) is None
    with pytest.raises(CapacityError, match=r"became free in 0\.010 s"):
        area.wait_lend(100, 0.01)
    area.give_back(first)
    assert area.wait_lend(100, 0.01, 1) == first
    with pytest.raises(CapacityError, match="from staging of 128"):
        area.lend(129)
    with pytest.raises(CapacityError, match="at least 64"):
        StagingArea(63)
