"""Run with and without ``python -O``: laws kept, planted faults seen, unlawful values refused.

Prints one line an outcome; both runs must print the same lines.
"""

import sys

import torch
from attrs import evolve
from hypothesis import HealthCheck, Phase, given, settings
from planning import SPEC, bound, dcp, gqa, layout, tp, whole, with_runs

from kvflow.errors import KvflowError
from kvflow.layouts.arrangement import Plane
from kvflow.layouts.layout import Binding
from kvflow.layouts.mesh import Placement
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.testing import Case, LawError, cases, check_law
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.plan import Plan, TransferRuns
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan

NUM_PAIRS = 40
torch.set_num_threads(1)


def broken(both, sources, targets) -> None:
    """Moves everything, and then changes the first byte of every target."""
    StridedExecutor().execute(both, sources, targets)
    for cache in targets.values():
        for view in cache.pages.values():
            if len(view.memory):
                view.memory[0] ^= 0xFF


def lazy(both, sources, targets) -> None:
    """Moves nothing."""


def outcome(call, *arguments, **named) -> str:
    try:
        call(*arguments, **named)
    except (KvflowError, LawError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def laws() -> list[str]:
    told: list[str] = []

    @settings(
        max_examples=NUM_PAIRS, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases(max_tokens=16, max_shards=3))
    def draw(case: Case) -> None:
        for move in (StridedExecutor(), broken, lazy):
            kind = outcome(check_law, move, case.src, case.dst, case.tokens).split(":")[0]
            told.append(f"law {len(told) // 3} {kind}")
        told[-1] += f" {plan_transfer(case.src.layout, case.dst.layout, case.tokens).digest}"

    draw()
    return told


def refusals() -> list[str]:
    plan = plan_transfer(dcp(2), whole(), (0, 8))
    runs, part = plan.parts[0].runs, plan.parts[0]
    fewer = with_runs(plan, runs.take([0]))  # type: ignore[arg-type]
    other = evolve(SPEC, content=(*SPEC.content, ("model", "other")))
    near = plan_transfer(tp(1, 1), tp(1, 2, hosts=((0, 1),)), (0, 8)).parts[0]
    lost = Plan(tp(1, 1), tp(1, 2, hosts=((0, 1),)), (evolve(near, copies=TransferRuns.none()),))
    return [
        outcome(verify_plan, plan),
        outcome(verify_plan, fewer),
        outcome(verify_plan, evolve(plan, parts=(evolve(part, heads=(0, 2)),))),
        outcome(verify_plan, lost),
        outcome(verify_plan, with_runs(plan, evolve(runs, src_rank=runs.src_rank + 5))),
        outcome(plan_transfer, dcp(2), layout(Replicated(), spec=other), (0, 4)),
        outcome(plan_transfer, dcp(2), whole(), (5, 4)),
        outcome(plan_transfer, dcp(2), whole(), (0, 4), components=["latent.0"]),
        outcome(TransferRuns, *[[0]] * 9),
        outcome(bound(whole(), 8).slots, "kv", [99], 0),
        outcome(Binding.of, whole(), {"kv": [0, 0]}, {"kv": 2}, 8),
        outcome(Placement, RoundRobin(2), ((0,), (0,))),
        outcome(RoundRobin, 0),
        outcome(Field, "a", "int4", 1),
        outcome(Plane, ("a",), "t"),
        outcome(Record((Field("k", "uint8", 2, 2),)).pieces, 4, (1, 3)),
        outcome(tp, 2, 3),
        outcome(lambda: evolve(tp(2, 2), hosts=((0, 0),))),
        outcome(lambda: gqa(2)["x"]),
    ]


if __name__ == "__main__":
    print(f"asserts {'off' if sys.flags.optimize else 'on'}")
    for line in (*laws(), *refusals()):
        print(line)
