"""Cuts of a plan: their union is the whole, token by token, and a hole is seen."""

from collections import Counter
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import dcp, layout, moves, whole

from kvflow.errors import PlanError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.testing import Case, cases
from kvflow.transfers.cuts import check_partition, clip, cut, moved_by, select, verify_cut
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan

PLAN = plan_transfer(dcp(3, 2), whole(8), (1, 30))


def said(*plans: Plan) -> Counter:
    """Every move of every component and head range over a link or on a host, one by one."""
    return Counter(
        (name, part.heads, stage, *move)
        for plan in plans
        for part in plan.parts
        for name in part.components
        for stage, runs in enumerate((part.runs, part.copies))
        for move in moves(runs)
    )


@settings(max_examples=30)
@given(case=cases(max_tokens=30), data=st.data())
def test_the_cuts_together_move_what_the_whole_moves(case: Case, data) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    borders = data.draw(st.lists(st.integers(0, case.tokens[1] + 3), max_size=4))
    names = data.draw(st.permutations(moved_by(plan)))
    at = sorted(data.draw(st.lists(st.integers(0, len(names)), max_size=2)))
    edges = [0, *at, len(names)]
    sets = [names[a:b] for a, b in pairwise(edges)]
    cuts = cut(plan, borders, data.draw(st.sampled_from([None, sets])))
    assert said(*cuts) == said(plan)
    verify_cut(plan, cuts)
    for one in cuts:
        verify_plan(one)


@settings(max_examples=30)
@given(case=cases(max_tokens=30), data=st.data())
def test_a_cut_left_out_or_given_twice_is_seen(case: Case, data) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    cuts = cut(plan, range(0, 60, 7), [[name] for name in moved_by(plan)])
    full = [i for i, one in enumerate(cuts) if one.tokens[0] < one.tokens[1]]
    if full:
        i = data.draw(st.sampled_from(full))
        with pytest.raises(PlanError, match="are not moved"):
            verify_cut(plan, cuts[:i] + cuts[i + 1 :])
        with pytest.raises(PlanError, match="twice"):
            verify_cut(plan, (*cuts, cuts[i]))


@settings(max_examples=30)
@given(case=cases(max_tokens=30), data=st.data())
def test_without_replicas_a_cut_is_the_plan_of_its_range(case: Case, data) -> None:
    """With them the reads of a plan are spread over its whole range, and a cut keeps that."""
    sharding, alone = case.src.layout.placement.sharding, {"head_ranks": (), "stages": ()}
    src = evolve(case.src.layout, placement=Placement.simple(sharding), hosts=(), **alone)
    target = evolve(case.dst.layout, hosts=())  # on a host, receivers take turns over the range
    start, stop = case.tokens
    low = data.draw(st.integers(start, stop))
    high = data.draw(st.integers(low, stop))
    plan = plan_transfer(src, target, case.tokens)
    derived = plan_transfer(src, target, (low, high))
    assert said(clip(plan, low, high)) == said(derived)


def test_a_cut_reads_from_the_same_replicas_as_the_whole() -> None:
    src = layout(Placement(RoundRobin(2), ((0, 1, 2), (3, 4, 5))))
    plan = plan_transfer(src, whole(), (0, 60))
    readers = {move[-1]: move[0] for move in moves(plan.parts[0].runs)}
    assert set(readers.values()) == set(range(6))
    for one in cut(plan, [7, 20, 41]):
        assert all(readers[move[-1]] == move[0] for move in moves(one.parts[0].runs))


def test_runs_of_one_token_have_stride_one_as_in_any_plan() -> None:
    plan = plan_transfer(dcp(3), whole(8), (0, 30))
    for one in cut(plan, range(30)):
        (runs,) = (part.runs for part in one.parts)
        assert runs.count.tolist() == [1]
        assert [int(s[0]) for s in (runs.token_stride, runs.src_stride, runs.dst_stride)] == [1] * 3
        assert one == plan_transfer(plan.src, plan.dst, one.tokens)
    plan = plan_transfer(dcp(3), whole(16), (0, 30))
    both = clip(plan, 6, 12).parts[0].runs
    assert both.count.tolist() == [2, 2, 2]
    assert both.token_stride.tolist() == both.dst_stride.tolist() == [3, 3, 3]
    assert both.token.tolist() == both.dst_local.tolist() == [6, 7, 8]
    assert both.src_local.tolist() == [2, 2, 2]


def test_borders_outside_or_said_twice_cut_nothing() -> None:
    assert [p.tokens for p in cut(PLAN, [0, 1, 9, 9, 30, 99])] == [(1, 9), (9, 30)]
    assert cut(PLAN) == (PLAN,)


def test_an_empty_plan_has_one_empty_cut_and_needs_none() -> None:
    empty = plan_transfer(dcp(3), whole(), (5, 5))
    assert [p.tokens for p in cut(empty, [5])] == [(5, 5)]
    verify_cut(empty, cut(empty, [5]))
    verify_cut(empty, ())


def test_what_is_selected_moves_and_the_rest_is_absent() -> None:
    some = select(PLAN, ["latent.2", "indexer.0"])
    assert set(moved_by(some)) == {"indexer.0", "latent.2"}
    assert set(some.absent) == set(PLAN.dst.spec.names) - {"latent.2", "indexer.0"}
    verify_plan(some)
    others = [n for n in PLAN.dst.spec.names if n not in ("latent.2", "indexer.0")]
    assert some == plan_transfer(PLAN.src, PLAN.dst, PLAN.tokens, absent=others)


@pytest.mark.parametrize(("low", "high"), [(0, 9), (9, 31), (9, 8)])
def test_a_range_outside_the_plan_is_refused(low: int, high: int) -> None:
    with pytest.raises(PlanError, match=rf"\[{low}, {high}\) must be a range inside"):
        clip(PLAN, low, high)


def test_foreign_components_and_layouts_are_refused() -> None:
    with pytest.raises(PlanError, match=r"\['latent\.9'\] are not moved"):
        select(PLAN, ["latent.9"])
    with pytest.raises(PlanError, match=r"\['latent\.0'\] are not moved"):
        cut(select(PLAN, ["latent.1"]), components=[["latent.0"]])
    with pytest.raises(PlanError, match="other layouts"):
        verify_cut(PLAN, [plan_transfer(dcp(4), whole(8), (1, 30))])
    with pytest.raises(PlanError, match="not claimed"):
        verify_cut(select(PLAN, ["latent.1"]), [PLAN])


def test_a_cut_with_a_wrong_run_is_seen() -> None:
    first, second = cut(PLAN, [10])
    runs = second.parts[0].runs
    wrong = evolve(second.parts[0], runs=evolve(runs, dst_local=runs.dst_local[::-1].copy()))
    with pytest.raises(PlanError, match="target side"):
        verify_cut(PLAN, [first, Plan(PLAN.src, PLAN.dst, [wrong], (), second.tokens)])


def test_a_cut_that_hides_what_it_does_not_move_is_seen() -> None:
    first, second = cut(PLAN, [10])
    some = select(second, ["latent.1"])
    silent = Plan(some.src, some.dst, some.parts, (), some.tokens)
    with pytest.raises(PlanError, match="neither moved nor named absent"):
        verify_cut(PLAN, [first, silent])


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([(0, 4), (4, 9)], None),
        ([(4, 9), (0, 4), (9, 9)], None),
        ([(4, 9), (2, 2), (0, 4)], None),
        ([(0, 4), (5, 9)], r"a: tokens \[4, 5\) are not moved, claimed are \[0, 9\)"),
        ([(1, 9)], r"\[0, 1\) are not moved"),
        ([(0, 8)], r"\[8, 9\) are not moved"),
        ([], r"\[0, 9\) are not moved"),
        ([(0, 9), (2, 4)], r"\[2, 4\) are moved twice"),
        ([(0, 5), (4, 9)], r"\[4, 5\) are moved twice"),
        ([(0, 10)], r"\[0, 10\) are moved, claimed"),
    ],
)
def test_ranges_fill_the_claim_exactly_or_the_gap_is_named(pieces, says) -> None:
    given_ = [(piece, ("a",)) for piece in pieces]
    if says is None:
        check_partition({"a": (0, 9)}, given_)
        return
    with pytest.raises(PlanError, match=says):
        check_partition({"a": (0, 9)}, given_)


def test_a_million_tokens_are_cut_without_being_enumerated() -> None:
    n = 1 << 20
    plan = plan_transfer(dcp(8, 1, 64), layout(Replicated(), 64), (0, n))
    cuts = cut(plan, range(0, n, n // 16), [[name] for name in moved_by(plan)])
    assert len(cuts) == 16 * len(plan.dst.spec.names)
    verify_cut(plan, cuts)
    dealt = plan_transfer(layout(BalancedChunks(8, 0, n), 64), whole(64), (0, n))
    assert all(len(p.parts[0].runs) <= n // 64 + 32 for p in cut(dealt, [12345]))
