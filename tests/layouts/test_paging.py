"""Paging: slots, block-table sizes, and the two slot types that never stand for each other."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import (
    PADDING_SLOT,
    Dense,
    GlobalSlot,
    LocalSlot,
    Paged,
    Paging,
    Pool,
    bytes_of_slots,
    in_page,
    kernel_slots,
    num_entries,
    num_full_entries,
    open_spans,
    page_of,
    slots_of,
    to_global_slot,
    to_local_slot,
)
from kvflow.layouts.record import Piece
from kvflow.layouts.sharding import RoundRobin
from kvflow.testing import deal, placements, token_ranges


@given(placements(tokens=(0, 60)), st.integers(1, 9), st.integers(0, 60))
def test_num_entries_fits_the_fullest_shard_exactly(
    placement: Placement, block_size: int, length: int
) -> None:
    entries = num_entries(placement, Paged(block_size), length)
    fullest = max(len(hand) for hand in deal(placement.sharding, length))
    assert entries * block_size >= fullest
    assert (entries - 1) * block_size < fullest or entries == 0


def test_golden_virtual_block_is_consecutive_only_if_interleave_divides() -> None:
    """W=4, I=16, B=4: entry 0 holds 0-3, 16-19, 32-35, 48-51; 200 tokens need 14 ids, not 13."""
    deal_ = RoundRobin(4, 16)
    first = np.sort(np.concatenate([deal_.token(r, np.arange(4)) for r in range(4)]))
    assert first.tolist() == [t for base in (0, 16, 32, 48) for t in range(base, base + 4)]
    assert num_entries(Placement.simple(deal_), Paged(4), 200) == 14
    assert -(-200 // (4 * 4)) == 13


@given(st.integers(1, 8), st.lists(st.integers(0, 50), unique=True, max_size=9), st.data())
def test_slots_follow_the_block_table(
    block_size: int, table: list[int], data: st.DataObject
) -> None:
    expected = [b * block_size + o for b in table for o in range(block_size)]
    local = data.draw(st.permutations(range(len(expected))))
    slots = slots_of(Paged(block_size), table, local)
    assert slots.dtype == np.int64
    assert slots.tolist() == [expected[i] for i in local]
    with pytest.raises(LayoutError, match=f"block table of {len(table)} entries of {block_size}"):
        slots_of(Paged(block_size), table, [len(expected)])
    with pytest.raises(LayoutError, match="local index -1 needs entry"):
        slots_of(Paged(block_size), table, [-1, 0])


def test_slot_messages_hold_the_index_and_its_entry() -> None:
    with pytest.raises(LayoutError, match=r"local index 9 needs entry 4 of a block table of 2"):
        slots_of(Paged(2), [5, 6], [0, 9])


@given(st.integers(1, 9), st.integers(0, 200))
def test_a_slot_is_its_page_and_its_place_in_it(block_size: int, slot: int) -> None:
    page, place = divmod(slot, block_size)
    assert (page_of(slot, block_size), in_page(slot, block_size)) == (page, place)
    both = page_of(np.array([slot]), block_size), in_page(np.array([slot]), block_size)
    assert [array.tolist() for array in both] == [[page], [place]]


def test_golden_bytes_of_slots() -> None:
    """Pages of 4 slots, 100 bytes apart; the piece begins at 7, a slot further on every 3 bytes."""
    piece = Piece(offset=7, stride=3, nbytes=2, record_offset=0)
    slots = np.array([0, 1, 3, 4, 9])
    assert bytes_of_slots(slots, 4, 100, piece).tolist() == [7, 10, 16, 107, 210]
    assert bytes_of_slots(2**40 + 1, 4, 100, piece) == 2**38 * 100 + 10


def test_the_first_index_that_the_table_does_not_reach_is_named() -> None:
    with pytest.raises(LayoutError, match="local index -3 needs entry -2 of a block table of 2"):
        slots_of(Paged(2), [5, 6], [0, -3, 9])
    with pytest.raises(LayoutError, match="local index 4 needs entry 2 of a block table of 2"):
        slots_of(Paged(2), [5, 6], [4, 9, -1])


def test_slots_are_exact_beyond_32_bits() -> None:
    assert int(slots_of(Paged(64), [2**33], 63)) == 2**39 + 63


def test_the_three_pagings() -> None:
    assert Dense(100).block_size == Dense(100).capacity == 100
    assert Pool().block_size == 1
    assert Paged(16).block_size == 16
    assert [str(p) for p in (Dense(9), Pool(4), Paged(16))] == ["dense(9)", "pool(4)", "paged(16)"]
    for kind in (Dense, Pool, Paged):
        assert isinstance(kind(3), Paging)
        with pytest.raises(LayoutError, match="= 0, must be at least 1"):
            kind(0)
    assert slots_of(Dense(10), [0], [3, 9]).tolist() == [3, 9]


@given(token_ranges(), st.data())
def test_kernel_slots_are_padding_exactly_where_another_rank_owns(
    tokens: tuple[int, int], data: st.DataObject
) -> None:
    start, stop = tokens
    placement = data.draw(placements(tokens))
    size = data.draw(st.integers(1, 5))
    pool = num_entries(placement, Paged(size), stop)
    table = data.draw(st.permutations(range(pool)))
    for hand, ranks in zip(deal(placement.sharding, stop), placement.ranks, strict=True):
        for rank in ranks:
            slots = kernel_slots(placement, Paged(size), table, np.arange(start, stop), rank)
            expected = [PADDING_SLOT] * (stop - start)
            for local, t in enumerate(hand):
                if t >= start:
                    expected[t - start] = table[local // size] * size + local % size
            assert slots.tolist() == expected
    assert PADDING_SLOT == -1


def test_fault_a02_a_second_step_names_exactly_its_own_slots() -> None:
    """Step 1 computes 16 tokens, step 2 five more: nothing of step 1 is named again."""
    placement, table = Placement.simple(RoundRobin(2, 1)), [3, 0, 2]
    for rank in range(2):
        first = kernel_slots(placement, Paged(4), table, range(16), rank)
        second = kernel_slots(placement, Paged(4), table, range(16, 21), rank)
        assert not set(first[first >= 0]) & set(second[second >= 0])
        assert (second >= 0).tolist() == [t % 2 == rank for t in range(16, 21)]
    assert (
        sum(
            int((kernel_slots(placement, Paged(4), table, range(16, 21), r) >= 0).sum())
            for r in range(2)
        )
        == 5
    )


@pytest.mark.parametrize("interleave", [1, 8, 16, 24, 64])
def test_fault_a15_global_slots_exist_only_if_interleave_divides_the_block(
    interleave: int,
) -> None:
    deal_, paging = RoundRobin(4, interleave), Paged(16)
    if 16 % interleave:
        rule = f"interleave {interleave} does not divide block_size 16"
        with pytest.raises(LayoutError, match=rule):
            to_local_slot(GlobalSlot(0), deal_, paging)
        with pytest.raises(LayoutError, match=rule):
            to_global_slot(LocalSlot(0, 0), deal_, paging)
        return
    for index in range(200):
        local = to_local_slot(GlobalSlot(index), deal_, paging)
        assert local.rank == index // interleave % 4
        assert to_global_slot(local, deal_, paging) == GlobalSlot(index)


def test_fault_a18_global_slots_are_not_local_slots() -> None:
    """DCP=4, a pool of 16 rows on each rank: global slots 0..63, and slot 17 on its own."""
    deal_, paging = RoundRobin(4, 1), Paged(4)
    places = [to_local_slot(GlobalSlot(i), deal_, paging) for i in range(64)]
    assert len(set(places)) == 64
    assert {p.index for p in places} == set(range(16))
    assert to_local_slot(GlobalSlot(17), deal_, paging) == LocalSlot(1, 4)
    assert to_local_slot(GlobalSlot(16), deal_, paging) == LocalSlot(0, 4)
    with pytest.raises(LayoutError, match=r"expected a GlobalSlot, got LocalSlot"):
        to_local_slot(LocalSlot(0, 17), deal_, paging)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"expected a LocalSlot, got GlobalSlot"):
        to_global_slot(GlobalSlot(17), deal_, paging)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="expected a LocalSlot, got 17"):
        to_global_slot(17, deal_, paging)  # type: ignore[arg-type]
    assert GlobalSlot(17) != LocalSlot(0, 17)


def test_fault_a24_capacity_is_pages_times_block_times_shards() -> None:
    """PCP=2, prefill chunk 6, block 4, prompt 13: the second chunk starts inside a block."""
    for interleave in (1, 4):
        placement = Placement.simple(RoundRobin(2, interleave))
        entries = num_entries(placement, Paged(4), 13)
        assert entries * 4 * 2 >= 13
        assert entries == 2
    second = BalancedChunks(2, 6, 12)
    assert sorted(t for hand in deal(second, 12) for t in hand) == list(range(6, 12))


def test_fault_f10_logical_and_kernel_blocks_of_another_size_map_one_to_one() -> None:
    """Logical block 640 over kernel pages of 64: ten pages each, no byte shared, none left."""
    table = [7, 2]
    kernel = [b * 10 + i for b in table for i in range(10)]
    t = np.arange(1280)
    slots = slots_of(Paged(64), kernel, t)
    assert slots.tolist() == slots_of(Paged(640), table, t).tolist()
    assert len(set(slots.tolist())) == 1280


@given(token_ranges(), st.integers(1, 5), st.data())
def test_entries_that_are_full_and_positions_in_those_that_are_not(
    tokens: tuple[int, int], size: int, data: st.DataObject
) -> None:
    """Against the tokens of each shard, written down one by one."""
    placement = data.draw(placements(tokens))
    length = data.draw(st.integers(*tokens))
    hands = deal(placement.sharding, length)
    full = min(len(hand) for hand in hands) // size
    assert num_full_entries(placement, Paged(size), length) == full
    free = {t for hand in hands for at, t in enumerate(hand) if at // size >= full}
    spans = open_spans(placement, Paged(size), length)
    assert [t for a, b in spans for t in range(a, b)] == sorted(free)
    assert all(a < b for a, b in spans)
    assert all(b < a for (_, b), (a, _) in pairwise(spans))


def test_open_spans_by_hand() -> None:
    dealt = Placement.simple(RoundRobin(4, 16))
    spans = [open_spans(dealt, Paged(4), length) for length in (0, 1, 52, 64, 70)]
    assert spans == [[], [(0, 1)], [(4, 16), (20, 32), (36, 48)], [], [(64, 70)]]
    pairs = Placement.simple(RoundRobin(2, 2))  # 0 1 4 5 and 2 3 6 7: one token of each is behind
    assert open_spans(pairs, Paged(3), 8) == [(5, 6), (7, 8)]
