"""Plans as whole values: what their digest tells apart, what verify refuses beyond the runs, and
caches that a plan needs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st
from planning import SPEC, bound, dcp, layout, whole, with_runs

from kvflow.errors import ContentMismatch, LayoutError, PlanError
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.transfers.claims import MAX_TOKENS
from kvflow.transfers.executors.base import Executor, RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.joint import Holding
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan, TransferRuns
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.readiness import Schedule
from kvflow.transfers.verify import verify_plan

PLAN = plan_transfer(dcp(2, 1, 4), whole(4), (2, 23))
PART = PLAN.parts[0]


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.array])
def test_the_digest_does_not_hear_how_numbers_were_spelled(kind: Callable[[int], Any]) -> None:
    again = plan_transfer(PLAN.src, PLAN.dst, (kind(2), kind(23)))
    assert again.digest == PLAN.digest
    assert (again.tokens, again.parts[0].start) == ((2, 23), 2)
    assert evolve(PLAN, parts=[evolve(PART, start=kind(2))], tokens=[2, kind(23)]) == PLAN


@pytest.mark.parametrize("tokens", [(False, True), (0, 1.0), ("0", 1), (0, None)])
def test_tokens_are_integers(tokens: tuple[Any, Any]) -> None:
    with pytest.raises(LayoutError, match="must be an integer"):
        plan_transfer(PLAN.src, PLAN.dst, tokens)
    with pytest.raises(LayoutError, match="must be an integer"):
        evolve(PART, start=tokens[0], stop=tokens[1])
    with pytest.raises(LayoutError, match="must be an integer"):
        evolve(PLAN, tokens=tokens)


def told(content: tuple[tuple[str, str], ...] = (), names: tuple[str, ...] = ("f",)) -> Plan:
    """A plan whose texts are given."""
    record = Record(tuple(Field(name, "uint8", 1) for name in names))
    spec = KVCacheSpec((Component("latent", 0, record),), content)
    return plan_transfer(layout(RoundRobin(2), 4, spec), layout(Replicated(), 4, spec), (0, 8))


texts = st.text(st.sampled_from("=ab\0,:x1()s"), max_size=4)
contents = st.lists(st.tuples(texts, texts), max_size=3, unique_by=lambda p: p[0]).map(tuple)
words = st.text(st.sampled_from("abx1s_"), min_size=1, max_size=4)
field_names = st.lists(words, min_size=1, max_size=3, unique=True).map(tuple)


@given(contents, contents, field_names, field_names)
def test_texts_do_not_run_into_each_other(
    one: tuple[Any, ...], two: tuple[Any, ...], here: tuple[str, ...], there: tuple[str, ...]
) -> None:
    same = (one, here) == (two, there)
    assert (told(one, here).digest == told(two, there).digest) == same


def test_the_digest_delimits_fields_and_sections() -> None:
    assert told((("a=b", "c"),)).digest != told((("a", "b=c"),)).digest
    assert told((("a", "sb"),)).digest != told((("as", "b"),)).digest
    groups = [("a b", "c"), ("a", "b c")]
    plans = []
    for names in groups:
        parts = zip(names, (SPEC.names[:1], SPEC.names[1:]), strict=True)
        split = tuple(CacheGroup(name, comps, Paged(4)) for name, comps in parts)
        plans.append(plan_transfer(evolve(PLAN.src, groups=split), PLAN.dst, (0, 8)))
    pool = evolve(PLAN.src, groups=(CacheGroup("kv", SPEC.names, Pool(4)),))
    plans += [PLAN, plan_transfer(pool, PLAN.dst, (2, 23)), evolve(PLAN, tokens=(2, 24))]
    none = plan_transfer(PLAN.src, PLAN.dst, (0, 0))
    plans += [none, plan_transfer(PLAN.src, PLAN.dst, (1, 1))]
    swapped = evolve(PART.runs, src_rank=PART.runs.dst_rank, dst_rank=PART.runs.src_rank)
    plans.append(with_runs(PLAN, swapped))
    assert len({p.digest for p in plans}) == len(plans)


def test_equal_specs_and_unequal_ones_are_told_apart() -> None:
    other = evolve(SPEC, content=(*SPEC.content, ("z", "1")))
    sides = [SPEC, other]
    digests = {
        Plan(evolve(PLAN.src, spec=a), evolve(PLAN.dst, spec=b), PLAN.parts).digest
        for a in sides
        for b in sides
    }
    assert len(digests) == 4


def test_runs_are_read_only_copies() -> None:
    values = [np.ones(2, np.int64) for _ in fields(TransferRuns)]
    runs = TransferRuns(*values)
    values[-1][0] = 5
    assert runs.count.tolist() == [1, 1]
    for made in (runs, runs.take(np.array([1])), PART.runs, runs.take(np.array([True, False]))):
        for column in made.columns:
            with pytest.raises(ValueError, match="read-only"):
                column[0] = 7
    assert evolve(runs, count=[2, 2]).token is runs.token, "what is read-only already is shared"
    base = np.ones(4, np.int64)
    view = base[::2]
    view.setflags(write=False)
    viewed = evolve(runs, count=view)
    base[0] = 9
    assert viewed.count.tolist() == [1, 1]
    whole_of = runs.take(slice(None))  # type: ignore[arg-type]
    assert [c.tolist() for c in whole_of.columns] == [c.tolist() for c in runs.columns]


OTHER = evolve(SPEC, content=(*SPEC.content, ("model", "other")))
BF16 = evolve(
    SPEC,
    components=tuple(
        evolve(c, record=Record((Field("x", "bfloat16", 3),))) for c in SPEC.components
    ),
)


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (evolve(PLAN, absent=("latent.0",)), r"\['latent.0'\] are to be moved and absent"),
        (evolve(PLAN, absent=("nope",)), r"absent names \['nope'\], which neither side"),
        (evolve(PLAN, dst=evolve(PLAN.dst, spec=OTHER)), "content field 'model'"),
        (evolve(PLAN, dst=evolve(PLAN.dst, spec=BF16)), "component indexer.0: source stores main"),
        (evolve(PLAN, parts=(evolve(PART, src_group="zz"),)), "the source has no group 'zz'"),
        (evolve(PLAN, parts=(evolve(PART, dst_group="zz"),)), "the target has no group 'zz'"),
        (evolve(PLAN, tokens=(2, 24)), r"moves tokens \[2, 23\), the plan is for \[2, 24\)"),
        (evolve(PLAN, parts=(evolve(PART, start=-5),)), r"moves tokens \[-5, 23\)"),
        (evolve(PLAN, parts=(evolve(PART, start=-5),), tokens=(-5, 23)), "must be a range inside"),
        (evolve(PLAN, parts=(evolve(PART, stop=1),), tokens=(2, 1)), "must be a range inside"),
        (evolve(PLAN, parts=(), absent=SPEC.names, tokens=(-1, 0)), "must be a range inside"),
    ],
)
def test_verify_refuses_what_a_plan_may_not_claim(plan: Plan, rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        verify_plan(plan)


def test_content_and_records_are_one_check() -> None:
    for spec in (OTHER, BF16):
        with pytest.raises(ContentMismatch) as planned:
            plan_transfer(PLAN.src, evolve(PLAN.dst, spec=spec), PLAN.tokens)
        with pytest.raises(ContentMismatch) as verified:
            verify_plan(evolve(PLAN, dst=evolve(PLAN.dst, spec=spec)))
        assert str(planned.value) == str(verified.value)


def test_parts_of_one_plan_have_one_range() -> None:
    few = plan_transfer(PLAN.src, PLAN.dst, (2, 9)).parts[0]
    first = evolve(PART, components=SPEC.names[:2])
    rest = evolve(few, components=SPEC.names[2:])
    with pytest.raises(PlanError, match=r"moves tokens \[2, 9\), the plan is for \[2, 23\)"):
        verify_plan(Plan(PLAN.src, PLAN.dst, (first, rest)))


def test_a_foreign_binding_is_a_plan_error() -> None:
    other = KVLayout.uniform(SPEC, PLAN.src.placement, Paged(4), group="other")
    with pytest.raises(PlanError, match="the source binding is of another layout"):
        verify_plan(PLAN, bound(other, 23), bound(PLAN.dst, 23))


@pytest.mark.parametrize("tokens", [None, 5, "09", (1,), (1, 2, 3)])
def test_a_range_is_two_numbers(tokens: Any) -> None:
    for make in (
        lambda: plan_transfer(PLAN.src, PLAN.dst, tokens),
        lambda: evolve(PLAN, tokens=tokens),
        lambda: Holding(PLAN.src, tokens),
        lambda: Schedule([tokens]),
    ):
        with pytest.raises(LayoutError):
            make()


def test_a_range_that_no_memory_can_plan_is_refused() -> None:
    for start in (0, 2**61):
        with pytest.raises(PlanError, match=f"are {MAX_TOKENS + 1}, one plan moves at most"):
            plan_transfer(PLAN.src, PLAN.dst, (start, start + MAX_TOKENS + 1))
        verify_plan(plan_transfer(PLAN.dst, PLAN.dst, (start, start)))
    with pytest.raises(PlanError, match="one plan moves at most"):
        verify_plan(evolve(PLAN, parts=[evolve(PART, stop=2**61)], tokens=(2, 2**61)))


def test_one_name_is_not_several() -> None:
    for what in ("components", "absent"):
        with pytest.raises(LayoutError, match=r"expected several values, got 'latent\.0'"):
            plan_transfer(PLAN.src, PLAN.dst, (0, 9), **{what: "latent.0"})  # type: ignore[arg-type]


@pytest.mark.parametrize("column", [f.name for f in fields(TransferRuns)])
@pytest.mark.parametrize("value", [2**40, 2**62, 2**63 - 1, -(2**63)])
def test_huge_numbers_are_refused_in_little_memory(column: str, value: int) -> None:
    """For a rule, not for want of memory, and without an overflow that happens to look right."""
    several = int(np.flatnonzero(PART.runs.count > 1)[0])
    values = getattr(PART.runs, column).copy()
    values[several] = value
    with pytest.raises(PlanError):
        verify_plan(with_runs(PLAN, evolve(PART.runs, **{column: values})))


def test_a_placement_of_huge_ranks_takes_no_memory() -> None:
    far = Placement(RoundRobin(2), ((2**61,), (5,)))
    plan = plan_transfer(layout(far), layout(Placement(Replicated(), ((2**60, 1),))), (0, 9))
    verify_plan(plan)
    runs = plan.parts[0].runs
    for rank in (0, 4, 6, 2**61 - 1, 2**61 + 1):
        with pytest.raises(PlanError, match="a token its rank does not own"):
            verify_plan(with_runs(plan, evolve(runs, src_rank=np.full(len(runs), rank))))


EXECUTORS = [ReferenceExecutor(), StridedExecutor()]


def caches(side: KVLayout, ranks: list[int]) -> dict[int, RankCache]:
    return {r: RankCache.allocate(side, r, {"kv": 8}) for r in ranks}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rank_without_a_cache_is_named_before_anything_moves(executor: Executor) -> None:
    target = layout(Placement(Replicated(), ((0, 3),)))
    plan = plan_transfer(PLAN.src, target, (0, 9))
    both = BoundPlan(plan, bound(PLAN.src, 9), bound(target, 9))
    sources, targets = caches(PLAN.src, [0, 1]), caches(target, [0, 3])
    for cache in sources.values():
        for view in cache.pages.values():
            view.memory.fill_(1)
    with pytest.raises(PlanError, match="source rank 1, which has no cache"):
        executor.execute(both, {0: sources[0]}, targets)
    with pytest.raises(PlanError, match="target rank 3, which has no cache"):
        executor.execute(both, sources, {0: targets[0]})
    with pytest.raises(PlanError, match="target rank 0, which has no cache"):
        executor.execute(both, sources, {})
    assert not any(v.memory.any() for c in targets.values() for v in c.pages.values())
    executor.execute(both, sources, targets)
    assert all(v.memory.any() for c in targets.values() for v in c.pages.values())
    empty = BoundPlan(plan_transfer(PLAN.src, target, (0, 0)), both.src, both.dst)
    executor.execute(empty, {}, {})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_cache_of_another_rank_or_layout_is_refused_before_anything_moves(
    executor: Executor,
) -> None:
    both = BoundPlan(PLAN, bound(PLAN.src, 23), bound(PLAN.dst, 23))
    sources, targets = caches(PLAN.src, [0, 1]), caches(PLAN.dst, [0])
    with pytest.raises(PlanError, match="cache of source rank 0 is that of rank 1"):
        executor.execute(both, {0: sources[1], 1: sources[0]}, targets)
    with pytest.raises(PlanError, match="pages of 8 in the cache of target rank 0, the layout's"):
        executor.execute(both, sources, caches(whole(8), [0]))
    other = targets[0].pages["latent.0"]
    narrow = evolve(other, record=Record([Field("other", "uint8", 4)]))
    swapped = RankCache(0, targets[0].pages | {"latent.0": narrow})
    with pytest.raises(PlanError, match=r"records other.* cache of target rank 0, the layout"):
        executor.execute(both, sources, {0: swapped})
    few = RankCache.allocate(PLAN.dst, 0, {"kv": 2})
    with pytest.raises(PlanError, match="2 blocks in the cache of target rank 0, the binding"):
        executor.execute(both, sources, {0: few})
