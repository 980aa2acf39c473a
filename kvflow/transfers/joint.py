"""Joint plans: one target filled from several sources, each token of each component once.

A joint plan is a list of legs, each an ordinary plan from one source to the common target: a
host-tier hit and a remainder over the network, or latent from one source and indexer from another.
What the target holds already is not claimed. Alignment is by token position throughout.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import SupportsIndex

from attrs import field, frozen

from kvflow.errors import PlanError
from kvflow.layouts.identity import ContentIdentity, PlacementIdentity
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.values import (
    integer,
    items_of,
    names,
    not_negative,
    token_range,
    tuple_of,
)
from kvflow.transfers.cuts import Range, check_partition, moved_by
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan


def _range(tokens: tuple[SupportsIndex, SupportsIndex]) -> Range:
    low, high = token_range(tokens)
    if not 0 <= low <= high:
        raise PlanError(f"tokens [{low}, {high}) must have 0 <= start <= stop")
    return low, high


def _names(values: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if values is None else names(values)


@frozen
class Holding:
    """What one source offers: the tokens ``[start, stop)`` of some components, by default of all
    that its layout declares."""

    layout: KVLayout
    tokens: Range = field(converter=_range)
    components: tuple[str, ...] | None = field(default=None, converter=_names)

    def offers(self, component: str) -> bool:
        return component in (self.layout.spec.names if self.components is None else self.components)


@frozen
class Leg:
    """One source's share; `source` is its place among the sources of the joint plan."""

    source: int = field(converter=integer, validator=not_negative)
    plan: Plan


@frozen
class Claim:
    """The tokens ``[start, stop)`` of a component that the target needs."""

    component: str
    start: int = field(converter=integer)
    stop: int = field(converter=integer)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.component, str):
            raise PlanError(f"a claim is of component {self.component!r}, must be a name")
        _range((self.start, self.stop))


def _legs(legs: Iterable[Leg]) -> tuple[Leg, ...]:
    return tuple_of(Leg, legs)


def _claims(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    return tuple_of(Claim, items_of(claims))


@frozen(eq=False)
class JointPlan:
    """Fills the `claims` of `dst` by `legs`; the target's components in `absent` stay unfilled.
    A leg names its source by its place among `num_sources`; those in `unread` are read by none."""

    dst: KVLayout
    num_sources: int = field(converter=integer, validator=not_negative)
    legs: tuple[Leg, ...] = field(converter=_legs)
    claims: tuple[Claim, ...] = field(converter=_claims)
    absent: tuple[str, ...] = field(default=(), converter=names)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything the joint plan says, equal on any machine."""
        said = (
            [ContentIdentity.of(self.dst.spec).fingerprint],
            [PlacementIdentity.of(self.dst).fingerprint],
            [[g.name, g.components] for g in self.dst.groups],
            self.num_sources,
            [[leg.source, leg.plan.digest] for leg in self.legs],
            sorted([c.component, c.start, c.stop] for c in self.claims),
            sorted(self.absent),
        )
        return hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JointPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def unread(self) -> tuple[int, ...]:
        """The sources of which nothing is read: they can free their blocks at once."""
        read = {leg.source for leg in self.legs}
        return tuple(source for source in range(self.num_sources) if source not in read)

    @property
    def links(self) -> tuple[tuple[int, int, int], ...]:
        """The (source, source rank, target rank) triples that move anything, sorted: whose
        completions the transfer waits for, each once."""
        return tuple(sorted({(leg.source, *link) for leg in self.legs for link in leg.plan.links}))

    @property
    def nbytes(self) -> int:
        """Bytes written on all targets."""
        return sum(leg.plan.nbytes for leg in self.legs)

    @property
    def num_runs(self) -> int:
        return sum(leg.plan.num_runs for leg in self.legs)


def plan_joint(
    sources: Sequence[Holding],
    dst: KVLayout,
    tokens: tuple[SupportsIndex, SupportsIndex],
    *,
    held: Mapping[str, SupportsIndex] | None = None,
    absent: Iterable[str] = (),
) -> JointPlan:
    """Derives how the tokens ``[start, stop)`` of every component of `dst` get there: each from the
    first source that offers it.

    `held` says how many positions of a component, counted from position 0, the target holds
    already: these are not moved. Components of the target in `absent` are given up. Raises
    `PlanError` naming a component and the tokens that no source offers, and what `plan_transfer`
    raises for a leg.
    """
    start, stop = _range(tokens)
    given_up = names(absent)
    known = set(dst.spec.names)
    if unknown := sorted({*given_up, *(held or {})} - known):
        raise PlanError(f"components {unknown} are not declared by the target")
    claims = []
    shares: dict[tuple[int, Range], list[str]] = {}
    for component in dst.spec.names:
        if component in given_up:
            continue
        begin = min(max(start, _held(held, component)), stop)
        claims.append(Claim(component, begin, stop))
        for source, taken in _taken(sources, component, (begin, stop)):
            shares.setdefault((source, taken), []).append(component)
    legs = [
        Leg(source, _leg_plan(sources[source].layout, dst, taken, components))
        for (source, taken), components in sorted(shares.items())
    ]
    return JointPlan(dst, len(sources), legs, claims, given_up)


def _held(held: Mapping[str, SupportsIndex] | None, component: str) -> int:
    count = integer((held or {}).get(component, 0), f"held of {component}")
    if count < 0:
        raise PlanError(f"the target holds {count} tokens of {component}, must be at least 0")
    return count


def _taken(sources: Sequence[Holding], component: str, wanted: Range) -> list[tuple[int, Range]]:
    """Which source gives which tokens of a component, the first that offers them."""
    missing = [wanted] if wanted[0] < wanted[1] else []
    taken = []
    for source, holding in enumerate(sources):
        if not holding.offers(component):
            continue
        rest = []
        for low, high in missing:
            a, b = max(low, holding.tokens[0]), min(high, holding.tokens[1])
            if a >= b:
                rest.append((low, high))
                continue
            taken.append((source, (a, b)))
            rest += [gap for gap in ((low, a), (b, high)) if gap[0] < gap[1]]
        missing = rest
    if missing:
        raise PlanError(
            f"{component}: tokens [{missing[0][0]}, {missing[0][1]}) are offered by none of "
            f"{len(sources)} sources"
        )
    return taken


def _leg_plan(src: KVLayout, dst: KVLayout, tokens: Range, components: Sequence[str]) -> Plan:
    others = {*src.spec.names, *dst.spec.names} - set(components)
    return plan_transfer(src, dst, tokens, components=components, absent=others)


def verify_joint(
    joint: JointPlan, srcs: Sequence[Binding] | None = None, dst: Binding | None = None
) -> None:
    """Proves that the legs together write every claimed token of every component once, and nothing
    else. Raises `PlanError` naming the first violation.

    Each leg is proven as a plan of its own (with the bindings, if they are given: `srcs` by
    source); then the legs' token ranges must fill the claimed range of each component exactly.
    """
    _check_legs(joint, srcs)
    for leg in joint.legs:
        verify_plan(leg.plan, None if srcs is None else srcs[leg.source], dst)


def _check_legs(joint: JointPlan, srcs: Sequence[Binding] | None) -> None:
    for leg in joint.legs:
        if leg.plan.dst != joint.dst:
            raise PlanError(f"leg of source {leg.source} is to another target: {leg.plan.dst}")
        if leg.source >= joint.num_sources:
            raise PlanError(f"leg of source {leg.source}, there are {joint.num_sources} sources")
    if srcs is not None and len(srcs) != joint.num_sources:
        raise PlanError(f"{joint.num_sources} sources need a binding each, got {len(srcs)}")
    claimed = {c.component: (c.start, c.stop) for c in joint.claims}
    if len(claimed) != len(joint.claims):
        raise PlanError(f"components claimed twice: {[c.component for c in joint.claims]}")
    said, declared = [*claimed, *joint.absent], joint.dst.spec.names
    if sorted(said) != sorted(declared):
        odd = sorted(set(said) ^ set(declared)) or sorted(set(claimed) & set(joint.absent))
        raise PlanError(
            f"components {odd} must be declared by the target and either claimed or absent"
        )
    check_partition(claimed, ((leg.plan.tokens, moved_by(leg.plan)) for leg in joint.legs))


@frozen(eq=False)
class BoundJoint:
    """A verified joint plan of one request: a binding for each source and one for the target."""

    joint: JointPlan
    srcs: tuple[Binding, ...] = field(converter=tuple)
    dst: Binding
    legs: tuple[BoundPlan, ...] = field(init=False)
    """By leg of the joint plan: what an executor or an endpoint is given."""

    def __attrs_post_init__(self) -> None:
        _check_legs(self.joint, self.srcs)
        bound = [BoundPlan(leg.plan, self.srcs[leg.source], self.dst) for leg in self.joint.legs]
        object.__setattr__(self, "legs", tuple(bound))
