"""Streaming readiness: which rows and pages are complete while prefill still runs.

Prefill computes a prompt in steps, and in each step layer after layer. A row of a main layer is
there once its layer has run in the step of its token. The MTP row of token i is computed from
token i+1, so it waits for the step of that one: the last row of a step belongs to the next step.
Everything here is arithmetic on the runs of a plan; no token is enumerated.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from kvflow.errors import PlanError
from kvflow.layouts.paging import page_of
from kvflow.layouts.sharding import Ints, Sharding
from kvflow.layouts.spec import Part
from kvflow.layouts.values import MOST, integer, items_of, not_negative, token_range
from kvflow.transfers.cuts import Range, clip, moved_by, select
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns

BEFORE = -1
"""The step of what was there before the first step: a prefix taken over from another request."""


def _steps(steps: Iterable[Sharding | tuple[int, int]]) -> tuple[Range, ...]:
    return tuple(
        token_range((step.start, step.stop) if isinstance(step, Sharding) else step)
        for step in items_of(steps)
    )


@frozen
class Schedule:
    """The prefill steps of one request: consecutive token ranges, each given as ``(start, stop)``
    or as the sharding that deals them to ranks (`BalancedChunks`). How a step is dealt changes who
    computes a row, not when its layer is complete: a step ends a layer on all ranks together.

    Tokens below the first step are there already, but for MTP rows whose next token is not.
    `lookahead` is how many tokens later the token lies that an MTP row waits for; 0 if the engine
    computes MTP rows with their next token known before its own step. With `samples`, the last
    step samples the token behind the prompt and so completes the last MTP rows.
    """

    steps: tuple[Range, ...] = field(converter=_steps)
    lookahead: int = field(default=1, converter=integer, validator=not_negative)
    samples: bool = True

    def __attrs_post_init__(self) -> None:
        if not self.steps:
            raise PlanError("a schedule needs at least one step")
        at = self.steps[0][0]
        for i, (start, stop) in enumerate(self.steps):
            if stop > MOST:
                raise PlanError(f"step {i} ends at token {stop}, must end at most at {MOST}")
            if start != at or not 0 <= start <= stop:
                raise PlanError(
                    f"step {i} computes tokens [{start}, {stop}); it must begin at {at}, where the "
                    "step before it ends, and must not end before it begins"
                )
            at = stop

    def rows(self, step: int, part: str) -> Range:
        """The rows that a step completes in a layer of "main" or of "mtp"; `BEFORE` names those
        that were there before. Raises `PlanError` for a step that the schedule does not have, or
        another part."""
        if part not in get_args(Part):
            raise PlanError(f"part {part!r}, must be one of {get_args(Part)}")
        if not BEFORE <= integer(step, "step") < len(self.steps):
            raise PlanError(f"step {step}, must be in [{BEFORE}, {len(self.steps)})")
        start, stop = (0, self.steps[0][0]) if step == BEFORE else self.steps[step]
        if part == "mtp":
            start = max(start - self.lookahead, 0)
            if not (self.samples and step == len(self.steps) - 1):
                stop = max(stop - self.lookahead, 0)
        return start, stop

    def complete(self, part: str) -> int:
        """How many rows, from position 0, the whole schedule leaves complete."""
        return self.rows(len(self.steps) - 1, part)[1]

    def step_of(self, rows: Ints, part: str) -> Ints:
        """The step that completes each row, `BEFORE` for what was there."""
        order = range(BEFORE, len(self.steps))
        ends = np.array([self.rows(step, part)[1] for step in order], np.int64)
        return np.searchsorted(ends, rows, side="right").astype(np.int64) + BEFORE


@frozen(eq=False)
class PageReadiness:
    """The pages of one group that a plan writes: page i is entry ``entry[i]`` of the block table on
    target ``rank[i]``, and all that the plan claims of it is complete once layer ``layer[i]`` of
    step ``step[i]`` is. Sorted by rank, then entry; int64 columns of equal length."""

    group: str
    rank: Ints
    entry: Ints
    step: Ints
    layer: Ints

    def __len__(self) -> int:
        return len(self.entry)

    def by(self, step: int, layer: int) -> npt.NDArray[np.bool_]:
        """Which pages are complete once `layer` of `step` is."""
        done: npt.NDArray[np.bool_] = (self.step < step) | (
            (self.step == step) & (self.layer <= layer)
        )
        return done


def page_readiness(plan: Plan, schedule: Schedule) -> tuple[PageReadiness, ...]:
    """By target group, when each page that the plan writes is complete in every component that the
    plan moves; `select` the components first to know it of some. A page shared by two steps is
    complete after the second. Raises `PlanError` for a plan that moves rows which the schedule
    does not complete."""
    _check_complete(plan, schedule)
    layers = _layers(plan)
    found = []
    for group in dict.fromkeys(part.dst_group for part in plan.parts):
        size = plan.dst.group(group).paging.block_size
        rows = [
            _moments(plan, part, size, schedule, layers)
            for part in plan.parts
            if part.dst_group == group
        ]
        rank, entry, when = _latest(np.concatenate(rows, axis=1))
        step, layer = when // len(layers), layers[when % len(layers)]
        found.append(PageReadiness(group, rank, entry, step, layer))
    return tuple(found)


def _layers(plan: Plan) -> Ints:
    """The layers that a plan moves, in the order in which they run."""
    return np.unique([plan.dst.spec[name].layer_id for name in moved_by(plan)]).astype(np.int64)


def _moments(plan: Plan, part: PlanPart, block_size: int, schedule: Schedule, layers: Ints) -> Ints:
    """int64 [3, pages]: rank, entry and moment of the last row of every page of a part; a moment
    counts layers over all steps."""
    last: dict[str, int] = {}
    for name in part.components:
        c = plan.dst.spec[name]
        at = int(np.searchsorted(layers, c.layer_id))
        last[c.part] = max(last.get(c.part, at), at)
    written = [_last_rows(runs, block_size) for runs in (part.runs, part.copies)]
    rank, entry, row = _latest(np.concatenate(written, axis=1))
    when = [schedule.step_of(row, which) * len(layers) + at for which, at in last.items()]
    return np.stack([rank, entry, np.maximum.reduce(when)])


def _last_rows(runs: TransferRuns, block_size: int) -> Ints:
    """int64 [3, runs]: rank, entry and last row of each run."""
    row = runs.token + (runs.count - 1) * runs.token_stride
    return np.stack([runs.dst_rank, page_of(runs.dst_local, block_size), row])


def _latest(pages: Ints) -> Ints:
    """Of columns (rank, entry, value) those with the largest value of each (rank, entry)."""
    ordered: Ints = pages[:, np.lexsort(pages[::-1])]
    another = (np.diff(ordered[:2]) != 0).any(axis=0)
    return ordered[:, np.append(another, True)[: pages.shape[1]]]


def _check_complete(plan: Plan, schedule: Schedule) -> None:
    start, stop = plan.tokens
    for name in moved_by(plan) if start < stop else ():
        which = plan.dst.spec[name].part
        if stop > schedule.complete(which):
            raise PlanError(
                f"{name}: the plan moves rows up to {stop}, the schedule completes those below "
                f"{schedule.complete(which)}"
            )


@frozen(eq=False)
class StreamPart:
    """What can move once `layer` of `step` is complete, and not before."""

    step: int
    layer: int
    plan: Plan


def stream_parts(plan: Plan, schedule: Schedule) -> Iterator[StreamPart]:
    """The plan cut by (step, layer), in the order in which prefill completes them; parts without a
    token are left out. `verify_cut(plan, [p.plan for p in parts])` proves that their union is the
    whole. Raises `PlanError` as `page_readiness` does."""
    _check_complete(plan, schedule)
    moved = [plan.dst.spec[name] for name in moved_by(plan)]
    layers = sorted({(c.layer_id, c.part) for c in moved})
    names = {key: [c.name for c in moved if (c.layer_id, c.part) == key] for key in layers}
    for step in range(BEFORE, len(schedule.steps)):
        clipped: dict[Range, Plan] = {}
        for layer_id, which in layers:
            low, high = schedule.rows(step, which)
            low, high = max(low, plan.tokens[0]), min(high, plan.tokens[1])
            if low >= high:
                continue
            if (low, high) not in clipped:
                clipped[low, high] = clip(plan, low, high)
            yield StreamPart(step, layer_id, select(clipped[low, high], names[layer_id, which]))
