"""What every operator is: a typed stage between two layouts, with a law."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from attrs import evolve

from kvflow.errors import PlanError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.difference import first_difference
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

    @property
    def planned(self) -> tuple[KVLayout, KVLayout]:
        """The two layouts between which the plan of a run is derived: source and target, unless
        the stage reads fewer replicas than there are or converts what it moves."""
        return self.source, self.target

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        """Carries out a plan that `bind` made for this stage. The caches are by rank; a stage of
        one rank among several processes is given that rank's alone."""
        ...


def bind(operator: Operator, src: Binding, dst: Binding, tokens: Tokens) -> BoundPlan:
    """The verified plan of one run of a stage. Raises `PlanError` as planning does, and for a
    binding of another layout."""
    for side, mine, given in (
        ("source", operator.source, src.layout),
        ("target", operator.target, dst.layout),
    ):
        if difference := first_difference(mine, given):
            raise PlanError(f"{side} binding is not the stage's: {difference}")
    here, there = operator.planned
    absent = {*here.spec.names, *there.spec.names} - set(operator.components)
    plan = plan_transfer(here, there, tokens, absent=absent)
    return BoundPlan(plan, evolve(src, layout=here), evolve(dst, layout=there))


def check_claims(stage: Operator) -> None:
    """Raises what planning raises if the claims of a stage cannot be planned."""
    check_sides(*stage.planned, stage.components)


def check_sides(source: KVLayout, target: KVLayout, components: tuple[str, ...]) -> None:
    """An empty plan proves that both sides hold these components with one meaning."""
    start = max(source.placement.sharding.start, target.placement.sharding.start)
    absent = {*source.spec.names, *target.spec.names} - set(components)
    plan_transfer(source, target, (start, start), components=components, absent=absent)


def check_bound(stage: Operator, bound: BoundPlan) -> None:
    """Raises `PlanError` for a plan between other layouts than those of the stage."""
    here, there = stage.planned
    for side, mine, given in (("source", here, bound.plan.src), ("target", there, bound.plan.dst)):
        if difference := first_difference(mine, given):
            raise PlanError(f"{side} of the plan is not the stage's: {difference}")
