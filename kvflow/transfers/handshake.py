"""The handshake: two engines agree on what is moved, recomputed and absent, or part.

Each side states its layout (`kvflow.layouts.wire`), and both derive the same `Agreement` from the
two. Equal byte counts mean nothing here: formats are compared by what they mean.
"""

from collections.abc import Iterable
from typing import Literal

from attrs import field, frozen

from kvflow.errors import ContentMismatch, PlanError
from kvflow.layouts.identity import ContentIdentity, Difference, PlacementIdentity
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.values import names
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

Fate = Literal["moved", "recomputed", "absent"]


@frozen
class Agreement:
    """What becomes of every component that either side declares, by absolute layer id, and how the
    two placements differ. Only `agree` makes one."""

    source: KVLayout
    target: KVLayout
    moved: tuple[str, ...] = field(converter=names)
    recomputed: tuple[str, ...] = field(converter=names)
    absent: tuple[str, ...] = field(converter=names)
    differences: tuple[Difference, ...]

    def fate(self, component: str) -> Fate:
        """Raises `PlanError` for a component that neither side declares."""
        fates: dict[Fate, tuple[str, ...]] = {
            "moved": self.moved,
            "recomputed": self.recomputed,
            "absent": self.absent,
        }
        for fate, members in fates.items():
            if component in members:
                return fate
        raise PlanError(f"component {component!r} is declared by neither side")

    @property
    def mtp(self) -> dict[str, Fate]:
        """What becomes of the MTP layers' components; empty if neither side has any."""
        both = (*self.source.spec.select(part="mtp"), *self.target.spec.select(part="mtp"))
        return {name: self.fate(name) for name in dict.fromkeys(both)}

    def plan(self, tokens: tuple[int, int]) -> Plan:
        """Moves the tokens ``[start, stop)`` of what was agreed to be moved."""
        still = (*self.recomputed, *self.absent)
        return plan_transfer(self.source, self.target, tokens, components=self.moved, absent=still)

    def __str__(self) -> str:
        lines = []
        for said, members in (
            ("moved", self.moved),
            ("recomputed at the target", self.recomputed),
            ("absent", self.absent),
        ):
            lines.append(f"{said}: {', '.join(members) or 'none'}")
        return "\n".join((*lines, *map(str, self.differences)))


def agree(
    source: KVLayout,
    target: KVLayout,
    *,
    recomputed: Iterable[str] = (),
    absent: Iterable[str] = (),
) -> Agreement:
    """What a source and a target of these layouts can exchange; both sides derive it alike.

    Content must be stated in full and be equal. A component that one side lacks is refused unless
    it is named: in `recomputed` if the target declares it and computes it anew, in `absent` if it
    is given up. Raises `ContentMismatch` naming the first content field that differs, with both
    values, and `PlanError` for a name that says something untrue.
    """
    fates = _Fates(source, target, *(tuple(sorted(set(names(n)))) for n in (recomputed, absent)))
    fates.check()
    mine, theirs = ContentIdentity.of(source.spec), ContentIdentity.of(target.spec)
    named = {*fates.recomputed, *fates.absent}
    for d in mine.differences(theirs):
        if not named.issuperset(d.components or [""]):
            what = " ".join((d.field, *d.components))
            raise ContentMismatch(
                f"content field {what!r}: source has {_said(d.source)}, target {_said(d.target)}"
            )
    if open_fields := mine.unstated:  # equal to the target's, or it would have differed
        raise ContentMismatch(
            f"content field {open_fields[0]!r}: neither side states it; unstated are "
            f"{list(open_fields)}"
        )
    shared = set(target.spec.names) - named
    moved = tuple(name for name, _ in mine.components if name in shared)
    places = PlacementIdentity.of(source).differences(PlacementIdentity.of(target))
    return Agreement(source, target, moved, fates.recomputed, fates.absent, places)


@frozen
class _Fates:
    """What the caller says of components that are not moved."""

    source: KVLayout
    target: KVLayout
    recomputed: tuple[str, ...]
    absent: tuple[str, ...]

    def check(self) -> None:
        here, there = set(self.source.spec.names), set(self.target.spec.names)
        if both := sorted(set(self.recomputed) & set(self.absent)):
            raise PlanError(f"components {both} are to be recomputed and absent at once")
        if unknown := sorted({*self.recomputed, *self.absent} - (here | there)):
            raise PlanError(f"components {unknown} are declared by neither side")
        if held := sorted(set(self.recomputed) & here):
            raise PlanError(f"components {held} are to be recomputed, but the source has them")


def _said(value: str | None) -> str:
    return "nothing" if value is None else repr(value)
