"""verify_plan accepts every derived plan and refuses every other: mutations, one at a time."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from attrs import evolve, fields
from hypothesis import assume, given
from hypothesis import strategies as st
from planning import SPEC, bound, dcp, held, layout, moves, whole, with_runs

from kvflow.errors import KvflowError, PlanError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import Binding
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.testing import placements, token_ranges
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan

COLUMNS = [f.name for f in fields(TransferRuns)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tokens = draw(token_ranges(40))
    sizes = st.sampled_from([1, 2, 3, 4, 8])
    src = layout(draw(placements(tokens, 4, 2)), draw(sizes))
    dst = layout(draw(placements(tokens, 4, 2)), draw(sizes))
    return plan_transfer(src, dst, tokens)


@given(plans(), st.integers(0, 9))
def test_every_derived_plan_is_accepted(plan: Plan, longer: int) -> None:
    stop = plan.parts[0].stop
    verify_plan(plan)
    room = min(longer, plan.src.placement.sharding.stop - stop)
    verify_plan(plan, bound(plan.src, stop + room), bound(plan.dst, stop))


def is_lawful(plan: Plan) -> bool:
    """The judgement of somebody who deals tokens one by one and counts."""
    for part in plan.parts:
        sizes = [
            side.group(name).paging.block_size
            for side, name in ((plan.src, part.src_group), (plan.dst, part.dst_group))
        ]
        there = held(plan.dst.placement, part.stop)
        here = held(plan.src.placement, part.stop)
        got = moves(part.runs)
        if any(here.get((m[0], m[1])) != m[4] or there.get((m[2], m[3])) != m[4] for m in got):
            return False
        wanted = Counter((r, t) for (r, _), t in there.items() if t >= part.start)
        if Counter((m[2], m[4]) for m in got) != wanted:
            return False
        strides = (part.runs.token_stride, part.runs.src_stride, part.runs.dst_stride)
        if len(part.runs) and min(int(s.min()) for s in strides) < 1:
            return False
        seen = 0
        for n in part.runs.count.tolist():
            run = got[seen : seen + n]
            seen += n
            for place, size in ((1, sizes[0]), (3, sizes[1])):
                if len({m[place] // size for m in run}) > 1:
                    return False
    return True


def shift(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    column = draw(st.sampled_from(COLUMNS))
    values = getattr(runs, column).copy()
    values[draw(st.integers(0, len(runs) - 1))] += draw(st.sampled_from([-7, -2, -1, 1, 2, 7]))
    return evolve(runs, **{column: values})


def shift_alike(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    """Token and both local indices together: a whole run on another place."""
    i, by = draw(st.integers(0, len(runs) - 1)), draw(st.sampled_from([-4, -1, 1, 4]))
    changed = {}
    for column in draw(st.sets(st.sampled_from(["token", "src_local", "dst_local"]), min_size=2)):
        changed[column] = getattr(runs, column).copy()
        changed[column][i] += by
    return evolve(runs, **changed)


def drop(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    return runs.take(np.arange(len(runs)) != draw(st.integers(0, len(runs) - 1)))


def repeat(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    return runs.take(np.append(np.arange(len(runs)), draw(st.integers(0, len(runs) - 1))))


def replace(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    """One run stands in the place of another: the number of runs stays."""
    index = np.arange(len(runs))
    index[draw(st.integers(0, len(runs) - 1))] = draw(st.integers(0, len(runs) - 1))
    return runs.take(index)


def swap_ranks(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    column = draw(st.sampled_from(["src_rank", "dst_rank"]))
    values = getattr(runs, column).copy()
    i, j = (draw(st.integers(0, len(runs) - 1)) for _ in range(2))
    values[[i, j]] = values[[j, i]]
    return evolve(runs, **{column: values})


def join(runs: TransferRuns, draw: st.DrawFn) -> TransferRuns:
    """A run swallows the one behind it, right or wrong."""
    assume(len(runs) > 1)
    i = draw(st.integers(0, len(runs) - 2))
    count = runs.count.copy()
    count[i] += count[i + 1]
    changed = {"count": count}
    for name in ("token", "src", "dst"):
        stride, at = f"{name}_stride", "token" if name == "token" else f"{name}_local"
        values = getattr(runs, stride).copy()
        values[i] = max(int(getattr(runs, at)[i + 1] - getattr(runs, at)[i]), 1)
        changed[stride] = values
    return evolve(runs, **changed).take(np.arange(len(runs)) != i + 1)


MUTATIONS = [shift, shift_alike, drop, repeat, replace, swap_ranks, join]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@given(plan=plans(), data=st.data())
def test_a_mutated_plan_is_refused_if_it_is_wrong(
    mutate: Callable[..., TransferRuns], plan: Plan, data: st.DataObject
) -> None:
    assume(plan.num_runs)
    runs = plan.parts[0].runs
    try:
        mutant = with_runs(plan, mutate(runs, data.draw))
    except PlanError:
        return  # not even a column of counts
    if not is_lawful(mutant):
        with pytest.raises(KvflowError):
            verify_plan(mutant)
        return
    # Right by luck, such as a replica that reads from another one: lawful, unless a run crosses a
    # border, which is refused whatever lies there.
    with suppress(PlanError):
        verify_plan(mutant)


@given(plans())
def test_any_order_of_the_runs_is_lawful(plan: Plan) -> None:
    reverse = np.arange(plan.num_runs)[::-1]
    verify_plan(with_runs(plan, plan.parts[0].runs.take(reverse)))


PLAN = plan_transfer(dcp(2, 1, 4), dcp(3, 2, 4), (2, 23))
PART = PLAN.parts[0]


def refuse(rule: str, *parts: PlanPart, absent: tuple[str, ...] = ()) -> None:
    with pytest.raises(PlanError, match=rule):
        verify_plan(Plan(PLAN.src, PLAN.dst, parts, absent))


def test_components_are_moved_once_and_none_is_forgotten() -> None:
    fewer = evolve(PART, components=PART.components[1:])
    refuse(r"components \['latent.0'\] are neither moved nor named absent", fewer)
    verify_plan(Plan(PLAN.src, PLAN.dst, (fewer,), ("latent.0",)))
    twice = r"latent.0: heads \[0, 1\) are moved twice"
    refuse(twice, PART, evolve(PART, components=("latent.0",)))
    refuse(twice, evolve(PART, components=(*PART.components, "latent.0")))
    refuse(r"\['latent.9'\] are not in the source's group 'kv'",
           evolve(PART, components=(*PART.components, "latent.9")))  # fmt: skip
    refuse("neither moved nor named absent")
    verify_plan(Plan(PLAN.src, PLAN.dst, (), SPEC.names))


def test_fault_b08_a_component_missing_on_one_side_is_noticed() -> None:
    short = evolve(SPEC, components=SPEC.components[:-1])
    target = layout(Replicated(), 4, short)
    plan = plan_transfer(PLAN.src, target, (0, 4), absent=["indexer.2"])
    with pytest.raises(PlanError, match=r"\['indexer.2'\] are neither moved nor"):
        verify_plan(Plan(plan.src, plan.dst, plan.parts))
    foreign = evolve(plan.parts[0], components=SPEC.names)
    with pytest.raises(PlanError, match=r"\['indexer.2'\] are not in the target's group 'kv'"):
        verify_plan(Plan(plan.src, plan.dst, (foreign,)))


@pytest.mark.parametrize(
    ("column", "index", "value", "rule"),
    [
        ("token_stride", 0, 0, "source side of run 0 has a stride below 1"),
        ("src_stride", 1, 0, "source side of run 1 has a stride below 1"),
        ("dst_stride", 0, -1, "target side of run 0 has a stride below 1"),
        ("token", 0, -1, "a token outside round_robin"),
        ("src_rank", 0, -1, "source side of run 0 has a rank below 0"),
        ("dst_rank", 0, -1, "target side of run 0 has a rank below 0"),
        ("src_rank", 0, 2, "source side of run 0 has a token its rank does not own"),
        ("dst_rank", 0, 9, "target side of run 0 has a token its rank does not own"),
        ("src_local", 0, 2, "source side of run 0 has a local index that holds another token"),
        ("dst_local", 0, 9, "target side of run 0 has a local index that holds another token"),
    ],
)
def test_each_rule_names_run_side_and_values(
    column: str, index: int, value: int, rule: str
) -> None:
    values = getattr(PART.runs, column).copy()
    values[index] = value
    runs = evolve(PART.runs, **{column: values})
    with pytest.raises(PlanError, match=rule) as refused:
        verify_plan(with_runs(PLAN, runs))
    assert str([int(c[index]) for c in runs.columns]) in str(refused.value)


def one_run(**columns: int) -> TransferRuns:
    values = dict.fromkeys(COLUMNS, 0) | dict.fromkeys(COLUMNS[3::2], 1) | columns
    return TransferRuns(**{name: [values[name]] for name in COLUMNS})  # type: ignore[arg-type]


def test_a_run_across_a_border_or_a_page_is_refused() -> None:
    run = one_run(token_stride=1, src_stride=1, dst_stride=1, count=8)
    same = plan_transfer(dcp(1, 1, 8), whole(8), (0, 8))
    verify_plan(with_runs(same, run))
    paged = plan_transfer(dcp(1, 1, 8), whole(4), (0, 8))
    with pytest.raises(PlanError, match=r"target side of run 0 has a page border \(page: 4\)"):
        verify_plan(with_runs(paged, run))
    dealt = plan_transfer(dcp(2, 4, 8), whole(8), (0, 8))
    with pytest.raises(PlanError, match=r"a border of round_robin.* inside a run of stride 1"):
        verify_plan(with_runs(dealt, run))
    chunks = plan_transfer(layout(BalancedChunks(1, 0, 8), 8), whole(8), (0, 8))
    with pytest.raises(PlanError, match="a border of balanced"):
        verify_plan(with_runs(chunks, run))
    steep = evolve(run, src_stride=[2])
    with pytest.raises(PlanError, match="a stride that ends on another token"):
        verify_plan(with_runs(same, steep))


def runs_at(*rows: tuple[int, int, int]) -> TransferRuns:
    """(first token, stride, count) of each run; the token is its own local index on both sides."""
    token, stride, count = (list(column) for column in zip(*rows, strict=True))
    still = [0] * len(rows)
    return TransferRuns(still, still, token, stride, token, stride, token, stride, count)


@pytest.mark.parametrize(
    ("crossing", "rows"),
    [
        (1, ((0, 1, 3), (3, 1, 2), (5, 1, 3))),  # the border is the last token of the run
        (1, ((0, 1, 2), (2, 1, 3), (5, 1, 3))),
        (0, ((0, 1, 6), (6, 1, 2))),
        (2, ((0, 1, 1), (1, 1, 1), (2, 1, 6))),
        (2, ((0, 2, 2), (1, 1, 1), (3, 1, 2), (5, 1, 3))),  # beside a run of another stride
        (1, ((1, 1, 1), (0, 2, 3), (3, 1, 1), (5, 1, 3))),
    ],
)
def test_a_border_inside_any_run_is_found(
    crossing: int, rows: tuple[tuple[int, int, int], ...]
) -> None:
    """Chunks [0, 4) and [4, 8) of one shard: the places are right, yet 4 is a border."""
    plan = plan_transfer(whole(8), layout(BalancedChunks(1, 0, 8), 8), (0, 8))
    rule = (
        rf"target side of run {crossing} has a border of balanced.* of stride {rows[crossing][1]}"
    )
    with pytest.raises(PlanError, match=rule):
        verify_plan(with_runs(plan, runs_at(*rows)))


def test_runs_up_to_a_border_are_lawful() -> None:
    plan = plan_transfer(whole(8), layout(BalancedChunks(1, 0, 8), 8), (0, 8))
    verify_plan(with_runs(plan, runs_at((0, 1, 4), (4, 1, 4))))
    verify_plan(with_runs(plan, runs_at((0, 2, 2), (1, 2, 2), (4, 1, 1), (5, 1, 3))))


@pytest.mark.parametrize(
    ("token", "rows"),
    [
        (3, ((0, 1, 4), (3, 1, 4))),
        (4, ((0, 2, 3), (4, 2, 2), (1, 2, 3))),  # one stride, the even tokens
        (3, ((0, 2, 4), (1, 2, 2), (3, 2, 2))),  # the odd ones
        (2, ((0, 1, 3), (2, 1, 2), (3, 1, 1), (6, 1, 2))),  # the first of two
        (3, ((4, 1, 3), (0, 1, 4), (3, 1, 1))),
        (4, ((4, 1, 1), (0, 1, 1), (4, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (5, 1, 2))),
        (6, ((0, 2, 4), (1, 1, 1), (5, 1, 3))),  # of several strides
    ],
)
def test_the_first_token_written_twice_is_named(
    token: int, rows: tuple[tuple[int, int, int], ...]
) -> None:
    plan = plan_transfer(whole(8), whole(8), (0, 8))
    with pytest.raises(PlanError, match=f"target rank 0: token {token} is written twice"):
        verify_plan(with_runs(plan, runs_at(*rows)))


def test_a_run_that_ends_outside_the_domain_is_refused() -> None:
    plan = plan_transfer(layout(Replicated(2, 8), 16), whole(16), (2, 8))
    for token, count in [(1, 7), (2, 7)]:
        run = one_run(token=token, src_local=token - 2, dst_local=token, count=count)
        with pytest.raises(PlanError, match=r"source side of run 0 has a token outside replicated"):
            verify_plan(with_runs(plan, run))


def test_a_stride_up_to_the_end_of_all_domains_is_counted_exactly() -> None:
    plan = plan_transfer(whole(8), whole(8), (0, 8))
    widest = 2**61
    with pytest.raises(PlanError, match=rf"tokens 0\.\.{widest}, outside \[0, 8\)"):
        verify_plan(with_runs(plan, runs_at((0, widest, 2))))
    with pytest.raises(PlanError, match=f"source side of run 0 .* local index of {2**62} or more"):
        verify_plan(with_runs(plan, runs_at((0, widest + 1, 2))))


def test_the_first_rank_written_outside_the_range_is_named() -> None:
    twins = layout(Placement(Replicated(), ((0, 1),)), 8)
    plan = plan_transfer(whole(8), twins, (0, 6))
    longer = plan_transfer(whole(8), twins, (0, 8)).parts[0].runs
    with pytest.raises(PlanError, match=r"target rank 0 is written tokens 0\.\.7, outside \[0, 6"):
        verify_plan(with_runs(plan, longer))


def test_a_rank_outside_the_placement_owns_nothing() -> None:
    """Every token of every shard, read from or written to a rank that no one has."""
    runs = PART.runs
    for column, side in (("src_rank", "source"), ("dst_rank", "target")):
        for i in range(len(runs)):
            values = getattr(runs, column).copy()
            values[i] = 7
            with pytest.raises(PlanError, match=f"{side} side of run {i} has a token its rank"):
                verify_plan(with_runs(PLAN, evolve(runs, **{column: values})))
    gaps = plan_transfer(whole(), layout(Placement(RoundRobin(2), ((5,), (2,)))), (0, 8))
    verify_plan(gaps)


def test_the_first_bad_run_is_named() -> None:
    values = PART.runs.src_local.copy()
    values[[1, 3]] += 4
    with pytest.raises(PlanError, match="source side of run 1 has a local index"):
        verify_plan(with_runs(PLAN, evolve(PART.runs, src_local=values)))


def test_the_cover_is_counted_on_every_target_rank() -> None:
    plan = plan_transfer(whole(4), layout(Placement(Replicated(), ((0, 1),)), 4), (4, 8))
    runs = plan.parts[0].runs
    only = with_runs(plan, runs.take(runs.dst_rank == 0))
    with pytest.raises(PlanError, match=r"target rank 1 gets 0 tokens of \[4, 8\), needs 4"):
        verify_plan(only)
    twice = with_runs(plan, runs.take(np.array([0, 0, 1])))
    with pytest.raises(PlanError, match=r"target rank 0 gets 8 tokens of \[4, 8\), needs 4"):
        verify_plan(twice)


def test_a_token_written_twice_or_outside_the_range_is_named() -> None:
    plan = plan_transfer(whole(1), whole(1), (0, 6))
    index = np.array([0, 1, 2, 3, 4, 4])
    with pytest.raises(PlanError, match="target rank 0: token 4 is written twice"):
        verify_plan(with_runs(plan, plan.parts[0].runs.take(index)))
    longer = plan_transfer(whole(1), whole(1), (0, 8)).parts[0].runs
    for first, rule in [(1, r"tokens 1..6, outside \[0, 6\)"), (2, r"tokens 2..7, outside")]:
        with pytest.raises(PlanError, match=rule):
            verify_plan(with_runs(plan, longer.take(np.arange(first, first + 6))))
    later = plan_transfer(whole(1), whole(1), (2, 8))
    with pytest.raises(PlanError, match=r"tokens 1..6, outside \[2, 8\)"):
        verify_plan(with_runs(later, longer.take(np.arange(1, 7))))


def test_runs_of_several_strides_are_compared_token_by_token() -> None:
    plan = plan_transfer(whole(8), whole(8), (0, 8))
    evens = {"token_stride": 2, "src_stride": 2, "dst_stride": 2}
    threes = {"token_stride": 3, "src_stride": 3, "dst_stride": 3}

    def several(*rows: dict[str, int]) -> Plan:
        runs = [one_run(**row) for row in rows]
        columns = (np.concatenate(c) for c in zip(*(r.columns for r in runs), strict=True))
        return with_runs(plan, TransferRuns(*columns))

    def at(t: int, n: int, steps: dict[str, int]) -> dict[str, int]:
        return {"token": t, "src_local": t, "dst_local": t, "count": n, **steps}

    verify_plan(several(at(0, 2, evens), at(1, 2, threes), at(3, 2, evens), at(6, 2, {})))
    verify_plan(several(at(0, 2, threes), at(1, 2, threes), at(2, 2, threes), at(6, 2, {})))
    with pytest.raises(PlanError, match="target rank 0: token 3 is written twice"):
        verify_plan(several(at(0, 3, threes), at(1, 4, evens), at(2, 1, {})))


def test_bindings_must_hold_and_reach_what_the_plan_uses() -> None:
    plan = plan_transfer(dcp(2, 1, 4), whole(4), (0, 20))
    verify_plan(plan, bound(plan.src, 20), bound(plan.dst, 20))
    short = Binding.of(plan.src, {"kv": [2, 1, 0]}, {"kv": 3}, 20, {"latent.1": 19})
    with pytest.raises(PlanError, match=r"latent.1: the plan reads tokens up to 20, .* below 19"):
        verify_plan(plan, short, bound(plan.dst, 20))
    few = Binding.of(plan.dst, {"kv": [2, 1, 0, 3]}, {"kv": 4}, 16)
    with pytest.raises(PlanError, match="local index 17 needs entry 4, the block table has 4"):
        verify_plan(plan, bound(plan.src, 20), few)
    none = Binding.of(plan.src, {"kv": []}, {"kv": 1}, 0)
    with pytest.raises(PlanError, match="below 0"):
        verify_plan(plan, none)
    empty = plan_transfer(dcp(2, 1, 4), whole(4), (20, 20))
    verify_plan(empty, none, Binding.of(plan.dst, {"kv": []}, {"kv": 1}, 0))


def test_bindings_of_another_layout_are_refused() -> None:
    plan = plan_transfer(dcp(2, 1, 4), whole(4), (0, 8))
    with pytest.raises(PlanError, match="the source binding is of another layout"):
        BoundPlan(plan, bound(dcp(2, 2, 4), 8), bound(plan.dst, 8))
    with pytest.raises(PlanError, match="the target binding is of another layout"):
        BoundPlan(plan, bound(plan.src, 8), bound(layout(RoundRobin(1)), 8))


def test_fault_c11_a_descriptor_outside_the_table_is_named_before_it_is_posted() -> None:
    for src, dst in [(dcp(4), whole()), (whole(), dcp(4))]:
        plan = plan_transfer(src, dst, (0, 64))
        few = Binding.of(src, {"kv": [0]}, {"kv": 1}, 4)
        with pytest.raises(PlanError):
            BoundPlan(plan, few, bound(dst, 64))
        with pytest.raises(PlanError, match="the block table has 1"):
            BoundPlan(plan, bound(src, 64), Binding.of(dst, {"kv": [0]}, {"kv": 1}, 4))
