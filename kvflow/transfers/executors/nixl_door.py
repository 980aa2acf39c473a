"""What every pull of an endpoint uses: the agent, the cache, requests with answers, deadlines."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.errors import TransferError
from kvflow.transfers.cost import Costs
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.nixl_agent import Agent, Flight
from kvflow.transfers.executors.nixl_lists import Peer, landing_pages
from kvflow.transfers.executors.nixl_serve import Service
from kvflow.transfers.executors.nixl_wire import Message, Refused, Reply, encode
from kvflow.transfers.executors.place import Bytes
from kvflow.transfers.executors.staging import StagingArea
from kvflow.transfers.lower import PageGeometry

PROBE_NBYTES = 8
_PROBE_EVERY = 0.02
_POLL_SLEEP = 20e-6


@frozen
class Deadline:
    """A moment of the monotonic clock."""

    at: float
    timeout: float

    @classmethod
    def after(cls, timeout: float) -> "Deadline":
        return cls(time.monotonic() + timeout, timeout)

    @property
    def left(self) -> float:
        return self.at - time.monotonic()

    def check(self, what: str) -> None:
        """Raises `TransferError` once the moment has passed."""
        if self.left <= 0:
            raise TransferError(f"{what} did not end within {self.timeout:.3f} s")


@define(eq=False)
class Door:
    """The parts of one endpoint. `open_lanes` gives the agents that post large direct reads,
    `agent` first: an agent does one thing at a time, so a second one lets another core copy."""

    agent: Agent
    open_lanes: Callable[[], tuple[Agent, ...]]
    key: bytes
    cache: RankCache
    geometries: Mapping[str, PageGeometry]
    landing: StagingArea
    service: Service
    costs: Costs
    max_descriptors: int
    landing_bytes: Bytes = field(init=False)
    page_bytes: Mapping[str, Bytes] = field(init=False)
    _landing_lists: dict[tuple[str, int], Any] = field(init=False, factory=dict)
    _scratch: Tensor = field(init=False)
    _kept: list[Flight] = field(init=False, factory=list)
    _probes: dict[str, Flight] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.landing_bytes = self.landing.memory.numpy()
        pages = self.cache.pages.items()
        self.page_bytes = {name: view.memory.numpy()[view.offset :] for name, view in pages}
        self._scratch = torch.zeros(PROBE_NBYTES, dtype=torch.uint8)
        self.agent.register(self._scratch.data_ptr(), PROBE_NBYTES)

    def landing_pages(self, agent: Agent, page: int) -> Any:
        """Landing as a prepared list of pages of `page` bytes, for one of our agents."""
        key = (agent.name, page)
        if key not in self._landing_lists:
            address, capacity = self.landing.memory.data_ptr(), self.landing.capacity
            self._landing_lists[key] = landing_pages(agent, address, capacity, page)
        return self._landing_lists[key]

    def wait(self, flights: list[Flight], deadline: Deadline) -> None:
        """Blocks until all have ended. Raises `TransferError` at the deadline, and NIXL's own
        exception for one that failed."""
        waiting = [f for f in flights if not f.poll()]
        while waiting:
            deadline.check(f"{len(waiting)} reads")
            time.sleep(_POLL_SLEEP)
            waiting = [f for f in waiting if not f.poll()]

    def keep(self, flights: list[Flight]) -> None:
        """Takes over what a failed pull leaves in the air."""
        self._kept += [f for f in flights if not f.has_ended()]

    def num_late(self) -> int:
        """Transfers of failed pulls that may still write to the cache or to landing."""
        self._kept = [f for f in self._kept if not f.has_ended()]
        return len(self._kept)

    def num_in_flight(self) -> int:
        """Those, and probes that a silent peer has not answered, which write nowhere else."""
        self._probes = {n: f for n, f in self._probes.items() if not f.has_ended()}
        return self.num_late() + len(self._probes)

    def probe(self, peer: Peer, deadline: Deadline | None = None) -> None:
        """A tiny read: raises NIXL's exception if the peer has died. With a deadline it waits for
        the answer; without, a peer that is silent stays under observation."""
        flight = self._probes.pop(peer.name, None)
        if flight is None or flight.poll():
            at = np.array([peer.export.staging.address]), np.array([self._scratch.data_ptr()])
            flight = self.agent.read(peer.name, *at, PROBE_NBYTES)
        try:
            if deadline is not None:
                self.wait([flight], deadline)
        finally:
            if not flight.has_ended():
                self._probes[peer.name] = flight

    def ask(self, peer: Peer, make: Callable[[int], Message]) -> int:
        """Sends a request; its id is for `answer`."""
        request_id = self.service.mailbox.new_id()
        self.agent.notify(peer.name, encode(self.key, make(request_id)))
        self.service.expect_traffic()
        return request_id

    def answer(
        self,
        peer: Peer,
        request_id: int,
        deadline: Deadline,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Waits for the reply, and watches whether the peer still lives; if it is not there yet,
        `meanwhile` is done first. Raises `TransferError` for a refusal or at the deadline, and
        NIXL's exception for a dead peer."""
        reply = self.service.mailbox.take(request_id, 0)
        if reply is None:
            meanwhile()
        while True:
            if reply is None:
                seconds = min(_PROBE_EVERY, max(deadline.left, 0))
                reply = self.service.mailbox.take(request_id, seconds)
            if isinstance(reply, Refused):
                raise TransferError(f"{peer.name} refused: {reply.reason}")
            if reply is not None:
                return reply
            deadline.check(f"the answer of {peer.name}")
            self.service.expect_traffic()
            self.probe(peer)

    def tell(self, peer: Peer, message: Message) -> None:
        self.agent.notify(peer.name, encode(self.key, message))
