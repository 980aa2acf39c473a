"""EventOrder: the event batches of one engine in their order, whatever order they come in."""

from attrs import define, field

from kvflow.router.events import KVEvents

MAX_WAITING = 64
"""Batches that may wait for an earlier one before that is taken for lost."""


@define(eq=False)
class EventOrder:
    """Numbers begin at 0 when an engine is registered. `num_lost` batches never came in time,
    `num_repeated` came again, or after they were taken for lost."""

    num_lost: int = 0
    num_repeated: int = 0
    _next: int = 0
    _waiting: dict[int, KVEvents] = field(factory=dict)

    def accept(self, events: KVEvents) -> list[KVEvents]:
        """What may be applied now that this batch has come; at once if it has no number."""
        if events.seq is None:
            return [events]
        if events.seq < self._next or events.seq in self._waiting:
            self.num_repeated += 1
            return []
        self._waiting[events.seq] = events
        if len(self._waiting) > MAX_WAITING:
            first = min(self._waiting)
            self.num_lost += first - self._next
            self._next = first
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._next += 1
        return ready
