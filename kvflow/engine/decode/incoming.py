"""Incoming: what a request takes from other engines, part by part, in order of position."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from kvflow.engine.messages import Source
from kvflow.engine.reports import joined_report, summed_report
from kvflow.transfers.plan import Plan


@frozen
class Part:
    """Positions [start, stop) of these components; of none named, of all. `is_ahead`: others of
    the same positions cannot be read yet."""

    source: Source
    start: int
    stop: int
    components: tuple[str, ...] = ()
    is_ahead: bool = False


@define(eq=False)
class Incoming:
    """Positions [0, arrived) are here. Each source gives what those before it and the request's
    own blocks have not; of the last one, positions below `readable` can be read. A source is read
    at least once, if only nothing. missing: ranks of the group whose share of the part under way
    has not ended. is_asking: whether a loan may still come, which is read first. late_nbytes: what
    was moved, or still under way, once all could be read.

    Of the step that prefill computes, rows of the first layers can be read ahead of the others:
    `_ahead` says which components up to which position, `_moved` which of them have come."""

    sources: list[Source]
    plans: list[Plan]
    readable: int
    components: tuple[str, ...] = ()
    arrived: int = 0
    missing: int = 0
    num_held: int = 0
    late_nbytes: int = 0
    is_asking: bool = False
    error: str | None = None
    _at: int = field(init=False, default=0)
    _part: Part = field(init=False)
    _ahead: tuple[int, frozenset[str]] = field(init=False, default=(0, frozenset()))
    _moved: frozenset[str] = field(init=False, default=frozenset())
    _moved_stop: int = field(init=False, default=0)
    _answers: list[Mapping[str, Any]] = field(init=False, factory=list)
    _parts: list[Mapping[str, Any]] = field(init=False, factory=list)

    def begin(self, num_held: int) -> None:
        """The request's own blocks hold the first positions."""
        self.arrived = self.num_held = num_held

    def rest(self) -> "Incoming":
        """What is still to come, anew, if the source that is read now gives nothing."""
        left = slice(self._at + 1, None)
        return Incoming(self.sources[left], self.plans[left], self.readable, self.components)

    def lent(self, source: Source, plan: Plan) -> None:
        """Another engine gives what it has before the others are read."""
        self.sources.insert(0, source)
        self.plans.insert(0, plan)

    def may_begin(self, stop: int, components: Sequence[str]) -> None:
        """Rows of positions below `stop` can be read in these components."""
        self._ahead = stop, frozenset(components)

    @property
    def is_whole(self) -> bool:
        """Whether every source has given all that it should."""
        return self._at == len(self.sources)

    @property
    def at_last_source(self) -> bool:
        """Whether what comes next comes from the engine that computes the prompt."""
        return self._at == len(self.sources) - 1

    @property
    def can_go_on(self) -> bool:
        """Whether a part can begin: none is under way, and something can be read, or the source
        ends with nothing more."""
        return self._next() is not None

    def _next(self) -> Part | None:
        if self.missing or self.is_asking or self.is_whole or self.error is not None:
            return None
        source = self.sources[self._at]
        limit = min(source.stop, self.readable) if self.at_last_source else source.stop
        if self._moved and limit >= self._moved_stop:
            rest = tuple(name for name in self.components if name not in self._moved)
            return Part(source, self.arrived, self._moved_stop, rest)
        if limit > self.arrived or limit == source.stop:
            return Part(source, self.arrived, max(limit, self.arrived))
        stop, names = self._ahead
        fresh = names - self._moved
        same = not self._moved or stop == self._moved_stop
        if self.at_last_source and stop > max(self.arrived, self.readable) and fresh and same:
            ordered = tuple(name for name in self.components if name in fresh)
            return Part(source, self.arrived, stop, ordered, is_ahead=True)
        return None

    def next_part(self, num_ranks: int) -> Part | None:
        """What to move now, on so many ranks; None if nothing can be."""
        if (part := self._next()) is not None:
            self._part, self.missing = part, num_ranks
        return part

    def part_ended(self, report: Mapping[str, Any] | None, error: str | None) -> None:
        """One rank's share of the part under way is over."""
        self.missing -= 1
        self.error = self.error or error
        if report is not None:
            self._answers.append(report)

    def settle(self) -> tuple[int, Mapping[str, Any]] | None:
        """Every rank's share is there: the positions count. If that was all of a source, its place
        and the report of all its parts."""
        self._parts.append(joined_report(self._answers))
        if self.at_last_source and self.readable >= self._part.source.stop:
            self.late_nbytes += self._parts[-1]["nbytes"]
        part, self._answers = self._part, []
        if part.is_ahead:
            self._moved, self._moved_stop = self._moved | {*part.components}, part.stop
            return None
        self.arrived, self._moved = part.stop, frozenset()
        if self.arrived < part.source.stop:
            return None
        ended, parts = self._at, self._parts
        self._at, self._parts = self._at + 1, []
        return ended, summed_report(parts) | {"late_nbytes": self.late_nbytes}

    def unread(self) -> list[int]:
        """The places of sources that have not ended; the first one's is that which is read."""
        return list(range(self._at, len(self.sources)))

    def src_ranks(self, place: int) -> list[int]:
        """The ranks of a source that the whole plan reads."""
        return sorted({src for src, _ in self.plans[place].links})
