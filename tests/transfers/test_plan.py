"""Plans as values: digests, links, counts, and what their constructors refuse."""

import numpy as np
import pytest
from attrs import evolve, fields
from planning import SPEC, dcp, layout, moves, whole, with_runs

from kvflow.errors import LayoutError, PlanError
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Replicated
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns
from kvflow.transfers.planner import plan_transfer

PLAN = plan_transfer(dcp(2, 1, 4), whole(8), (3, 20), absent=["indexer.2"])


def test_counts_and_links() -> None:
    assert PLAN.links == ((0, 0), (1, 0))
    assert PLAN.num_runs == len(PLAN.parts[0].runs) == 6
    assert PLAN.nbytes == 17 * (SPEC.nbytes_per_token - SPEC["indexer.2"].record.nbytes)
    two = plan_transfer(whole(), layout(Placement(Replicated(), ((0, 5),))), (0, 8))
    assert two.links == ((0, 0), (0, 5))
    assert two.nbytes == 2 * 8 * SPEC.nbytes_per_token


def test_take_selects_runs() -> None:
    runs = PLAN.parts[0].runs
    mask = runs.src_rank == 1
    assert moves(runs.take(mask)) == [m for m in moves(runs) if m[0] == 1]
    assert (
        moves(runs.take(np.array([2])))
        == moves(runs)[int(runs.count[:2].sum()) : int(runs.count[:3].sum())]
    )


@pytest.mark.parametrize("column", [f.name for f in fields(TransferRuns)])
def test_the_digest_hears_every_column(column: str) -> None:
    runs = PLAN.parts[0].runs
    values = getattr(runs, column).copy()
    values[-1] += 1
    changed = with_runs(PLAN, evolve(runs, **{column: values}))
    assert changed.digest != PLAN.digest
    assert changed != PLAN


def test_the_digest_hears_everything_else() -> None:
    part = PLAN.parts[0]
    content = (*SPEC.content, ("z", "1"))
    foreign = evolve(SPEC, content=content)
    arranged = evolve(SPEC, components=tuple(
        evolve(c, record=evolve(c.record, arrangement="row")) for c in SPEC.components
    ))  # fmt: skip
    others = [
        Plan(PLAN.src, PLAN.dst, (evolve(part, src_group="x"),), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, (evolve(part, dst_group="x"),), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, (evolve(part, components=part.components[:-1]),), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, (evolve(part, start=2),), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, (evolve(part, stop=21),), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, (part, part), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, (), PLAN.absent),
        Plan(PLAN.src, PLAN.dst, PLAN.parts, ()),
        Plan(dcp(2, 1, 5), PLAN.dst, PLAN.parts, PLAN.absent),
        Plan(PLAN.src, whole(9), PLAN.parts, PLAN.absent),
        Plan(evolve(PLAN.src, spec=foreign), PLAN.dst, PLAN.parts, PLAN.absent),
        Plan(PLAN.src, evolve(PLAN.dst, spec=foreign), PLAN.parts, PLAN.absent),
        Plan(evolve(PLAN.src, spec=arranged), PLAN.dst, PLAN.parts, PLAN.absent),
    ]  # fmt: skip
    digests = {p.digest for p in (PLAN, *others)}
    assert len(digests) == len(others) + 1


def test_equal_plans_are_equal_values() -> None:
    again = plan_transfer(dcp(2, 1, 4), whole(8), (3, 20), absent=["indexer.2"])
    assert again == PLAN
    assert len({again, PLAN}) == 1
    assert PLAN != "plan"
    reordered = Plan(PLAN.src, PLAN.dst, PLAN.parts, tuple(reversed(PLAN.absent)))
    assert reordered == PLAN


def test_the_digest_is_a_known_constant() -> None:
    """Any process, any machine: the digest of this plan while the form of digests stays."""
    assert len(PLAN.digest) == 64
    assert PLAN.digest == "662ce47ad7f75c4a9e082443e2b74bd3e4d543e1df349bd07304d1dfd80f8769"


def columns(**changes: object) -> dict[str, object]:
    names = [f.name for f in fields(TransferRuns)]
    return {name: [1, 1] for name in names} | changes


def test_runs_refuse_columns_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match="vectors of one length, got shapes"):
        TransferRuns(**columns(count=[1]))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="vectors of one length, got shapes"):
        TransferRuns(*[[[1]]] * 9)  # type: ignore[arg-type]
    for bad in (0, -1):
        with pytest.raises(PlanError, match=f"a run moves {bad} tokens, must be at least 1"):
            TransferRuns(**columns(count=[1, bad]))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="expected integers"):
        TransferRuns(**columns(token=[0.5, 1.5]))  # type: ignore[arg-type]
    assert len(TransferRuns(**columns())) == 2  # type: ignore[arg-type]
    assert TransferRuns(*[[]] * 9).num_tokens == 0


def test_a_plan_has_the_range_of_its_first_part_unless_told() -> None:
    part = PLAN.parts[0]
    later = evolve(part, start=5, stop=18)
    assert Plan(PLAN.src, PLAN.dst, (part, later)).tokens == (3, 20)
    assert Plan(PLAN.src, PLAN.dst, (later, part)).tokens == (5, 18)
    assert Plan(PLAN.src, PLAN.dst, (part,), (), (0, 4)).tokens == (0, 4)
    assert Plan(PLAN.src, PLAN.dst, ()).tokens == (0, 0)


def test_columns_of_runs_are_read_only() -> None:
    fresh = [np.array([1]) for _ in fields(TransferRuns)]
    for runs in (PLAN.parts[0].runs, PLAN.parts[0].runs.take(np.array([0])),
                 TransferRuns.of_fresh(*fresh)):  # fmt: skip
        assert not any(column.flags.writeable for column in runs.columns)
    assert not any(column.flags.writeable for column in fresh)
    assert all(c is f for c, f in zip(TransferRuns.of_fresh(*fresh).columns, fresh, strict=True))


def test_a_part_moves_one_head_and_copies_nothing_unless_told() -> None:
    runs = PLAN.parts[0].runs
    part = PlanPart("a", "b", ["latent.0"], 3, 20, runs)
    assert (part.heads, len(part.copies), part.copies.num_tokens) == ((0, 1), 0, 0)
    assert [c.shape for c in TransferRuns.none().columns] == [(0,)] * 9
    assert (PLAN.parts[0].heads, PLAN.local_links) == ((0, 1), ())
