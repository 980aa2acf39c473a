"""Cuts: a plan taken apart by tokens and by components, and the proof that nothing is lost.

A cut keeps the runs of the whole, shortened: every token comes from the same source rank, so who
reads what is known from the whole plan alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NoReturn, SupportsIndex

import numpy as np
from attrs import evolve

from kvflow.errors import PlanError
from kvflow.layouts.values import integer
from kvflow.transfers.claims import check_components
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns
from kvflow.transfers.verify import verify_plan

Range = tuple[int, int]


def moved_by(plan: Plan) -> tuple[str, ...]:
    """The components that a plan moves, in the order of its parts."""
    return tuple(dict.fromkeys(c for part in plan.parts for c in part.components))


def select(plan: Plan, components: Iterable[str]) -> Plan:
    """The same tokens of some of the components; the others become absent. Raises `PlanError` for
    a component that the plan does not move."""
    wanted, moved = set(components), moved_by(plan)
    if foreign := sorted(wanted - set(moved)):
        raise PlanError(f"components {foreign} are not moved by the plan, it moves {list(moved)}")
    kept = [(part, [c for c in part.components if c in wanted]) for part in plan.parts]
    parts = [evolve(part, components=some) for part, some in kept if some]
    absent = sorted({*plan.absent, *moved} - wanted)
    return Plan(plan.src, plan.dst, parts, absent, plan.tokens)


def clip(plan: Plan, start: SupportsIndex, stop: SupportsIndex) -> Plan:
    """The same components over ``[start, stop)``. Raises `PlanError` unless that is a range inside
    the plan's."""
    low, high = integer(start, "start"), integer(stop, "stop")
    if not plan.tokens[0] <= low <= high <= plan.tokens[1]:
        raise PlanError(f"tokens [{low}, {high}) must be a range inside the plan's {plan.tokens}")
    shortened: dict[int, TransferRuns] = {}

    def short(runs: TransferRuns) -> TransferRuns:
        if id(runs) not in shortened:  # parts share runs, and so shall their cuts
            shortened[id(runs)] = _clipped(runs, low, high)
        return shortened[id(runs)]

    parts = [
        evolve(part, start=low, stop=high, runs=short(part.runs), copies=short(part.copies))
        for part in plan.parts
    ]
    return Plan(plan.src, plan.dst, parts, plan.absent, (low, high))


def _clipped(runs: TransferRuns, start: int, stop: int) -> TransferRuns:
    """The progressions of the runs between two tokens, by division."""
    step = runs.token_stride
    first = np.maximum(-((runs.token - start) // step), 0)
    end = np.minimum(-((runs.token - stop) // step), runs.count)
    kept = np.flatnonzero(end > first)
    runs, first, count = runs.take(kept), first[kept], (end - first)[kept]
    several = count > 1
    return TransferRuns.of_fresh(
        runs.src_rank.copy(),
        runs.dst_rank.copy(),
        runs.token + first * runs.token_stride,
        np.where(several, runs.token_stride, 1),
        runs.src_local + first * runs.src_stride,
        np.where(several, runs.src_stride, 1),
        runs.dst_local + first * runs.dst_stride,
        np.where(several, runs.dst_stride, 1),
        count,
    )


def cut(
    plan: Plan,
    borders: Iterable[SupportsIndex] = (),
    components: Iterable[Iterable[str]] | None = None,
) -> tuple[Plan, ...]:
    """Cuts at token `borders` (those outside the plan cut nothing) and between the given sets of
    `components`, tokens first. `verify_cut` proves that the cuts are the whole: sets that leave a
    component out, or name one twice, are refused by it. Raises `PlanError` for a component that
    the plan does not move."""
    start, stop = plan.tokens
    inside = {integer(b, "a border") for b in borders}
    edges = [start, *sorted(b for b in inside if start < b < stop), stop]
    sets = None if components is None else [tuple(names) for names in components]
    cuts = []
    for low, high in pairwise(edges):
        clipped = clip(plan, low, high)
        cuts += [clipped] if sets is None else [select(clipped, names) for names in sets]
    return tuple(cuts)


def verify_cut(whole: Plan, cuts: Iterable[Plan]) -> None:
    """Proves that the cuts together write what `whole` writes: every byte of it once, and no
    other. Raises `PlanError` naming the first token range and component for which that fails.

    Intervals are compared by component; the runs of cuts over one token range are proven together,
    so the proof does not grow with layers.
    """
    cuts = tuple(cuts)
    start, stop = whole.tokens
    for one in cuts:
        if (one.src, one.dst) != (whole.src, whole.dst):
            raise PlanError(f"a cut is between other layouts: {one.src} -> {one.dst}")
    for moved, absent in dict.fromkeys((moved_by(one), one.absent) for one in cuts):
        check_components(whole.src, whole.dst, moved, absent)
    wanted = dict.fromkeys(moved_by(whole), (start, stop))
    check_partition(wanted, ((one.tokens, moved_by(one)) for one in cuts))
    for plan in _by_range(whole, cuts):
        verify_plan(plan)


def check_partition(
    wanted: Mapping[str, Range], pieces: Iterable[tuple[Range, tuple[str, ...]]]
) -> None:
    """Raises `PlanError` unless, for every component, the ranges of the pieces that name it fill
    the wanted range exactly: no gap, no overlap, nothing outside."""
    ranges: dict[str, list[Range]] = {name: [] for name in wanted}
    for (low, high), names in pieces:
        for name in names:
            if name not in ranges:
                raise PlanError(f"{name} is moved for [{low}, {high}), but not claimed")
            if low < high:
                ranges[name].append((low, high))
    for name, (start, stop) in wanted.items():
        at = start
        for low, high in sorted(ranges[name]):
            if low < start or high > stop:
                _refuse(name, (low, high), "are moved", (start, stop))
            if low < at:
                _refuse(name, (low, min(at, high)), "are moved twice", (start, stop))
            if low > at:
                _refuse(name, (at, low), "are not moved", (start, stop))
            at = high
        if at < stop:
            _refuse(name, (at, stop), "are not moved", (start, stop))


def _refuse(name: str, tokens: Range, what: str, claimed: Range) -> NoReturn:
    (low, high), (start, stop) = tokens, claimed
    raise PlanError(f"{name}: tokens [{low}, {high}) {what}, claimed are [{start}, {stop})")


def _by_range(whole: Plan, cuts: Iterable[Plan]) -> Iterator[Plan]:
    """For each token range one plan of all its cuts, in which equal runs stand once."""
    ranges: dict[Range, list[Plan]] = {}
    for one in cuts:
        ranges.setdefault(one.tokens, []).append(one)
    for tokens, alike in ranges.items():
        parts: dict[object, PlanPart] = {}
        for part in (part for one in alike for part in one.parts):
            stored = frozenset(whole.dst.spec[c].record.num_heads for c in part.components)
            groups = (part.src_group, part.dst_group)
            key = (groups, part.heads, stored, id(part.runs), id(part.copies))
            so_far = parts[key].components if key in parts else ()
            parts[key] = evolve(part, components=(*so_far, *part.components))
        moved = {c for part in parts.values() for c in part.components}
        absent = sorted({*whole.src.spec.names, *whole.dst.spec.names} - moved)
        yield Plan(whole.src, whole.dst, parts.values(), absent, tokens)
