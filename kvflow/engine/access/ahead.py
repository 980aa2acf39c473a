"""Fetches of cached rows, one part or layer ahead of their use."""

from collections.abc import Callable

from attrs import define, field, frozen
from torch import Tensor

from kvflow.comm import Background, Comm, Lane, Pending
from kvflow.engine.access.counters import Counters, Fetched, Kind, StepLog


@frozen(eq=False)
class Fetch:
    """Rows to bring to this rank: a collective that every rank issues in the same place.

    `held_nbytes` is what the rows will take here, `received_nbytes` what of it comes from other
    ranks."""

    kind: Kind
    component: str
    part: int
    held_nbytes: int
    received_nbytes: int
    run: Callable[[Comm], Tensor]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.component, self.part


@define(eq=False)
class Ahead:
    """Fetches of one step, in a lane. What has been issued is held until it is dropped."""

    lane: Lane
    counters: Counters
    log: StepLog
    _pending: dict[tuple[str, str, int], tuple[Fetch, Pending[Tensor]]] = field(
        init=False, factory=dict
    )

    @property
    def looks_ahead(self) -> bool:
        """Whether a fetch can run while something else does."""
        return isinstance(self.lane, Background)

    @property
    def depth(self) -> int:
        """How many fetches of a kind are held at most."""
        return 2 if self.looks_ahead else 1

    def _issue(self, fetch: Fetch) -> None:
        if fetch.key not in self._pending:
            self.counters.hold(fetch.held_nbytes)
            self._pending[fetch.key] = fetch, self.lane.issue(fetch.run)

    def issue_ahead(self, fetch: Fetch) -> None:
        """Starts a fetch before its use, where it can run while something else does."""
        if self.looks_ahead:
            self._issue(fetch)

    def take(self, fetch: Fetch, soon: Fetch | None) -> Tensor:
        """The rows of a fetch: starts it if nobody has, starts the one that will be needed next,
        and waits for the first."""
        self._issue(fetch)
        if soon is not None:
            self.issue_ahead(soon)
        rows, times = self._pending[fetch.key][1].wait()
        self.counters.received(fetch.kind, fetch.received_nbytes)
        self.log.fetches.append(
            Fetched(fetch.kind, fetch.component, fetch.part, fetch.received_nbytes, times)
        )
        return rows

    def drop(self, fetch: Fetch) -> None:
        """The rows of a fetch are not needed any more."""
        held, _ = self._pending.pop(fetch.key)
        self.counters.free(held.held_nbytes)
