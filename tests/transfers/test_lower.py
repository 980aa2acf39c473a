"""Lowering: slots, byte addresses and descriptors, against bytes counted one by one."""

import re

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from planning import bound, dcp, layout, moves, whole, with_runs

from kvflow.errors import PlanError
from kvflow.layouts.layout import Binding
from kvflow.layouts.mesh import Placement
from kvflow.layouts.record import Field, Piece, Record, index_record, latent_record
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.testing import Case, cases, cells, tag
from kvflow.transfers.lower import (
    BoundPlan,
    Descriptors,
    PageGeometry,
    SlotRuns,
    descriptors,
    paired_pieces,
)
from kvflow.transfers.planner import plan_transfer

LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
PLANAR = index_record("fp8", index_dim=128)
ROWS = index_record("fp8", index_dim=128, arrangement="row")


def geometries(binding: Binding, base: int, gap: int) -> dict[tuple[int, str], PageGeometry]:
    """Every (rank, component) behind the one before it, in one imaginary address space."""
    out = {}
    for rank in binding.layout.ranks:
        for group in binding.layout.groups:
            size, pages = group.paging.block_size, binding.num_blocks[group.name]
            for name in sorted(set(group.components) & set(binding.layout.components_of(rank))):
                record = binding.layout.local_record(name, rank)
                stride = record.page_pitch(size) + gap
                out[rank, name] = PageGeometry(record, size, base, stride, pages)
                base += pages * stride
    return out


@given(case=cases(max_tokens=30, max_shards=4), gaps=st.tuples(*[st.sampled_from([0, 5])] * 2))
def test_descriptors_move_the_bytes_of_the_law(case: Case, gaps: tuple[int, int]) -> None:
    """One bytearray is the world: descriptors are carried out as they stand."""
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    both = BoundPlan(plan, case.src, case.dst)
    src = geometries(case.src, 0, gaps[0])
    begin = sum(g.num_blocks * g.block_stride for g in src.values())
    dst = geometries(case.dst, begin, gaps[1])
    end = begin + sum(g.num_blocks * g.block_stride for g in dst.values())
    world, wanted = bytearray(b"\x5a" * end), bytearray(b"\x5a" * end)

    def fill(memory: bytearray, binding: Binding, where: dict, tokens: tuple[int, int]) -> None:
        for cell in cells(binding.layout, binding, tokens, SPEC_NAMES):
            g = where[cell.rank, cell.component]
            data = tag(cell)
            for at, value in zip(cell.at, data, strict=True):
                memory[g.base + cell.block_id * g.block_stride + at] = value

    SPEC_NAMES = plan.src.spec.names  # noqa: N806
    fill(world, case.src, src, (0, case.tokens[1]))
    fill(wanted, case.src, src, (0, case.tokens[1]))
    fill(wanted, case.dst, dst, case.tokens)
    totals = [0, 0]
    for stage, (lists, sides) in enumerate(((both.links_to, src), (both.copies_to, dst))):
        for dst_rank in plan.dst.ranks:
            for part, src_rank, runs in lists(dst_rank):
                for name in part.components:
                    here, there = sides[src_rank, name], dst[dst_rank, name]
                    d = descriptors(runs, here, there)
                    totals[stage] += d.total_nbytes
                    for a, b, n in as_rows(d):
                        inside(here, a, n)
                        inside(there, b, n)
                        world[b : b + n] = world[a : a + n]
    assert world == wanted
    assert totals == [plan.link_nbytes, plan.nbytes - plan.link_nbytes]


def inside(g: PageGeometry, address: int, nbytes: int) -> None:
    assert nbytes > 0
    assert g.base <= address
    assert address + nbytes <= g.base + g.nbytes


@given(case=cases(max_tokens=30, max_shards=4))
def test_links_from_and_to_tell_the_same_story(case: Case) -> None:
    both = BoundPlan(
        plan_transfer(case.src.layout, case.dst.layout, case.tokens), case.src, case.dst
    )

    def story(part, src_rank, dst_rank, runs):
        pairs = list(zip(*(slots.tolist() for slots in runs.expand()), strict=True))
        assert len(pairs) == runs.num_tokens
        assert len(pairs) > 0
        return (part.components, part.heads), src_rank, dst_rank, pairs

    to = [story(p, s, d, runs) for d in both.dst.layout.ranks for p, s, runs in both.links_to(d)]
    out = [story(p, s, d, runs) for s in both.src.layout.ranks for p, d, runs in both.links_from(s)]
    assert sorted(to) == sorted(out)
    assert {(s, d) for _, s, d, _ in to} == set(both.plan.links)
    for part in both.plan.parts:
        for _, s, d, pairs in (x for x in to if x[0] == (part.components, part.heads)):
            want = [(m[1], m[3]) for m in moves(part.runs) if (m[0], m[2]) == (s, d)]
            assert pairs == [
                (slot(both.src, part.src_group, a), slot(both.dst, part.dst_group, b))
                for a, b in want
            ]


def slot(binding: Binding, group: str, local: int) -> int:
    size = binding.layout.group(group).paging.block_size
    return int(binding.tables[group][local // size]) * size + local % size


def runs_of(*rows: tuple[int, int, int, int, int]) -> SlotRuns:
    columns = np.array(rows, np.int64).reshape(len(rows), 5).T
    return SlotRuns(*columns)


def as_rows(d: Descriptors) -> list[tuple[int, int, int]]:
    return list(zip(d.src.tolist(), d.dst.tolist(), d.nbytes.tolist(), strict=True))


def test_runs_expand_slot_by_slot() -> None:
    source, target = runs_of((0, 2, 1, 3, 3), (9, 1, 5, 4, 2), (7, 5, 7, 5, 1)).expand()
    assert source.tolist() == [0, 2, 4, 9, 10, 7]
    assert target.tolist() == [1, 4, 7, 5, 9, 7]


def test_a_plan_is_proven_before_it_is_bound() -> None:
    plan = plan_transfer(dcp(2), whole(), (0, 8))
    BoundPlan(plan, bound(plan.src, 8), bound(plan.dst, 8))
    fewer = with_runs(plan, plan.parts[0].runs.take(np.arange(1, plan.num_runs)))
    with pytest.raises(PlanError, match="target rank 0 gets 6 tokens"):
        BoundPlan(fewer, bound(plan.src, 8), bound(plan.dst, 8))
    with pytest.raises(PlanError, match="valid KV only below 7"):
        BoundPlan(plan, bound(plan.src, 7), bound(plan.dst, 8))


def test_a_whole_planar_page_is_one_descriptor_and_a_cut_one_is_one_a_field() -> None:
    src = PageGeometry(PLANAR, 64, 0, 8448, 4)
    dst = PageGeometry(PLANAR, 64, 100_000, 8448, 4)
    assert as_rows(descriptors(runs_of((0, 1, 64, 1, 64)), src, dst)) == [(0, 108_448, 8448)]
    cut = descriptors(runs_of((16, 1, 64, 1, 32)), src, dst)
    assert as_rows(cut) == [
        (16 * 128, 108_448, 32 * 128),
        (8192 + 16 * 4, 108_448 + 8192, 32 * 4),
    ]


def test_fault_c01_a_16_token_page_merged_into_a_64_token_page_is_two_pieces() -> None:
    src = PageGeometry(PLANAR, 16, 0, 16 * 132, 4)
    dst = PageGeometry(PLANAR, 64, 0, 64 * 132, 1)
    got = descriptors(runs_of((16, 1, 16, 1, 16)), src, dst)
    assert as_rows(got) == [(16 * 132, 16 * 128, 2048), (16 * 132 + 2048, 8192 + 64, 64)]
    rows = descriptors(
        runs_of((16, 1, 16, 1, 16)),
        PageGeometry(LATENT, 16, 0, 16 * 656, 4), PageGeometry(LATENT, 64, 0, 64 * 656, 1),
    )  # fmt: skip
    assert as_rows(rows) == [(16 * 656, 16 * 656, 16 * 656)]


def test_neighbouring_pages_merge_and_others_do_not() -> None:
    src, dst = PageGeometry(LATENT, 4, 0, 2624, 9), PageGeometry(LATENT, 4, 0, 2624, 9)
    page = 2624
    merged = descriptors(runs_of((8, 1, 4, 1, 4), (4, 1, 0, 1, 4), (12, 1, 8, 1, 4)), src, dst)
    assert as_rows(merged) == [(page, 0, 3 * page)]
    apart = descriptors(runs_of((0, 1, 0, 1, 4), (8, 1, 4, 1, 4)), src, dst)
    assert as_rows(apart) == [(0, 0, page), (2 * page, page, page)]
    gap = PageGeometry(LATENT, 4, 0, 2625, 9)
    assert len(descriptors(runs_of((0, 1, 0, 1, 4), (4, 1, 4, 1, 4)), src, gap)) == 2
    assert len(descriptors(runs_of((0, 1, 0, 1, 4), (4, 1, 4, 1, 4)), gap, src)) == 2


def test_strided_rows_are_one_descriptor_each() -> None:
    src, dst = PageGeometry(LATENT, 4, 0, 2624, 9), PageGeometry(LATENT, 64, 0, 64 * 656, 9)
    got = descriptors(runs_of((0, 1, 1, 8, 3)), src, dst)
    assert as_rows(got) == [(0, 656, 656), (656, 9 * 656, 656), (2 * 656, 17 * 656, 656)]
    back = descriptors(runs_of((1, 8, 0, 1, 3)), dst, src)
    assert as_rows(back) == [(656, 0, 656), (9 * 656, 656, 656), (17 * 656, 2 * 656, 656)]
    assert len(descriptors(runs_of((5, 3, 2, 7, 1)), src, dst)) == 1


def test_rows_to_planes_go_field_by_field() -> None:
    got = descriptors(
        runs_of((0, 1, 0, 1, 2)),
        PageGeometry(ROWS, 4, 0, 528, 1), PageGeometry(PLANAR, 4, 1000, 528, 1),
    )  # fmt: skip
    assert as_rows(got) == [
        (0, 1000, 128), (132, 1128, 128), (128, 1512, 4), (260, 1516, 4),
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"records differ: source key:.*target latent:"):
        descriptors(runs_of((0, 1, 0, 1, 1)), PageGeometry(PLANAR, 4, 0, 528, 1),
                    PageGeometry(LATENT, 4, 0, 2624, 1))  # fmt: skip


def test_neighbours_of_several_sizes_merge() -> None:
    columns = zip((20, 113, 5), (0, 100, 4), (10, 110, 3), (4, 104, 6), strict=True)
    pieces = Descriptors(*(np.array(column, np.int64) for column in columns))
    assert as_rows(pieces.coalesced()) == [(0, 100, 13), (20, 113, 5)]
    for other in ([(0, 100, 4), (4, 105, 6)], [(0, 100, 4), (5, 104, 6)]):
        columns = zip(*other, strict=True)
        apart = Descriptors(*(np.array(column, np.int64) for column in columns))
        assert as_rows(apart.coalesced()) == other


def test_a_contiguous_run_is_never_taken_apart() -> None:
    """A million million tokens: their descriptors one by one would fit no memory."""
    record, many = Record((Field("a", "uint8", 3),)), 10**12
    page = PageGeometry(record, many, 7, 3 * many, 1)
    assert as_rows(descriptors(runs_of((0, 1, 0, 1, many)), page, page)) == [(7, 7, 3 * many)]


def test_no_runs_are_no_descriptors() -> None:
    geometry = PageGeometry(PLANAR, 4, 0, 528, 1)
    none = descriptors(runs_of(), geometry, geometry)
    assert (len(none), none.total_nbytes) == (0, 0)
    assert len(none.coalesced()) == 0
    assert runs_of().num_tokens == 0


def test_whole_blocks_are_told_from_everything_else() -> None:
    yes = runs_of((8, 1, 0, 1, 4), (0, 1, 12, 1, 4)).whole_blocks(4, 4)
    assert yes is not None
    assert [ids.tolist() for ids in yes] == [[2, 0], [0, 3]]
    for row in [(8, 1, 0, 1, 3), (9, 1, 0, 1, 4), (8, 1, 1, 1, 4), (8, 2, 0, 1, 4),
                (8, 1, 0, 2, 4), (8, 1, 0, 1, 5)]:  # fmt: skip
        assert runs_of((8, 1, 0, 1, 4), row).whole_blocks(4, 4) is None, row
    assert runs_of((8, 1, 0, 1, 4)).whole_blocks(4, 8) is None
    assert runs_of((8, 1, 0, 1, 8)).whole_blocks(4, 8) is None


def test_geometry_counts_bytes_and_refuses_a_stride_below_its_page() -> None:
    assert PageGeometry(LATENT, 4, 7, 2624, 3).nbytes == 3 * 2624
    assert PageGeometry(LATENT, 4, 7, 3000, 3).nbytes == 2 * 3000 + 2624
    assert PageGeometry(LATENT, 4, 7, 3000, 1).nbytes == 2624
    assert PageGeometry(LATENT, 4, 7, 3000, 0).nbytes == 0
    with pytest.raises(PlanError, match="block_stride 2623 is below the page's 2624 bytes"):
        PageGeometry(LATENT, 4, 0, 2623, 1)
    piece = Piece(10, 3, 3, 0)
    address = PageGeometry(LATENT, 4, 7, 3000, 3).address(np.array([0, 5, 11]), piece)
    assert address.tolist() == [17, 7 + 3000 + 10 + 3, 7 + 6000 + 10 + 9]


@pytest.mark.parametrize(
    ("row_nbytes", "last_good"),
    [(656, 3_273_603), (1152, 1_864_135), (78 * 656, 41_969), (576, 7_456_540)],
)
def test_fault_j05_byte_offsets_are_exact_beyond_31_bits(row_nbytes: int, last_good: int) -> None:
    record = Record((Field("row", "uint8", row_nbytes),))
    geometry = PageGeometry(record, 1, 0, row_nbytes, last_good + 10)
    slots = np.array([last_good, last_good + 1], np.int64)
    addresses = geometry.address(slots, record.pieces(1)[0])
    assert addresses.dtype == np.int64
    assert addresses.tolist() == [last_good * row_nbytes, (last_good + 1) * row_nbytes]
    assert addresses[0] < 2**31 <= addresses[1] or row_nbytes == 576
    got = descriptors(runs_of((last_good, 1, 0, 1, 2)), geometry, geometry)
    assert as_rows(got) == [(last_good * row_nbytes, 0, 2 * row_nbytes)]


def test_fault_k08_contiguous_pages_merge_and_the_count_is_known() -> None:
    """64K tokens in blocks of 64: 1,024 pages a layer, one descriptor when the pool is in order."""
    spec = KVCacheSpec.from_config(GLM_5_3)
    side = layout(Replicated(), 64, spec)
    plan = plan_transfer(side, side, (0, 65_536))
    ordered = Binding.of(side, {"kv": range(1024)}, {"kv": 1024}, 65_536)
    geometry = PageGeometry(LATENT, 64, 0, 64 * 656, 1024)
    runs = BoundPlan(plan, ordered, ordered).link(plan.parts[0], 0, 0)
    assert len(runs) == 1024
    assert len(descriptors(runs, geometry, geometry)) == 1
    backwards = Binding.of(side, {"kv": range(1024)[::-1]}, {"kv": 1024}, 65_536)
    runs = BoundPlan(plan, backwards, ordered).link(plan.parts[0], 0, 0)
    assert len(descriptors(runs, geometry, geometry)) == 1024


def test_fault_c11_every_descriptor_lies_inside_one_region() -> None:
    for src, dst in [(dcp(4, 1, 16), whole(64)), (whole(64), dcp(4, 1, 16))]:
        plan = plan_transfer(src, dst, (0, 100))
        both = BoundPlan(plan, bound(src, 100), bound(dst, 100))
        sizes = [side.groups[0].paging.block_size for side in (src, dst)]
        pools = [b.num_blocks["kv"] for b in (both.src, both.dst)]
        for record in (LATENT, PLANAR):
            here, there = (
                PageGeometry(record, size, 2**40, record.page_nbytes(size), pool)
                for size, pool in zip(sizes, pools, strict=True)
            )
            for rank in dst.placement.all_ranks:
                for _, _, runs in both.links_to(rank):
                    for a, b, n in as_rows(descriptors(runs, here, there)):
                        inside(here, a, n)
                        inside(there, b, n)


def test_replicas_are_used_evenly_when_bytes_are_counted() -> None:
    src = layout(Placement(Replicated(), ((0, 1, 2, 3),)), 16)
    plan = plan_transfer(src, whole(16), (0, 16 * 40))
    both = BoundPlan(plan, bound(src, 640), bound(plan.dst, 640))
    assert [sum(r.num_tokens for _, _, r in both.links_from(s)) for s in range(4)] == [160] * 4


def heads_of(runs: SlotRuns, src: tuple[int, int] | None, dst: tuple[int, int] | None) -> SlotRuns:
    return evolve(runs, src_heads=src, dst_heads=dst)


KEYS = Record((Field("k", "bfloat16", 2, 3),), "t h e")
HND = Record((Field("k", "bfloat16", 2, 3),), "h t e")
ONE_HEAD = KEYS.with_heads(1)


def test_some_heads_of_a_row_are_one_descriptor_a_token() -> None:
    src, dst = PageGeometry(KEYS, 4, 0, 48, 2), PageGeometry(ONE_HEAD, 4, 1000, 16, 2)
    runs = heads_of(runs_of((4, 1, 0, 1, 3)), (1, 2), None)
    assert as_rows(descriptors(runs, src, dst)) == [
        (48 + 4, 1000, 4), (48 + 16, 1004, 4), (48 + 28, 1008, 4),
    ]  # fmt: skip
    back = heads_of(runs_of((0, 1, 4, 1, 3)), None, (2, 3))
    assert as_rows(descriptors(back, dst, src)) == [
        (1000, 48 + 8, 4), (1004, 48 + 20, 4), (1008, 48 + 32, 4),
    ]  # fmt: skip


def test_heads_that_lie_apart_move_as_one_run_each() -> None:
    src, dst = PageGeometry(HND, 4, 0, 48, 2), PageGeometry(HND.with_heads(2), 4, 1000, 32, 2)
    runs = heads_of(runs_of((0, 1, 4, 1, 4)), (1, 3), (0, 2))
    assert as_rows(descriptors(runs, src, dst)) == [(16, 1032, 32)], "two heads, merged"
    mixed = PageGeometry(KEYS.with_heads(2), 4, 1000, 32, 2)
    assert as_rows(descriptors(heads_of(runs_of((2, 1, 0, 1, 2)), (1, 3), None), src, mixed)) == [
        (16 + 8, 1000, 4), (32 + 8, 1004, 4), (16 + 12, 1008, 4), (32 + 12, 1012, 4),
    ]  # fmt: skip


def test_tiles_are_one_descriptor_a_token_even_where_a_stride_looks_solid() -> None:
    """Tiles of 2 tokens: the stride of the tiles' leader equals a token's bytes."""
    tiled = Record((Field("k", "uint8", 4),), "e t e2")  # element pairs apart, tokens adjacent
    rows = Record((Field("k", "uint8", 4),), "t e")
    src, dst = PageGeometry(tiled, 4, 0, 16, 1), PageGeometry(rows, 4, 100, 16, 1)
    assert as_rows(descriptors(runs_of((1, 1, 0, 1, 2)), src, dst)) == [
        (2, 100, 2), (10, 102, 2), (4, 104, 2), (12, 106, 2),
    ]  # fmt: skip
    pairs = Record((Field("k", "uint8", 2),), "t _2 t2 e")
    src, dst = PageGeometry(pairs, 4, 0, 16, 1), PageGeometry(pairs, 4, 100, 16, 1)
    got = as_rows(descriptors(runs_of((0, 1, 0, 1, 4)), src, dst))
    assert got == [(0, 100, 4), (8, 108, 4)]
    plain = PageGeometry(Record((Field("k", "uint8", 2),)), 4, 100, 8, 1)
    for a, b, wanted in (
        (src, plain, [(0, 100, 4), (8, 104, 4)]),
        (plain, src, [(100, 0, 4), (104, 8, 4)]),
    ):
        assert as_rows(descriptors(runs_of((0, 1, 0, 1, 4)), a, b)) == wanted


@pytest.mark.parametrize(
    ("src", "dst", "here", "there"),
    [
        (KEYS, ONE_HEAD, None, None),
        (KEYS, ONE_HEAD, (0, 2), None),
        (KEYS, KEYS, (0, 2), (2, 3)),
        (ONE_HEAD, HND, None, (1, 3)),
    ],
)
def test_numbers_of_heads_that_differ_are_refused(src, dst, here, there) -> None:
    sides = PageGeometry(src, 4, 0, 48, 1), PageGeometry(dst, 4, 0, 48, 1)
    rule = f"heads {here or 'all'} of {src} do not pair with heads {there or 'all'} of {dst}"
    with pytest.raises(PlanError, match=re.escape(rule)):
        paired_pieces(*sides, here, there)
    pairs = paired_pieces(sides[0], sides[0], (0, 1), (0, 1))
    assert [(a.nbytes, b.nbytes) for a, b in pairs] == [(4, 4)]


def test_runs_of_some_heads_are_no_whole_blocks() -> None:
    runs = runs_of((8, 1, 0, 1, 4), (0, 1, 12, 1, 4))
    assert runs.are_whole(4).tolist() == [True, True]
    for heads in (((0, 1), None), (None, (0, 1)), ((0, 1), (0, 1))):
        some = heads_of(runs, *heads)
        assert some.are_whole(4).tolist() == [False, False]
        assert some.whole_blocks(4, 4) is None
    mixed = runs_of((8, 1, 0, 1, 4), (0, 1, 12, 1, 3), (4, 1, 4, 1, 4))
    assert mixed.are_whole(4).tolist() == [True, False, True]


def test_pages_with_holes_may_stand_in_each_other() -> None:
    """78 layers packed behind each other per token: what counts is the last byte of a page."""
    packed = Record((Field("k", "uint8", 2),), "t _3 e")
    geometry = PageGeometry(packed, 4, 0, 24, 2)
    assert geometry.nbytes == 24 + 20
    assert PageGeometry(packed, 4, 0, 20, 1).nbytes == 20
    within = PageGeometry(packed, 4, 0, 2, 3)  # each page in the holes of the one before
    assert within.nbytes == 2 * 2 + 20
    with pytest.raises(PlanError, match="block_stride 5 is below the page's 20 bytes"):
        PageGeometry(packed, 4, 0, 5, 2)
    rounded = Record((Field("k", "uint8", 3),), "[k: t e] %16")
    assert PageGeometry(rounded, 4, 0, 16, 2).nbytes == 16 + 12


def test_a_bound_plan_without_bindings_is_no_bound_plan() -> None:
    both = bound(dcp(2), 6), bound(whole(8), 6)
    plan = plan_transfer(both[0].layout, both[1].layout, (0, 6))
    for sides in ((None, both[1]), (both[0], None)):
        with pytest.raises(PlanError, match="binding is None, must be a Binding"):
            BoundPlan(plan, *sides)


@pytest.mark.parametrize(
    ("src", "dst", "pieces"),
    [
        ("row", "row", [(0, 0, 1056)]),
        (
            *("row", "planar"),
            [
                (h * 132 + at, at * 32 + h * n, n)
                for h in range(8)
                for at, n in ((0, 128), (128, 4))
            ],
        ),
        ("planar", "planar", [(0, 0, 1024), (4096, 4096, 32)]),
    ],
)
def test_neighbours_in_pages_are_one_piece_whatever_their_order_in_rows(src, dst, pieces) -> None:
    """A head's scale lies behind its key, and in a packed row behind all keys."""
    fields = Field("key", "float8_e4m3fn", 128, 8), Field("scale", "float32", 1, 8)
    here, there = (PageGeometry(Record(fields, order), 4, 0, 4224, 8) for order in (src, dst))
    pairs = paired_pieces(here, there)
    assert sorted((a.offset, b.offset, a.nbytes) for a, b in pairs) == pieces
    assert all(a.nbytes == b.nbytes for a, b in pairs)
