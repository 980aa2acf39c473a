"""Landings: parts in the air, and how they come down."""

from collections import deque
from functools import partial

from attrs import define, field, frozen

from kvflow.transfers.executors.nixl_agent import Agent, Flight
from kvflow.transfers.executors.nixl_door import Deadline, Door
from kvflow.transfers.executors.nixl_parts import AHEAD, PackedPart, Part
from kvflow.transfers.executors.nixl_wire import Release


@frozen(eq=False)
class _InAir:
    part: Part
    flight: Flight
    offset: int
    size: int


@define(eq=False)
class Landings:
    """Parts that one agent has in the air: while one arrives, the one before it is placed. Over
    shared memory a part has arrived when its read was posted, and is placed while it is in the
    cache."""

    door: Door
    agent: Agent
    deadline: Deadline
    flights: list[Flight]
    num_parts: int = field(init=False, default=0)
    num_descriptors: int = field(init=False, default=0)
    _air: deque[_InAir] = field(init=False, factory=deque)
    _idle: list[tuple[int, int]] = field(init=False, factory=list)

    def fetch(self, part: Part) -> None:
        """Posts the read of a part. Raises `CapacityError` if no landing becomes free in time."""
        while len(self._air) >= AHEAD:
            self._place_first()
        offset, size = self._lend(part)
        try:
            flight = part.post(self.door, self.agent, offset)
        except BaseException:
            self.door.landing.give_back(offset)
            raise
        self.flights.append(flight)
        self._air.append(_InAir(part, flight, offset, size))
        self.num_parts += 1
        self.num_descriptors += part.num_descriptors
        while self._air and self._air[0].flight.poll():
            self._place_first()

    def _lend(self, part: Part) -> tuple[int, int]:
        """(offset, size) in landing: one of ours that is idle, which is still in the cache, else
        a new one; ours are freed before others are waited for."""
        landing, need = self.door.landing, part.nbytes
        for i, (offset, size) in enumerate(self._idle):
            if size >= need and offset % part.alignment == 0:
                return self._idle.pop(i)
        self._give_back_idle()
        while (at := landing.lend(need, part.alignment)) is None and self._air:
            self._place_first()
            self._give_back_idle()
        if at is None:
            at = landing.wait_lend(need, max(self.deadline.left, 0), part.alignment)
        return at, need

    def _give_back_idle(self) -> None:
        while self._idle:
            self.door.landing.give_back(self._idle.pop()[0])

    def drain(self) -> None:
        """Places everything that is in the air, and gives landing back."""
        while self._air:
            self._place_first()
        self._give_back_idle()

    def _place_first(self) -> None:
        head = self._air[0]
        part, size = head.part, head.part.nbytes // len(head.part.names)
        if not head.flight.poll():
            self.door.wait([head.flight], self.deadline)
        self.deadline.check("a staged read")  # the owner's lease is as long as our deadline
        if isinstance(part, PackedPart):
            self.door.tell(part.peer, Release(part.request_id))
        landing = self.door.landing_bytes
        for n, name in enumerate(part.names):
            at = head.offset + n * size
            part.placing.copy(landing[at : at + size], self.door.page_bytes[name])
        self._air.popleft()
        self._idle.append((head.offset, head.size))

    def abandon(self) -> None:
        """After a failure: landing stays lent until the last byte has arrived."""
        for head in self._air:
            head.flight.when_ended(partial(self.door.landing.give_back, head.offset))
        self._air.clear()
        self._give_back_idle()
