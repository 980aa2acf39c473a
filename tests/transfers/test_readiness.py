"""Readiness against a prefill that is played token by token."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import SPEC, dcp, layout, moves, whole

from kvflow.errors import PlanError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.sharding import Replicated
from kvflow.testing import cases, deal
from kvflow.transfers.cuts import moved_by, select, verify_cut
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.readiness import BEFORE, Schedule, page_readiness, stream_parts

Moment = tuple[int, int]
"""(step, layer)."""


def played(
    layout_: KVLayout, steps: list, *, lookahead: int = 1, samples: bool = True
) -> dict[tuple[str, int], Moment]:
    """(component, token) -> when it is complete: a prefill acted out, row by row."""
    dealt = [tokens_of(step) for step in steps]
    first = steps[0].start if hasattr(steps[0], "start") else steps[0][0]
    known: set[int] = set()
    done: dict[tuple[str, int], Moment] = {}
    for step, tokens in enumerate([list(range(first)), *dealt], BEFORE):
        known.update(tokens)
        sampled = samples and step == len(steps) - 1
        for c in sorted(layout_.spec.components, key=lambda c: c.layer_id):
            for t in known:
                if c.part == "main" or t + lookahead in known or sampled:
                    done.setdefault((c.name, t), (step, c.layer_id))
    return done


def tokens_of(step) -> list[int]:
    """The tokens of a step, from the hands of its ranks where it is dealt."""
    if hasattr(step, "start"):
        return [t for hand in deal(step, step.stop) for t in hand]
    return list(range(*step))


def pages_of(plan: Plan, done: dict[tuple[str, int], Moment]) -> dict[str, dict]:
    """group -> (rank, entry) -> the last moment of any claimed row, cards counted into pages."""
    start, stop = plan.tokens
    found: dict[str, dict[tuple[int, int], Moment]] = {}
    for group in plan.dst.groups:
        pages: dict[tuple[int, int], Moment] = {}
        hands = deal(plan.dst.placement.sharding, stop)
        for hand, ranks in zip(hands, plan.dst.placement.ranks, strict=True):
            entry, room = -1, 0
            for t in hand:
                if not room:
                    entry, room = entry + 1, group.paging.block_size
                room -= 1
                for name in set(group.components) & set(moved_by(plan)) if t >= start else ():
                    for rank in set(ranks) & holders(plan.dst, name):
                        at = pages.get((rank, entry), (BEFORE, -1))
                        pages[rank, entry] = max(at, done[name, t])
        if pages:
            found[group.name] = pages
    return found


def holders(layout_: KVLayout, name: str) -> set[int]:
    """The ranks of the stage that a component is in, all ranks where there are no stages."""
    for stage in layout_.stages:
        if name in stage.components:
            return set(stage.ranks)
    return {rank for group in layout_.placement.ranks for rank in group}


def reported(plan: Plan, schedule: Schedule) -> dict[str, dict]:
    for r in page_readiness(plan, schedule):
        places = list(zip(r.rank.tolist(), r.entry.tolist(), strict=True))
        assert places == sorted(set(places))  # each once, by rank, then entry
    return {
        r.group: {
            (int(r.rank[i]), int(r.entry[i])): (int(r.step[i]), int(r.layer[i]))
            for i in range(len(r))
        }
        for r in page_readiness(plan, schedule)
        if len(r)
    }


@st.composite
def schedules(draw: st.DrawFn, stop: int) -> list:
    """Consecutive steps up to `stop`, behind a prefix or not, dealt or not."""
    edges = sorted(draw(st.lists(st.integers(0, stop), min_size=1, max_size=4)))
    steps: list = []
    for low, high in zip(edges, [*edges[1:], stop], strict=True):
        dealt = BalancedChunks(draw(st.integers(1, 3)), low, high, rotate=draw(st.integers(0, 2)))
        steps.append(draw(st.sampled_from([(low, high), dealt])))
    return steps


@settings(max_examples=40)
@given(case=cases(max_tokens=30), data=st.data())
def test_pages_and_parts_are_those_of_a_prefill_that_is_played(case, data) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    steps = data.draw(schedules(case.tokens[1]))
    lookahead = data.draw(st.sampled_from([1, 1, 0, 2]))
    schedule = Schedule(steps, lookahead)
    done = played(plan.dst, steps, lookahead=lookahead)
    some = data.draw(st.lists(st.sampled_from(plan.dst.spec.names), min_size=1, unique=True))
    for one in (plan, select(plan, some)):
        assert reported(one, schedule) == pages_of(one, done)
        check_parts(one, schedule, done)


def check_parts(plan: Plan, schedule: Schedule, done: dict[tuple[str, int], Moment]) -> None:
    parts = list(stream_parts(plan, schedule))
    verify_cut(plan, [part.plan for part in parts])
    order = [(part.step, part.layer) for part in parts]
    assert order == sorted(order)
    said: Counter = Counter()
    for part in parts:
        for name, *move in all_moves(part.plan):
            assert done[name, move[-1]] == (part.step, part.layer)
            said[name, *move] += 1
    assert said == Counter(all_moves(plan))


def all_moves(plan: Plan) -> Iterator[tuple]:
    for part in plan.parts:
        for stage, runs in enumerate((part.runs, part.copies)):
            for move in moves(runs):
                yield from ((name, part.heads, stage, *move) for name in part.components)


def test_a_page_shared_by_two_steps_is_complete_after_the_second() -> None:
    plan = plan_transfer(whole(4), whole(8), (0, 20), absent=SPEC.select(part="mtp"))
    (pages,) = page_readiness(plan, Schedule([(0, 12), (12, 20)]))
    assert pages.group == "kv"
    assert pages.entry.tolist() == [0, 1, 2]
    assert pages.step.tolist() == [0, 1, 1]
    assert pages.layer.tolist() == [1, 1, 1]
    assert pages.by(0, 0).tolist() == [False, False, False]
    assert pages.by(0, 1).tolist() == [True, False, False]
    assert pages.by(1, 0).tolist() == [True, False, False]
    assert pages.by(1, 1).tolist() == [True, True, True]


def test_the_last_mtp_row_of_a_step_belongs_to_the_next() -> None:
    plan = plan_transfer(whole(4), whole(4), (0, 12))
    parts = list(stream_parts(plan, Schedule([(4, 8), (8, 12)])))
    assert [(p.step, p.layer, p.plan.tokens) for p in parts] == [
        (BEFORE, 0, (0, 4)),
        (BEFORE, 1, (0, 4)),
        (BEFORE, 2, (0, 3)),
        (0, 0, (4, 8)),
        (0, 1, (4, 8)),
        (0, 2, (3, 7)),
        (1, 0, (8, 12)),
        (1, 1, (8, 12)),
        (1, 2, (7, 12)),
    ]
    (pages,) = page_readiness(select(plan, SPEC.select(part="mtp")), Schedule([(4, 8), (8, 12)]))
    assert pages.step.tolist() == [0, 1, 1]


def test_the_rows_of_a_step() -> None:
    schedule = Schedule([(3, 5), (5, 9)], lookahead=2)
    main, mtp = ([schedule.rows(s, part) for s in (BEFORE, 0, 1)] for part in ("main", "mtp"))
    assert main == [(0, 3), (3, 5), (5, 9)]
    assert mtp == [(0, 1), (1, 3), (3, 9)]
    assert (schedule.complete("main"), schedule.complete("mtp")) == (9, 9)
    short = Schedule([(0, 1), (1, 2)], lookahead=2)
    assert [short.rows(s, "mtp") for s in (BEFORE, 0, 1)] == [(0, 0), (0, 0), (0, 2)]
    assert Schedule([(0, 1)], lookahead=2, samples=False).complete("mtp") == 0
    rows = np.arange(9)
    assert schedule.step_of(rows, "main").tolist() == [-1, -1, -1, 0, 0, 1, 1, 1, 1]
    assert schedule.step_of(rows, "mtp").tolist() == [-1, 0, 0, 1, 1, 1, 1, 1, 1]


def test_known_next_tokens_need_no_lookahead() -> None:
    plan = plan_transfer(whole(4), whole(4), (0, 12))
    parts = list(stream_parts(plan, Schedule([(0, 8), (8, 12)], lookahead=0)))
    assert [p.plan.tokens for p in parts] == [(0, 8)] * 3 + [(8, 12)] * 3


def test_a_schedule_that_samples_nothing_leaves_the_last_mtp_row_open() -> None:
    plan = plan_transfer(whole(4), whole(4), (0, 12))
    schedule = Schedule([(0, 12)], samples=False)
    for refuse in (page_readiness, lambda *a: list(stream_parts(*a))):
        with pytest.raises(PlanError, match=r"\.2: the plan moves rows up to 12, .* below 11"):
            refuse(plan, schedule)
    main = select(plan, SPEC.select(part="main"))
    assert len(list(stream_parts(main, schedule))) == 2
    shorter = plan_transfer(whole(4), whole(4), (0, 11))
    assert len(list(stream_parts(shorter, schedule))) == 3


def test_rows_beyond_the_schedule_are_refused() -> None:
    plan = plan_transfer(whole(4), whole(4), (0, 12))
    with pytest.raises(PlanError, match="rows up to 12, the schedule completes those below 11"):
        page_readiness(plan, Schedule([(0, 11)]))
    empty = plan_transfer(whole(4), whole(4), (12, 12))
    assert list(stream_parts(empty, Schedule([(0, 11)]))) == []
    assert [len(r) for r in page_readiness(empty, Schedule([(0, 11)]))] == [0]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([], "at least one step"),
        ([(0, 4), (5, 8)], r"step 1 computes tokens \[5, 8\); it must begin at 4"),
        ([(0, 4), (3, 8)], r"step 1 computes tokens \[3, 8\)"),
        ([(4, 3)], r"step 0 computes tokens \[4, 3\)"),
        ([(0, 4), (4, 10**30)], f"step 1 ends at token {10**30}, must end at most at {2**62}"),
        ([(-1, 3)], r"step 0 computes tokens \[-1, 3\)"),
        ([(0, 4), BalancedChunks(2, 5, 8)], "must begin at 4"),
    ],
)
def test_an_unlawful_schedule_is_refused(steps, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Schedule(steps)


def test_a_schedule_may_end_where_numbers_end() -> None:
    plan = plan_transfer(whole(4), whole(4), (0, 12))
    (pages,) = page_readiness(plan, Schedule([(0, 8), (8, 2**62)]))
    assert pages.step.tolist() == [0, 1, 1]  # the MTP row of token 7 waits for token 8


def test_steps_and_parts_that_are_none_are_refused() -> None:
    schedule = Schedule([(0, 4), (4, 8), (8, 9)])
    for step in (3, -2, 2**70):
        with pytest.raises(PlanError, match=rf"step {step}, must be in \[-1, 3\)"):
            schedule.rows(step, "main")
    for refuse in (
        lambda: schedule.rows(0, "mpt"),
        lambda: schedule.complete("mpt"),
        lambda: schedule.step_of(np.arange(3), "mpt"),
    ):
        with pytest.raises(PlanError, match="part 'mpt', must be one of"):
            refuse()


def test_a_million_tokens_are_streamed_without_being_enumerated() -> None:
    n, step = 1 << 20, 1 << 16
    schedule = Schedule([BalancedChunks(8, at, at + step) for at in range(0, n, step)])
    plan = plan_transfer(dcp(8, 1, 64), layout(Replicated(), 64), (0, n))
    (pages,) = page_readiness(plan, schedule)
    assert len(pages) == n // 64
    # The last page of a step waits for the MTP row of its last token, that is for the next step.
    assert pages.step.tolist() == [min((i + 1) // 1024, 15) for i in range(n // 64)]
    parts = list(stream_parts(plan, schedule))
    assert len(parts) == 16 * 3
    verify_cut(plan, [part.plan for part in parts])
