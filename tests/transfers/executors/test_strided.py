"""What the torch executor does beyond the law, to which test_law.py holds it: it lowers a link
once, moves whole pages whole, and refuses a cache that does not fit before a byte moves."""

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from planning import bound, dcp, layout, whole

from kvflow.errors import PlanError
from kvflow.kernels import lanes
from kvflow.kernels.ranges import RangeCopy
from kvflow.kernels.rows import PageView, gather_rows
from kvflow.layouts.layout import Binding
from kvflow.layouts.mesh import Placement
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, Component, KVCacheSpec
from kvflow.testing import Case, cases, check_law
from kvflow.transfers.executors import strided
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

GLM = KVCacheSpec.from_config(GLM_5_3)
TRANSPOSED = KVCacheSpec(
    tuple(
        Component("latent", i, Record((Field("latent", "bfloat16", 16),), "e t")) for i in range(3)
    )
)


@pytest.fixture
def prepared(monkeypatch) -> list[RangeCopy]:
    """Every set of ranges that is made."""
    made: list[RangeCopy] = []

    class Noted(RangeCopy):
        @classmethod
        def of(cls, ranges):
            made.append(RangeCopy.of(ranges))
            return made[-1]

    monkeypatch.setattr(strided, "RangeCopy", Noted)
    return made


def run(src, dst, length, table=None):
    both = [bound(side, length) for side in (src, dst)]
    if table is not None:
        both[1] = Binding.of(dst, {"kv": table}, {"kv": len(table)}, length)
    plan = BoundPlan(plan_transfer(src, dst, (0, length)), *both)
    sources, targets = (
        {r: RankCache.allocate(b.layout, r, b.num_blocks, fill=i) for r in b.layout.ranks}
        for i, b in enumerate(both)
    )
    StridedExecutor().execute(plan, sources, targets)


def test_a_link_is_lowered_once_for_all_layers(prepared):
    """101 components look like two; 4 links."""
    run(layout(RoundRobin(4), 8, GLM), layout(Replicated(), 8, GLM), 40)
    assert len(prepared) == 2 * 4


def test_whole_pages_of_any_arrangement_move_in_one_piece(prepared):
    """5 pages of 16-fold pieces: 5 ranges for 3 layers alike, one where ids are neighbours."""
    src, dst = layout(Replicated(), 8, TRANSPOSED), layout(RoundRobin(1), 8, TRANSPOSED)

    def ranges() -> list[tuple[int, int]]:
        found = [(i.nbytes, len(i.src.index)) for p in prepared for i in p.items]
        prepared.clear()
        return found

    run(src, dst, 40, [2, 0, 4, 1, 3])
    assert ranges() == [(8 * 32, 5)]
    run(src, dst, 40)
    assert ranges() == [(5 * 8 * 32, 1)]
    run(src, dst, 43, [2, 0, 4, 1, 3, 5])  # 3 tokens of 16 pieces in a page that is cut
    assert ranges() == [(8 * 32, 5), (3 * 2, 16)]


@settings(max_examples=20)
@given(case=cases(max_tokens=24))
def test_a_link_lowered_in_parts_moves_the_same(case: Case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "MAX_RANGES", 3)
        check_law(StridedExecutor(), case.src, case.dst, case.tokens)


@settings(max_examples=20)
@given(case=cases(max_tokens=24))
def test_components_moved_in_lanes_move_the_same(case: Case):
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "MIN_NBYTES", 0)
        torch.set_num_threads(3)
        check_law(StridedExecutor(), case.src, case.dst, case.tokens)
    torch.set_num_threads(threads)


def test_a_cache_that_does_not_fit_is_refused_before_a_byte_moves():
    src, dst = dcp(2), whole()
    both = [bound(side, 30) for side in (src, dst)]
    plan = BoundPlan(plan_transfer(src, dst, (0, 30)), *both)
    sources = {r: RankCache.allocate(src, r, both[0].num_blocks, fill=1) for r in (0, 1)}
    full = RankCache.allocate(dst, 0, both[1].num_blocks)
    small = RankCache.allocate(dst, 0, {"kv": 3})
    last = dst.spec.names[-1]
    for pages, match in (
        ({**full.pages, last: small.pages[last]}, "has 3 blocks in the cache of target rank 0"),
        ({n: v for n, v in full.pages.items() if n != last}, "has 0 blocks in the cache of target"),
    ):
        with pytest.raises(PlanError, match=match):
            StridedExecutor().execute(plan, sources, {0: RankCache(0, pages)})
    (_, _, runs), *_ = plan.links_to(0)
    with pytest.raises(PlanError, match=r"slot \d+ of a target cache of 12"):
        strided.move_runs(runs, sources[0].pages[last], small.pages[last])
    assert not any(bool(v.memory.any()) for v in (*full.pages.values(), *small.pages.values()))


@pytest.mark.parametrize("executor", [StridedExecutor(), ReferenceExecutor()])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_blocks_that_are_read_and_written_are_refused(executor, shift):
    """One cache on both sides: what moves first would say what arrives. Rows that stay where they
    are, and blocks apart, are lawful."""
    side = layout(Replicated())
    tables = [0, 1, 2], [shift, 1 + shift, 2 + shift]
    num = {"kv": 8}
    plan = plan_transfer(side, side, (0, 11))
    both = BoundPlan(plan, *(Binding.of(side, {"kv": table}, num, 11) for table in tables))
    cache = RankCache.allocate(side, 0, num)
    for i, view in enumerate(cache.pages.values()):
        view.memory.copy_(torch.arange(len(view.memory)) % 251 + i % 4)
    before = {name: view.memory.clone() for name, view in cache.pages.items()}
    if shift in (1, 2):
        with pytest.raises(PlanError, match="which it also reads"):
            executor.execute(both, {0: cache}, {0: cache})
        assert all(torch.equal(view.memory, before[n]) for n, view in cache.pages.items())
        return
    executor.execute(both, {0: cache}, {0: cache})
    slots = torch.arange(11)
    for name, view in cache.pages.items():
        old = PageView(before[name], view.record, 4, view.block_stride, view.offset)
        assert torch.equal(gather_rows(view, slots + 4 * shift), gather_rows(old, slots))


def test_the_second_stage_needs_pages_too():
    """Replicas on one host: rank 1 is fed by rank 0, and has no pages."""
    dst = evolve(layout(Placement(Replicated(), ((0, 1),))), hosts=((0, 1),))
    src = dcp(2)
    both = [bound(side, 9) for side in (src, dst)]
    plan = BoundPlan(plan_transfer(src, dst, (0, 9)), *both)
    assert plan.plan.local_links
    sources = {r: RankCache.allocate(src, r, both[0].num_blocks, fill=1) for r in (0, 1)}
    first = RankCache.allocate(dst, 0, both[1].num_blocks)
    with pytest.raises(PlanError, match="target rank 1, the binding needs"):
        StridedExecutor().execute(plan, sources, {0: first, 1: RankCache(1, {})})
    assert not any(bool(v.memory.any()) for v in first.pages.values())
