"""Operators: typed stages between layouts, and pipelines that only accept stages that fit.

An operator says from which layout to which it goes and which components it claims. Its law: for
every token of the range it is run on and every claimed component and field,
read(target, t) == read(source, t), and no other byte of the target changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from attrs import field, frozen

from kvflow.comm import Comm
from kvflow.errors import LayoutError, PlanError
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, slots_of
from kvflow.layouts.sharding import Ints, Replicated
from kvflow.transfers.executors.base import Endpoint, Executor, RankCache
from kvflow.transfers.executors.collective import GatherSchedule, gather_schedule
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

Caches = Mapping[int, RankCache]
Tokens = tuple[int, int]


@runtime_checkable
class Operator(Protocol):
    """A stage from `source` to `target` that claims `components`."""

    @property
    def source(self) -> KVLayout: ...

    @property
    def target(self) -> KVLayout: ...

    @property
    def components(self) -> tuple[str, ...]:
        """What the law claims; every other component of either side is deliberately left alone."""
        ...

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        """Moves every byte of a plan from `source` to `target`. The caches are by rank; a stage
        of one rank among several processes is given that rank's alone."""
        ...


def bind(operator: Operator, src: Binding, dst: Binding, tokens: Tokens) -> BoundPlan:
    """The verified plan of one run of a stage. Raises `PlanError` as planning does."""
    names = set(operator.source.spec.names) | set(operator.target.spec.names)
    absent = names - set(operator.components)
    plan = plan_transfer(operator.source, operator.target, tokens, absent=absent)
    return BoundPlan(plan, src, dst)


def _check_components(stage: Operator) -> None:
    """The claims of a stage must be plannable: an empty plan proves content and components."""
    start = max(stage.source.placement.sharding.start, stage.target.placement.sharding.start)
    everything = {*stage.source.spec.names, *stage.target.spec.names}
    absent = everything - set(stage.components)
    claims = stage.components
    plan_transfer(stage.source, stage.target, (start, start), components=claims, absent=absent)


@frozen(eq=False)
class Reassemble:
    """Any layout to any other, carried out by the executor it is given.

    Raises `PlanError` (`ContentMismatch`) at construction if the two sides do not hold the same
    content, or if a component they do not share is claimed."""

    source: KVLayout
    target: KVLayout
    via: Executor
    components: tuple[str, ...] = field()

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.source.spec.names

    def __attrs_post_init__(self) -> None:
        _check_components(self)

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        _check_bound(self, bound)
        self.via.execute(bound, sources, targets)


@frozen(eq=False)
class ViaEndpoints:
    """Makes an executor of connected endpoints: each target rank pulls through its own.

    `endpoints` is by target rank, `peers` names the endpoint of every source rank; the memory of
    the source need not be reachable, so the source caches are not looked at."""

    endpoints: Mapping[int, Endpoint]
    peers: Mapping[int, str]
    timeout: float
    verify: bool = False

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for rank in targets:
            self.endpoints[rank].pull(
                bound, rank, self.peers, timeout=self.timeout, verify=self.verify
            )


@frozen(eq=False)
class AllGather:
    """Tokens sharded over the ranks of a group -> a copy of all of them on each of those ranks.

    Run by every rank of `comm` alike, each with its own caches. The number of collectives and
    their sizes follow from the layouts and the token range alone, so they are equal on all ranks.
    Raises `LayoutError` unless `target` is replicated over exactly the ranks of `source`, and
    those are 0..n-1 of the group."""

    source: KVLayout
    target: KVLayout
    comm: Comm
    components: tuple[str, ...] = field()

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.source.spec.names

    def __attrs_post_init__(self) -> None:
        here, there = self.source.placement, self.target.placement
        if there.sharding.num_shards != 1 or here.all_ranks != there.all_ranks:
            raise LayoutError(
                f"AllGather needs a target replicated over the ranks of the source "
                f"{here.all_ranks}, got {there}"
            )
        if here.all_ranks != tuple(range(self.comm.size)):
            raise LayoutError(
                f"AllGather over ranks {here.all_ranks}, the group has 0..{self.comm.size - 1}"
            )
        _check_components(self)

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        _check_bound(self, bound)
        rank = self.comm.rank
        for part in bound.plan.parts:
            schedule = self._schedule(part.start, part.stop)
            src_slots = _slots(bound.src, part.src_group, schedule.send[rank][1])
            positions = np.arange(part.start, part.stop)
            dst_local = self.target.placement.sharding.local(positions)
            dst_slots = _slots(bound.dst, part.dst_group, dst_local)
            for name in part.components:
                self._gather(name, schedule, src_slots, dst_slots, sources[rank], targets[rank])

    def _schedule(self, start: int, stop: int) -> GatherSchedule:
        """Who sends which rows, and where they arrive in one dense buffer of ``[start, stop)``."""
        once = Placement.simple(Replicated(start, stop))
        rows = KVLayout.uniform(self.source.spec, once, Dense(max(stop - start, 1)))
        return gather_schedule([plan_transfer(self.source, rows, (start, stop))], self.comm.size)

    def _gather(
        self,
        name: str,
        schedule: GatherSchedule,
        src_slots: Ints,
        dst_slots: Ints,
        source: RankCache,
        target: RankCache,
    ) -> None:
        rows = gather_rows(source.pages[name], torch.from_numpy(src_slots))
        full = rows.new_empty(len(dst_slots), rows.shape[1])
        schedule.gather(self.comm, rows, [full])
        scatter_rows(target.pages[name], torch.from_numpy(dst_slots), full)


def _slots(binding: Binding, group: str, local: Ints) -> Ints:
    return slots_of(binding.layout.group(group).paging, binding.tables[group], local)


def _check_bound(stage: Operator, bound: BoundPlan) -> None:
    for side, mine, given in (
        ("source", stage.source, bound.plan.src),
        ("target", stage.target, bound.plan.dst),
    ):
        if difference := first_difference(mine, given):
            raise PlanError(f"{side} of the plan is not the stage's: {difference}")


@frozen(eq=False)
class Pipeline:
    """Stages in a row; itself an `Operator` in all but one call: `run` takes a binding and the
    caches of every layout on the way.

    Raises `LayoutError` at construction for two stages that do not fit, naming both layouts and
    the first field that differs, and for a component that a stage claims and the one before it
    does not deliver."""

    stages: tuple[Operator, ...] = field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a pipeline needs one or more stages, got 0")
        for i, (one, two) in enumerate(zip(self.stages, self.stages[1:], strict=False)):
            if difference := first_difference(one.target, two.source):
                raise LayoutError(
                    f"stage {i} ends in [{one.target}], stage {i + 1} starts from "
                    f"[{two.source}]: {difference}"
                )
            if missing := sorted(set(two.components) - set(one.components)):
                raise LayoutError(f"stage {i + 1} claims {missing}, which stage {i} does not move")

    @property
    def source(self) -> KVLayout:
        return self.stages[0].source

    @property
    def target(self) -> KVLayout:
        return self.stages[-1].target

    @property
    def components(self) -> tuple[str, ...]:
        return self.stages[-1].components

    def run(self, tokens: Tokens, bindings: Sequence[Binding], caches: Sequence[Caches]) -> None:
        """Runs every stage on `tokens`; `bindings` and `caches` are one longer than the stages.

        All plans are derived and verified before the first byte moves."""
        if not len(bindings) == len(caches) == len(self.stages) + 1:
            raise PlanError(
                f"{len(self.stages)} stages need {len(self.stages) + 1} bindings and caches, "
                f"got {len(bindings)} and {len(caches)}"
            )
        hops = zip(self.stages, bindings, bindings[1:], strict=False)
        bound = [bind(stage, src, dst, tokens) for stage, src, dst in hops]
        for i, stage in enumerate(self.stages):
            stage.execute(bound[i], caches[i], caches[i + 1])


def first_difference(a: object, b: object) -> str | None:
    """The first field in which two layouts differ, with both values, or None if they are equal.

    >>> from kvflow.layouts.sharding import RoundRobin
    >>> first_difference(RoundRobin(4, 1), RoundRobin(4, 16))
    'interleave is 1 here, 16 there'
    """
    return next(_differences(a, b, ""), None)


def _differences(a: object, b: object, path: str) -> Iterator[str]:
    if a == b:
        return
    kind = type(a)
    if kind is type(b) and attrs.has(kind):
        for f in attrs.fields(kind):
            yield from _differences(getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}")
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{i}]")
    else:
        yield f"{path.lstrip('.') or 'the value'} is {a} here, {b} there"
