"""Placing: neighbours that lie together on both sides are one item, and no other byte changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import PlanError
from kvflow.layouts.record import Field, Record, index_record, latent_record
from kvflow.transfers.executors.place import Placing
from kvflow.transfers.lower import PageGeometry

RECORDS = (
    Record((Field("x", "uint8", 10),)),
    latent_record("fp8", latent_rank=512, rope_dim=64),
    index_record("fp8", index_dim=4),
    Record((Field("x", "uint8", 4),), "t e t2"),
)


def geometry(record: Record, block_size: int, num_blocks: int) -> PageGeometry:
    return PageGeometry(record, block_size, 0, record.page_pitch(block_size), num_blocks)


def row_bytes(at: PageGeometry, slot: int) -> list[int]:
    """Where the bytes of one token lie, a byte at a time."""
    found = []
    for piece in at.record.pieces(at.block_size):
        first = int(at.address(np.array([slot]), piece)[0])
        found += range(first, first + piece.nbytes)
    return found


@settings(deadline=None)
@given(st.data())
def test_tokens_arrive_and_nothing_else_changes(data: st.DataObject) -> None:
    """Slots come in pieces that follow each other, so that neighbours are often merged."""
    record = data.draw(st.sampled_from(RECORDS))
    sizes = [data.draw(st.sampled_from((2, 4, 16))) for _ in range(2)]
    src, dst = (geometry(record, size, 64 // size) for size in sizes)
    length = data.draw(st.sampled_from((1, 2, 4, 8)))
    firsts = st.permutations(range(0, 64, length))
    few = data.draw(st.integers(1, 64 // length))
    starts = [np.array(data.draw(firsts))[:few] for _ in range(2)]
    a, b = (np.add.outer(first, np.arange(length)).ravel() for first in starts)
    low = data.draw(st.integers(0, length - 1))  # a head and a tail that are shorter
    high = len(a) - data.draw(st.integers(0, length - 1 - low))
    a, b = a[low:high], b[low:high]
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    memory = rng.integers(0, 256, src.nbytes, np.uint8)
    before = rng.integers(0, 256, dst.nbytes, np.uint8)
    after, expected = before.copy(), before.copy()
    Placing.of(src, a, dst, b).copy(memory, after)
    for slot, to in zip(a, b, strict=True):
        expected[row_bytes(dst, int(to))] = memory[row_bytes(src, int(slot))]
    assert np.array_equal(after, expected)


@pytest.mark.parametrize(
    ("src", "dst", "lengths"),
    [
        ([0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 0, 1], [20, 40]),  # 2 neighbours, and 4
        ([0, 1, 2, 3, 6, 7, 8, 9, 12], [3, 4, 5, 6, 10, 11, 12, 13, 0], [10, 40]),  # and a tail
        ([0, 1, 2, 3], [4, 5, 6, 7], [40]),
        ([0, 1, 2, 3], [4, 5, 8, 9], [20]),  # a gap in the target alone
        ([0, 1, 4, 5], [4, 5, 6, 7], [20]),  # in the source alone
        ([0, 2, 4], [0, 1, 2], [10]),
        ([0, 1, 2, 8], [0, 1, 2, 8], [10, 30]),
        ([1, 0], [1, 0], [10]),
    ],
)
def test_neighbours_are_one_item(src: list[int], dst: list[int], lengths: list[int]) -> None:
    at = geometry(RECORDS[0], 16, 1)
    placing = Placing.of(at, np.array(src), at, np.array(dst))
    for one, nbytes in zip(placing.pieces, lengths, strict=True):
        assert {np.dtype(side.dtype).itemsize for side in one} == {nbytes}


def test_as_many_slots_on_both_sides_and_at_least_one() -> None:
    at = geometry(RECORDS[0], 16, 1)
    for src, dst in (([0], [0, 1]), ([], [])):
        with pytest.raises(PlanError, match=f"{len(src)} source slots for {len(dst)} target"):
            Placing.of(at, np.array(src, np.int64), at, np.array(dst, np.int64))
