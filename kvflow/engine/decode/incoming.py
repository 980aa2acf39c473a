"""Incoming: what a request takes from other engines, part by part, in order of position."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from kvflow.engine.messages import Source
from kvflow.engine.reports import joined_report, summed_report
from kvflow.transfers.plan import Plan


@define(eq=False)
class Incoming:
    """Positions [0, arrived) are here. Each source gives what those before it and the request's
    own blocks have not; of the last one, positions below `readable` can be read. A source is read
    at least once, if only nothing. missing: ranks of the group whose share of the part under way
    has not ended."""

    sources: Sequence[Source]
    plans: Sequence[Plan]
    readable: int
    arrived: int = 0
    missing: int = 0
    num_held: int = 0
    error: str | None = None
    _at: int = field(init=False, default=0)
    _stop: int = field(init=False, default=0)
    _answers: list[Mapping[str, Any]] = field(init=False, factory=list)
    _parts: list[Mapping[str, Any]] = field(init=False, factory=list)

    def begin(self, num_held: int) -> None:
        """The request's own blocks hold the first positions."""
        self.arrived = self.num_held = num_held

    @property
    def is_whole(self) -> bool:
        """Whether every source has given all that it should."""
        return self._at == len(self.sources)

    @property
    def can_go_on(self) -> bool:
        """Whether a part can begin: none is under way, and something can be read, or the source
        ends with nothing more."""
        if self.missing or self.is_whole or self.error is not None:
            return False
        return self._limit > self.arrived or self._limit == self.sources[self._at].stop

    @property
    def at_last_source(self) -> bool:
        """Whether what comes next comes from the engine that computes the prompt."""
        return self._at == len(self.sources) - 1

    @property
    def _limit(self) -> int:
        """Where what can be read of the present source ends."""
        source = self.sources[self._at]
        return min(source.stop, self.readable) if self.at_last_source else source.stop

    def next_part(self, num_ranks: int) -> tuple[Source, int, int] | None:
        """A source and the positions [start, stop) to pull from it now, on all ranks; None if
        nothing can be."""
        if not self.can_go_on:
            return None
        self.missing, self._stop = num_ranks, max(self._limit, self.arrived)
        return self.sources[self._at], self.arrived, self._stop

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
        self.arrived, self._answers = self._stop, []
        if self.arrived < self.sources[self._at].stop:
            return None
        ended, parts = self._at, self._parts
        self._at, self._parts = self._at + 1, []
        return ended, summed_report(parts)

    def unread(self) -> list[int]:
        """The places of sources that have not ended."""
        return list(range(self._at, len(self.sources)))

    def src_ranks(self, place: int) -> list[int]:
        """The ranks of a source that the whole plan reads."""
        return sorted({src for src, _ in self.plans[place].links})
