"""verify_plan on heads, stages and the second stage: every planted lie is refused by name."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from planning import FIRST, SECOND, gqa, staged, tp

from kvflow.errors import LayoutError, PlanError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan

HEADS = plan_transfer(tp(4, 4), tp(4, 2), (0, 8))
PAIRS = plan_transfer(tp(4, 2), tp(4, 2), (0, 8))
"""Two parts, of heads [0, 2) and [2, 4)."""
HOSTS = ((0, 1, 2), (3,))
COPIES = plan_transfer(tp(1, 1), tp(1, 4, hosts=HOSTS), (0, 24))
PART = COPIES.parts[0]


def refused(plan: Plan, rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        verify_plan(plan)


def parts(plan: Plan, *changed: PlanPart) -> Plan:
    return Plan(plan.src, plan.dst, changed, plan.absent, plan.tokens)


@pytest.mark.parametrize(
    ("heads", "rule"),
    [
        ([(0, 2)], r"key.0: heads \[0, 2\) are moved of 4"),
        ([(2, 4)], r"key.0: heads \[2, 4\) are moved of 4"),
        ([(0, 2), (2, 3)], r"key.0: heads \[0, 3\) are moved of 4"),
        ([(0, 1), (2, 4)], r"key.0: heads \[1, 2\) are not moved"),
        ([(2, 4), (0, 1)], r"key.0: heads \[1, 2\) are not moved"),
        ([(0, 2), (1, 4)], r"key.0: heads \[1, 2\) are moved twice"),
        ([(0, 2), (0, 2), (2, 4)], r"key.0: heads \[0, 2\) are moved twice"),
        ([(0, 2), (2, 4), (3, 4)], r"key.0: heads \[3, 4\) are moved twice"),
        ([(0, 4), (1, 2)], r"key.0: heads \[1, 4\) are moved twice"),
        ([(0, 5)], r"key.0: heads \[0, 5\) are moved of 4"),
        ([(-1, 4)], r"key.0: heads \[-1, 4\) are moved of 4"),
    ],
)
def test_heads_are_moved_once_and_none_is_left_out(heads: list[Any], rule: str) -> None:
    first = PAIRS.parts[0]
    refused(parts(PAIRS, *(evolve(first, heads=h) for h in heads)), rule)


def test_heads_of_one_component_alone_are_missed() -> None:
    first, second = PAIRS.parts
    assert (first.heads, second.heads) == ((0, 2), (2, 4))
    keys_only = evolve(second, components=("key.0",))
    refused(parts(PAIRS, first, keys_only), r"value.0: heads \[0, 2\) are moved of 4")
    values = evolve(second, components=("value.0",))
    verify_plan(parts(PAIRS, keys_only, values, first))


def test_heads_that_no_rank_holds_together_are_refused() -> None:
    whole = evolve(PAIRS.parts[0], heads=(0, 4))
    refused(
        parts(PAIRS, whole),
        r"heads \[0, 4\) of \['key.0', 'value.0'\] have no one placement at the source ",
    )
    wide = plan_transfer(tp(4, 1), tp(4, 2), (0, 8))
    refused(
        parts(wide, evolve(wide.parts[0], heads=(0, 4))),
        r"heads \[0, 4\) of \['key.0', 'value.0'\] have no one placement at the target ",
    )
    backwards = [evolve(PAIRS.parts[0], heads=h) for h in ((0, 2), (2, 1), (1, 4))]
    refused(parts(PAIRS, *backwards), "heads")


def test_a_part_without_heads_is_refused() -> None:
    first, second = PAIRS.parts
    none = [evolve(first, heads=h) for h in ((0, 1), (1, 1), (1, 2))]
    refused(
        parts(PAIRS, *none, second), r"heads \[1, 1\) of .* have no one placement at the source"
    )


def test_runs_of_other_heads_are_refused() -> None:
    """Heads [2, 4) through the ranks of [0, 2), and the other way around."""
    first, second = PAIRS.parts
    swapped = (evolve(first, runs=second.runs), evolve(second, runs=first.runs))
    refused(parts(PAIRS, *swapped), "source side of run 0 has a token its rank does not own")
    half = evolve(first.runs, dst_rank=second.runs.dst_rank)
    refused(
        parts(PAIRS, evolve(first, runs=half), second),
        "target side of run 0 has a token its rank does not own",
    )


def test_a_component_of_another_placement_is_refused() -> None:
    plan = plan_transfer(staged(((0,), (1,)), 2), staged(((0, 1), (1, 2)), 3), (0, 8))
    first, second = plan.parts
    joined = evolve(first, components=FIRST + SECOND)
    refused(
        parts(plan, joined),
        r"heads \[0, 2\) of \['key.0', 'value.0', 'key.1', 'value.1'\] have no one placement at "
        "the source",
    )
    flat = KVLayout.uniform(gqa(2, 2), Placement.simple(Replicated()), Paged(4))
    plan = plan_transfer(flat, staged(((0, 1), (1, 2)), 3), (0, 8))
    joined = evolve(plan.parts[0], components=FIRST + SECOND)
    refused(parts(plan, joined), "have no one placement at the target")
    crossed = [evolve(first, components=SECOND), evolve(second, components=FIRST)]
    refused(parts(plan, *crossed), "has a token its rank does not own")


def with_copies(copies: TransferRuns, plan: Plan = COPIES) -> Plan:
    return parts(plan, evolve(plan.parts[0], copies=copies))


def changed(i: int, **columns: int) -> Plan:
    """Other numbers in one copy."""
    values = {}
    for name, value in columns.items():
        values[name] = getattr(PART.copies, name).copy()
        values[name][i] = value
    return with_copies(evolve(PART.copies, **values))


def rows(runs: TransferRuns) -> list[tuple[int, ...]]:
    return list(zip(*(c.tolist() for c in runs.columns), strict=True))


def test_what_is_copied_is_known() -> None:
    """24 tokens, pages of 4: ranks 0, 1 and 2 receive 8 each and copy them to the other two."""
    told = [(a, b, t, n) for a, b, t, _, _, _, _, _, n in rows(PART.copies)]
    assert told[:4] == [(0, 1, 0, 4), (0, 1, 4, 4), (0, 2, 0, 4), (0, 2, 4, 4)]
    assert len(told) == 12


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (changed(0, dst_rank=3), "copy side of run 0 has two hosts"),
        (changed(5, src_rank=3), "copy side of run 5 has two hosts"),
        (changed(0, src_rank=1), "copy side of run 0 has tokens that no link has brought"),
        (changed(2, src_rank=2), "copy side of run 2 has tokens that no link has brought"),
        (changed(1, token=8, src_local=8, dst_local=8), "run 1 has tokens that no link has brou"),
        (changed(0, count=3), "copy side of run 0 has tokens that no link has brought"),
        (changed(0, count=5), "copy side of run 0 has tokens that no link has brought"),
        (changed(0, token=1), "copy side of run 0 has tokens that no link has brought"),
        (changed(0, token_stride=2), "copy side of run 0 has tokens that no link has brought"),
        (changed(0, src_local=4), "copy side of run 0 has tokens that no link has brought"),
        (changed(0, src_stride=2), "copy side of run 0 has tokens that no link has brought"),
        (changed(0, dst_local=4), "copy side of run 0 has another place than on the rank"),
        (changed(0, dst_stride=2), "copy side of run 0 has another place than on the rank"),
        (changed(0, dst_rank=0), r"target rank 0 gets 28 tokens of \[0, 24\), needs 24"),
        (changed(0, dst_rank=2), "target rank 1 gets 20 tokens .* needs 24"),
        (changed(0, dst_rank=7), "copy side of run 0 has two shards"),
        (changed(0, dst_rank=-1), "copy side of run 0 has two shards"),
    ],
)
def test_lies_about_copies_are_refused(plan: Plan, rule: str) -> None:
    refused(plan, rule)


def test_the_copy_is_named_with_all_its_numbers() -> None:
    row = [0, 3, 0, 1, 0, 1, 0, 1, 4]
    with pytest.raises(PlanError) as error:
        verify_plan(changed(0, dst_rank=3))
    assert str(row) in str(error.value)


def test_copies_too_many_or_too_few_are_refused() -> None:
    verify_plan(COPIES)
    copies = PART.copies
    fewer = copies.take(np.arange(1, len(copies)))
    refused(with_copies(fewer), r"target rank 1 gets 20 tokens of \[0, 24\), needs 24")
    refused(with_copies(TransferRuns.none()), "target rank 0 gets 8 tokens of .* needs 24")
    refused(with_copies(copies.take(np.array([0, *range(12)]))), "rank 1 gets 28 tokens")
    twice = copies.take(np.array([0, 0, *range(2, 12)]))  # the right number, one of them double
    refused(with_copies(twice), "target rank 1: token 0 is written twice")


def test_any_order_of_copies_is_lawful() -> None:
    verify_plan(with_copies(PART.copies.take(np.arange(12)[::-1])))


def test_a_copy_of_a_copy_is_refused() -> None:
    """Rank 0 has tokens 8..11 from rank 1 by a copy; it may not hand them on."""
    i = next(i for i, r in enumerate(rows(PART.copies)) if r[:3] == (1, 2, 8))
    refused(changed(i, src_rank=0), f"copy side of run {i} has tokens that no link has brought")


def test_copies_between_shards_are_refused() -> None:
    """Local index 0 exists on both shards, and is another token there."""
    dst = KVLayout.uniform(gqa(1), Placement(RoundRobin(2, 4), ((0, 2), (1, 3))), Paged(4))
    dst = evolve(dst, hosts=((0, 1, 2, 3),))
    plan = plan_transfer(tp(1, 1), dst, (0, 16))
    copies = plan.parts[0].copies
    to = copies.dst_rank.copy()
    to[0] = (to[0] + 1) % 4
    refused(with_copies(evolve(copies, dst_rank=to), plan), "copy side of run 0 has two shards")


def test_a_plan_without_hosts_makes_no_copies() -> None:
    apart = plan_transfer(tp(1, 1), tp(1, 4), (0, 24))
    assert not len(apart.parts[0].copies)
    foreign = parts(apart, PART)
    refused(foreign, "copy side of run 0 has two hosts")


def test_other_hosts_make_another_plan_unlawful() -> None:
    refused(
        Plan(COPIES.src, tp(1, 4, hosts=((0, 1), (2, 3))), COPIES.parts),
        "copy side of run 2 has two hosts",
    )
    verify_plan(Plan(COPIES.src, tp(1, 4, hosts=((3,), (2, 1, 0))), COPIES.parts))


def test_copies_of_every_part_are_proven() -> None:
    plan = plan_transfer(tp(2, 2), tp(2, 4, hosts=((0, 1), (2, 3))), (0, 24))
    verify_plan(plan)
    first, second = plan.parts
    bad = evolve(second.copies, dst_local=second.copies.dst_local + 4)
    refused(parts(plan, first, evolve(second, copies=bad)), "copy side of run 0 has another place")
    swapped = [evolve(first, copies=second.copies), evolve(second, copies=first.copies)]
    refused(parts(plan, *swapped), "tokens that no link has brought")


def digests(*plans: Plan) -> set[str]:
    return {plan.digest for plan in plans}


def test_the_digest_hears_heads_copies_hosts_and_stages() -> None:
    several = [
        COPIES,
        with_copies(PART.copies.take(np.arange(11))),
        with_copies(PART.copies.take(np.arange(12)[::-1])),
        with_copies(TransferRuns.none()),
        parts(COPIES, evolve(PART, heads=(0, 2))),
        parts(COPIES, evolve(PART, heads=(1, 1))),
        parts(COPIES, evolve(PART, runs=PART.copies, copies=PART.runs)),
        Plan(evolve(COPIES.src, hosts=((0,),)), COPIES.dst, COPIES.parts),
        *(
            Plan(COPIES.src, tp(1, 4, hosts=hosts), COPIES.parts)
            for hosts in ((), ((0, 1, 2),), ((0, 1), (2, 3)), ((3,), (0, 1, 2)))
        ),
        Plan(COPIES.src, evolve(COPIES.dst, head_ranks=()), COPIES.parts),
        Plan(COPIES.src, evolve(COPIES.dst, head_ranks=((0, 1), (2, 3))), COPIES.parts),
    ]
    assert len(digests(*several)) == len(several)
    here = staged(((0,), (1,)), 2)
    stages = [here, staged(((1,), (0,)), 2), evolve(here, stages=())]
    plans = [Plan(src, here, ()) for src in stages] + [Plan(here, dst, ()) for dst in stages[1:]]
    assert len(digests(*plans)) == len(plans)


@pytest.mark.parametrize("column", range(9))
def test_the_digest_hears_every_column_of_copies(column: int) -> None:
    columns = [c.copy() for c in PART.copies.columns]
    columns[column][-1] += 1
    assert with_copies(TransferRuns(*columns)) != COPIES


def test_heads_are_integers() -> None:
    for heads in ((0, 1.5), (None, 1), (False, True)):
        with pytest.raises(LayoutError, match=r"a head .*must be an integer"):
            evolve(PART, heads=heads)
    assert evolve(PART, heads=(np.int32(0), np.int64(1))).heads == (0, 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_part_of_components_with_other_numbers_of_heads_is_refused(num_ranks: int) -> None:
    """Two heads beside four: head 0 is all that a rank has of the one, half of what it has of the
    other, and a part has one place for its heads in a row."""
    key = Component("key", 0, Record((Field("key", "uint8", 3, 2),), "t h e"))
    value = Component("value", 0, Record((Field("value", "uint8", 3, 4),), "t h e"))
    spec = KVCacheSpec((key, value))
    src, dst = (evolve(tp(4, t), spec=spec) for t in (num_ranks, 2))
    plan = plan_transfer(src, dst, (0, 8))
    keys = [p for p in plan.parts if p.components == ("key.0",)]
    first, second = (p for p in plan.parts if p.components == ("value.0",))
    verify_plan(plan)
    halves = [evolve(first, heads=h) for h in ((0, 1), (1, 2))]
    verify_plan(parts(plan, *keys, *halves, second))
    joined = evolve(keys[0], components=("key.0", "value.0"))
    refused(parts(plan, joined, keys[1], halves[1], second), "have no one placement at the source")
