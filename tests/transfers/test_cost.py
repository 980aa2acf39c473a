"""The cost model: counts against lowering, prices by hand, choices by constants."""

from collections.abc import Iterator
from sys import float_info

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from planning import bound as bind
from planning import dcp, whole

from kvflow.errors import PlanError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec, index_record
from kvflow.testing import Case, cases
from kvflow.transfers.cost import (
    DIRECT,
    STRATEGIES,
    Costs,
    Estimate,
    Rate,
    Strategy,
    choose,
    estimate,
    estimate_way,
    num_descriptors,
    same_pages,
    ways,
)
from kvflow.transfers.executors.nixl_wire import pack_runs
from kvflow.transfers.lower import BoundPlan, PageGeometry, SlotRuns, descriptors
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.predict import predict, total
from kvflow.transfers.slot_cuts import take_runs

ROW = Record((Field("x", "uint8", 10),))
PLANES = index_record("fp8", index_dim=4)
NONE = Rate(0, 0)


def pages(record: Record, block_size: int, num_blocks: int = 8) -> PageGeometry:
    return PageGeometry(record, block_size, 0, record.page_pitch(block_size), num_blocks)


def slot_runs(*runs: tuple[int, int, int, int, int]) -> SlotRuns:
    return SlotRuns(*(np.array(column, np.int64) for column in zip(*runs, strict=True)))


def links(case: Case) -> Iterator[tuple[SlotRuns, PageGeometry, PageGeometry]]:
    bound = BoundPlan(plan_transfer(case.src.layout, case.dst.layout, case.tokens), *_sides(case))
    for dst_rank in bound.dst.layout.ranks:
        for part, src_rank, runs in bound.links_to(dst_rank):
            for name in part.components:
                ends = []
                for side, group, rank in (
                    (bound.src, part.src_group, src_rank),
                    (bound.dst, part.dst_group, dst_rank),
                ):
                    size = side.layout.group(group).paging.block_size
                    record = side.layout.local_record(name, rank)
                    ends.append(pages(record, size, side.num_blocks[group]))
                yield runs, *ends


def _sides(case: Case) -> tuple[Binding, Binding]:
    return case.src, case.dst


# --- descriptors ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(case=cases(max_tokens=40, max_shards=3))
def test_counts_are_those_of_lowering(case: Case) -> None:
    """Without building a descriptor: never fewer than lowering leaves after merging everything,
    exactly as many where a page has one piece, not in tiles, and whole pages have no rows beside
    them; pages need no more than strided lists."""
    for runs, src, dst in links(case):
        count = num_descriptors("runs", runs, src, dst)
        lowered = len(descriptors(runs, src, dst))
        assert count >= lowered
        whole_pages = same_pages(src, dst) & runs.are_whole(src.block_size)
        both = [at.record.pieces(at.block_size) for at in (src, dst)]
        if all(len(pieces) == 1 and not pieces[0].tiles for pieces in both):
            mixed = whole_pages.any() and not whole_pages.all()  # a page and a row never merge
            assert mixed or count == lowered
        assert num_descriptors("strided", runs, src, dst) >= count
        whole_ways = ways("pages", runs, src, dst)
        assert sum(num_descriptors(w, r, src, dst) for w, r in whole_ways) >= count
        for strategy in STRATEGIES:
            parts = ways(strategy, runs, src, dst)
            assert sum(r.num_tokens for _, r in parts) == runs.num_tokens


def test_planar_pages_are_one_piece_as_pages_and_two_as_rows() -> None:
    runs, at = slot_runs((0, 1, 8, 1, 4), (8, 1, 20, 1, 4)), pages(PLANES, 4)
    assert num_descriptors("pages", runs, at, at) == 2
    assert num_descriptors("runs", runs, at, at) == 2
    assert num_descriptors("strided", runs, at, at) == 4


def test_runs_of_unequal_length_merge_where_they_meet() -> None:
    runs, at = slot_runs((0, 1, 0, 1, 3), (3, 1, 3, 1, 1), (4, 1, 4, 1, 2)), pages(ROW, 8)
    assert num_descriptors("runs", runs, at, at) == 1


def test_a_row_of_heads_with_scales_is_one_descriptor() -> None:
    fields = Field("key", "float8_e4m3fn", 128, 8), Field("scale", "float32", 1, 8)
    runs, at = slot_runs((0, 1, 8, 2, 4)), pages(Record(fields, "row"), 16)
    assert num_descriptors("runs", runs, at, at) == len(descriptors(runs, at, at)) == 4


def test_neighbouring_pages_merge_unless_there_is_a_gap() -> None:
    runs, at = slot_runs((0, 1, 8, 1, 4), (4, 1, 12, 1, 4), (16, 1, 16, 1, 4)), pages(ROW, 4)
    assert [num_descriptors(w, runs, at, at) for w in DIRECT] == [2, 2, 2]
    apart = evolve(at, block_stride=50)
    assert [num_descriptors(w, runs, apart, at) for w in DIRECT] == [3, 3, 3]


def test_fault_k08_descriptors_of_64k_tokens_before_and_after_merging() -> None:
    """78 layers (and MTP, and indexers: 101 components), blocks of 64: the count is a function of
    the plan, known before a byte moves, and contiguous blocks are merged."""
    spec = KVCacheSpec.from_config(GLM_5_3)
    src, dst = (
        KVLayout.uniform(spec, Placement.simple(s), Paged(64))
        for s in (RoundRobin(8, 64), Replicated())
    )
    plan = plan_transfer(src, dst, (0, 65536))
    num_pages = 101 * 65536 // 64
    counts = _of_tables(plan, "contiguous")  # I=64: neighbours are on other ranks
    assert counts["pages"].num_descriptors == num_pages
    assert counts["strided"].num_descriptors == num_pages + 22 * 1024
    one = KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(64))
    plan = plan_transfer(one, dst, (0, 65536))
    assert _of_tables(plan, "random")["pages"].num_descriptors > num_pages * 0.99
    assert _of_tables(plan, "contiguous")["pages"].num_descriptors == 101
    rows = plan_transfer(evolve_interleave(src), dst, (0, 65536))
    counts = _of_tables(rows, "random")
    assert counts["strided"].num_descriptors == 65536 * (79 + 2 * 22)
    assert counts["stage"].num_descriptors == num_pages


def evolve_interleave(layout: KVLayout) -> KVLayout:
    return evolve(layout, placement=Placement.simple(RoundRobin(8, 1)))


def _of_tables(plan, order: str) -> dict[str, Estimate]:
    rng, sides = np.random.default_rng(0), []
    for layout in (plan.src, plan.dst):
        need = layout.num_blocks_for(plan.tokens[1])
        tables = {g: rng.permutation(n) if order == "random" else range(n) for g, n in need.items()}
        sides.append(Binding.of(layout, tables, need, plan.tokens[1]))
    return dict(total(predict(BoundPlan(plan, *sides), Costs()))[0])


@pytest.mark.parametrize("num_tokens", [15_000 // 8 * 8, 1 << 20])
def test_fault_k09_runs_and_messages_do_not_grow_with_descriptors(num_tokens: int) -> None:
    """One strided run a target page at most, whatever the number of row descriptors; a pack
    request says them in 24 bytes a run, joined where the source is contiguous."""
    spec = KVCacheSpec.from_config(dict(GLM_5_3, num_hidden_layers=3))
    src, dst = (
        KVLayout.uniform(spec, Placement.simple(s), Paged(64))
        for s in (RoundRobin(8), Replicated())
    )
    plan = plan_transfer(src, dst, (0, num_tokens))
    num_pages = -(-num_tokens // 64)
    assert plan.num_runs <= 8 * num_pages
    need = [side.num_blocks_for(num_tokens) for side in (src, dst)]
    bound = BoundPlan(
        plan,
        *(
            Binding.of(side, {"kv": np.arange(n["kv"])}, n, num_tokens)
            for side, n in zip((src, dst), need, strict=True)
        ),
    )
    runs = bound.link(plan.parts[0], 3, 0)
    assert runs.num_tokens == num_tokens // 8
    assert len(runs) == num_pages
    assert len(pack_runs(runs)) == 24
    shuffled = Binding.of(src, {"kv": np.arange(need[0]["kv"])[::-1]}, need[0], num_tokens)
    runs = BoundPlan(plan, shuffled, bound.dst).link(plan.parts[0], 3, 0)
    assert len(pack_runs(runs)) == 24 * -(-num_tokens // 8 // 64)


# --- prices ---------------------------------------------------------------------------------------


def test_prices_by_hand() -> None:
    """Tokens 0..11 of 10 bytes, every second one: 6 rows from two source pages of 4."""
    runs = slot_runs((0, 1, 0, 2, 4), (4, 1, 8, 2, 2))
    src, dst = pages(ROW, 4), pages(ROW, 8)
    wire_items, wire_bytes = Costs(Rate(1, 0), NONE, 0), Costs(Rate(0, 1), NONE, 0)
    copied, copied_bytes = Costs(NONE, Rate(1, 0), 0), Costs(NONE, Rate(0, 1), 0)
    waits = Costs(NONE, NONE, 5)
    by_hand = {
        "strided": (6, 60, 0, 0, 0),
        "runs": (6, 60, 0, 0, 0),
        "pages": (6, 60, 0, 0, 0),
        "stage": (2, 80, 6, 60, 0),
        "pack": (1, 60, 12, 120, 5),
    }
    for strategy, seconds in by_hand.items():
        for costs, one in zip(
            (wire_items, wire_bytes, copied, copied_bytes, waits), seconds, strict=True
        ):
            assert estimate(costs, strategy, runs, src, dst).seconds == one, strategy
            three = estimate(costs, strategy, runs, src, dst, 3).seconds
            fixed = strategy == "pack" and costs in (wire_items, waits)
            assert three == (one if fixed else 3 * one)


def test_descriptors_by_hand() -> None:
    """Two pages of planes, a whole one and the half of another: a plane is a piece of its own."""
    runs, at = slot_runs((0, 1, 4, 1, 4), (8, 1, 20, 1, 2)), pages(PLANES, 4)
    by_hand = {"pages": 1 + 2, "strided": 4, "runs": 1 + 2, "stage": 2, "pack": 1}
    for strategy, count in by_hand.items():
        assert estimate(Costs(), strategy, runs, at, at).num_descriptors == count, strategy
        three = estimate(Costs(), strategy, runs, at, at, 3).num_descriptors
        assert three == (1 if strategy == "pack" else 3 * count)
    copied = Costs(NONE, Rate(1, 0), 0)
    assert estimate(copied, "stage", runs, at, at).seconds == 2 * 2  # neighbours are one item
    assert estimate(copied, "pack", runs, at, at).seconds == 2 * 6 * 2  # packed planes lie apart
    assert Estimate(1.0, 2) + Estimate(3.0, 4) == Estimate(4.0, 6)


def test_staged_tokens_are_one_item_if_they_lie_together_on_both_sides() -> None:
    copied, at, rows = Costs(NONE, Rate(1, 0), 0), pages(PLANES, 8), pages(ROW, 8)
    byte = Record((Field("x", "uint8", 1),))
    plain, tiled = pages(byte, 8), pages(Record(byte.fields, "t _2 t2 e"), 8)
    assert all(p.tiles for p in tiled.record.pieces(8))

    def items(src: PageGeometry, dst: PageGeometry, *runs: tuple[int, int, int, int, int]) -> float:
        return estimate(copied, "stage", slot_runs(*runs), src, dst, 5).seconds / 5

    assert items(rows, rows, (0, 1, 8, 1, 4), (16, 1, 0, 1, 6)) == 2
    assert items(rows, rows, (0, 1, 8, 1, 4), (16, 1, 0, 1, 4), (8, 1, 32, 1, 3)) == 3
    assert items(rows, rows, (0, 1, 8, 1, 4)) == 1
    assert items(at, at, (0, 1, 8, 1, 4), (16, 1, 0, 1, 8)) == 2 * 2
    assert items(at, at, (0, 1, 8, 1, 4), (16, 1, 0, 1, 4), (32, 1, 24, 1, 8)) == 4 * 2
    assert items(rows, rows, (0, 2, 8, 1, 4)) == items(rows, rows, (0, 1, 8, 2, 4)) == 4
    assert items(rows, rows, (0, 1, 8, 1, 4), (16, 2, 0, 1, 4)) == 8  # not in all runs
    assert items(rows, rows, (0, 1, 8, 1, 4), (16, 1, 0, 2, 4)) == 8
    assert items(plain, plain, (0, 1, 8, 1, 4)) == 1
    for sides in ((tiled, plain), (plain, tiled), (tiled, tiled)):
        assert items(*sides, (0, 1, 8, 1, 4)) == 4


def test_the_choice_follows_the_constants() -> None:
    runs, src, dst = slot_runs((0, 1, 0, 2, 4), (4, 1, 8, 2, 2)), pages(ROW, 4), pages(ROW, 8)

    def pick(costs: Costs, allowed=STRATEGIES) -> list[str]:
        return [way for way, _ in choose(costs, runs, src, dst, 1, allowed)]

    assert pick(Costs(Rate(0, 1), Rate(1, 1), 1)) == ["strided"]
    assert pick(Costs(Rate(1, 0), NONE, 10)) == ["stage"]
    assert pick(Costs(Rate(1, 0), NONE, 0)) == ["pack"]
    assert pick(Costs(Rate(1, 0), NONE, 0), DIRECT) == ["strided"]


def test_whole_pages_go_as_pages_and_the_tail_its_own_way() -> None:
    runs, at = slot_runs((0, 1, 4, 1, 4), (4, 1, 12, 1, 2)), pages(ROW, 4)
    chosen = choose(Costs(), runs, at, at, 1, DIRECT)
    assert [(way, r.num_tokens) for way, r in chosen] == [("pages", 4), ("strided", 2)]
    assert [way for way, _ in ways("pages", runs, at, at)] == ["pages", "strided"]
    assert ways("stage", runs, at, at)[0][1] is runs
    dear = Costs(Rate(1, 0), NONE, 0)  # items on the wire: one page is less than two rows
    apart = slot_runs((0, 1, 4, 1, 4), (4, 2, 12, 1, 2))
    assert [way for way, _ in choose(dear, apart, at, at, 1, STRATEGIES)] == ["pages", "stage"]
    only = slot_runs((0, 1, 4, 1, 4))
    assert [way for way, _ in choose(dear, only, at, at, 1, STRATEGIES)] == ["pages"]
    assert choose(dear, slot_runs((0, 1, 0, 1, 1)), pages(ROW, 8), at, 1, ["stage"])
    none = take_runs(only, np.zeros(1, bool))
    assert choose(dear, none, at, at, 1, STRATEGIES) == []


def test_what_no_strided_list_describes_goes_by_address() -> None:
    tiled = Record((Field("x", "uint8", 4),), "t e t2")
    at = pages(tiled, 4)
    runs = slot_runs((0, 1, 5, 1, 3))
    assert any(p.tiles for p in tiled.pieces(4))
    plain = pages(Record(tiled.fields), 4)
    for sides in ((at, at), (at, plain), (plain, at)):
        for strategy in ("pages", "strided", "runs"):
            assert [way for way, _ in ways(strategy, runs, *sides)] == ["runs"]


def test_prediction_adds_up_over_links_and_names_what_coincides() -> None:
    src, dst = dcp(4), whole()
    bound = BoundPlan(plan_transfer(src, dst, (0, 30)), bind(src, 30), bind(dst, 30))
    costs = predict(bound, Costs())
    assert sum(link.nbytes for link in costs) == bound.plan.nbytes
    assert {(link.src_rank, link.dst_rank) for link in costs} == set(bound.plan.links)
    by_strategy, best = total(costs)
    for strategy in STRATEGIES:
        assert by_strategy[strategy].seconds >= best.seconds > 0
    assert costs[0].same_as("pages") == ("strided", "runs")  # no run is a whole page
    assert costs[0].same_as("pack") == ()
    assert all(link.chosen for link in costs)


# --- values ---------------------------------------------------------------------------------------


def test_costs_that_nobody_states_are_those_of_shared_memory() -> None:
    """8 GB/s on the wire and 6 GB/s in copies; 0.8 and 0.03 microseconds an item."""
    usual = Costs()
    assert [round(1e-9 / rate.per_byte, 6) for rate in (usual.wire, usual.copy)] == [8, 6]
    assert [rate.per_item for rate in (usual.wire, usual.copy)] == [0.8e-6, 0.03e-6]
    assert usual.round_trip == 600e-6
    assert Estimate() == Estimate(0.0, 0)
    assert usual.to_json().splitlines()[:2] == ["{", '  "wire": {']


def test_costs_survive_a_file() -> None:
    costs = Costs(Rate(1e-6, 2e-10), Rate(3e-8, 4e-10), 5e-4)
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"wire": 1}', "[" * 10**5),
        *(Costs().to_json().replace("0.0006", wrong) for wrong in ("-1", "9" * 400, "9" * 5000)),
    ],
    ids=range(8),
)
def test_a_file_of_something_else_is_refused(text: str) -> None:
    for held in (text, text.encode()):
        with pytest.raises(PlanError, match=r"no costs: |must be seconds"):
            Costs.from_json(held)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -1, "1e-6", True, None])
def test_impossible_costs_are_refused(value: float) -> None:
    with pytest.raises(PlanError, match="must be seconds"):
        Rate(value, 0)
    with pytest.raises(PlanError, match="round_trip"):
        Costs(round_trip=value)


def test_the_largest_number_of_seconds_is_one() -> None:
    assert Rate(float_info.max, 0) == Rate(float_info.max, 0.0)


@pytest.mark.parametrize("way", STRATEGIES)
def test_nothing_costs_nothing(way: Strategy) -> None:
    at = pages(ROW, 4)
    for runs in (SlotRuns(*[np.empty(0, np.int64)] * 5), slot_runs((0, 1, 4, 1, 0))):
        assert estimate_way(Costs(), way, runs, at, at, 3) == Estimate()
