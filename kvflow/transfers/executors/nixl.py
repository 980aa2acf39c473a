"""NixlEndpoint: one rank's door to other processes over NIXL (UCX)."""

import threading
import time
from collections.abc import Mapping

from attrs import define, field

from kvflow.errors import TransferError
from kvflow.transfers.cost import DIRECT, STRATEGIES, Costs, Strategy
from kvflow.transfers.executors.base import RankCache, TransferReport
from kvflow.transfers.executors.nixl_agent import Agent, Progress, settle_environment
from kvflow.transfers.executors.nixl_door import Deadline, Door
from kvflow.transfers.executors.nixl_lists import Peer
from kvflow.transfers.executors.nixl_pull import Pull, Stage
from kvflow.transfers.executors.nixl_serve import Service
from kvflow.transfers.executors.nixl_wire import (
    Export,
    Hello,
    Region,
    decode_export,
    encode,
    pages_info,
)
from kvflow.transfers.executors.seal import check_key
from kvflow.transfers.executors.staging import StagingArea
from kvflow.transfers.lower import BoundPlan

__all__ = ["NixlEndpoint", "settle_environment"]

DEFAULT_STAGING_NBYTES = 64 << 20


@define(eq=False)
class NixlEndpoint:
    """Implements `Endpoint` and `Pusher` for a cache in host memory.

    key: shared secret (16 bytes or more) that seals everything endpoints tell each other.
    staging_nbytes: size of each of two areas, one to pack rows for readers and one to receive
    into. label: of two endpoints with one label the younger replaces the older at its peers; by
    default nobody is replaced. progress: "poll" has a thread that sleeps until something arrives,
    "none" leaves progress to the service thread. costs: what the choice of a way goes by.
    num_lanes: agents that read in parallel. max_descriptors: a pull that would give the transport
    more is refused. ucx: parameters of the UCX backend. Raises `TransferError` if
    NIXL is not installed.
    """

    cache: RankCache
    _key: bytes = field(repr=False, converter=check_key)
    staging_nbytes: int = DEFAULT_STAGING_NBYTES
    label: str | None = None
    progress: Progress = "poll"
    ucx: Mapping[str, str] = field(factory=dict)
    costs: Costs = field(factory=Costs)
    connect_timeout: float = 10.0
    num_lanes: int = 2
    max_descriptors: int = 1 << 22
    generation: int = field(init=False, factory=time.time_ns)
    _agent: Agent = field(init=False, repr=False)
    _door: Door = field(init=False, repr=False)
    _outbox: StagingArea = field(init=False, repr=False)
    _peers: dict[str, Peer] = field(init=False, factory=dict, repr=False)
    _lanes: list[Agent] = field(init=False, factory=list, repr=False)
    _retired: list[str] = field(init=False, factory=list, repr=False)
    _lock: threading.RLock = field(init=False, factory=threading.RLock, repr=False)
    _closed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._agent = Agent(self.label or f"rank{self.cache.rank}", self.progress, dict(self.ucx))
        self._outbox, landing = (StagingArea(self.staging_nbytes) for _ in range(2))
        self._agent.register(self._outbox.memory.data_ptr(), self._outbox.capacity)
        self._register(self._agent, landing)
        service = Service(self._agent, self._key, self.cache, self._outbox, self._admit)
        self._door = Door(
            self._agent,
            self._open_lanes,
            self._key,
            self.cache,
            self.cache.geometries(),
            landing,
            service,
            self.costs,
            self.max_descriptors,
        )

    def _register(self, agent: Agent, landing: StagingArea) -> None:
        """What reads may write to."""
        agent.register(landing.memory.data_ptr(), landing.capacity)
        for view in self.cache.pages.values():
            agent.register(view.memory.data_ptr(), view.memory.numel())

    def _open_lanes(self) -> tuple[Agent, ...]:
        """All agents that read; the extra ones are made at the first large pull."""
        with self._lock:
            while len(self._lanes) < self.num_lanes - 1:
                lane = Agent("lane", "none", dict(self.ucx))
                self._register(lane, self._door.landing)
                for peer in self._peers.values():
                    lane.add_peer(peer.export.agent)
                self._lanes.append(lane)
            return (self._agent, *self._lanes)

    @property
    def name(self) -> str:
        return self._agent.name

    @property
    def service(self) -> Service:
        """The owner's side, with its counters."""
        return self._door.service

    def export(self) -> bytes:
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        components = {}
        for name, geometry in self._door.geometries.items():
            memory = self.cache.pages[name].memory
            components[name] = pages_info(geometry, Region(memory.data_ptr(), memory.numel()))
        staging = Region(self._outbox.memory.data_ptr(), self._outbox.capacity)
        export = Export(
            self.name,
            self.label or self.name,
            self.generation,
            self.cache.rank,
            self._agent.metadata(),
            components,
            staging,
        )
        return encode(self._key, export)

    def connect(self, blob: bytes) -> str:
        """Checks the seal before NIXL sees anything, replaces an older generation of the peer,
        reads a few bytes from it and waits until it has admitted us. Connecting again to a peer
        that failed starts afresh. Raises `TransferError` for a bad seal, a stale generation, a
        peer that does not answer within `connect_timeout`, or one with reads still under way."""
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        deadline = Deadline.after(self.connect_timeout)
        try:
            peer = self._reached(blob, deadline)
            request = self._door.ask(peer, lambda i: Hello(i, self.export()))
            self._door.answer(peer, request, deadline)
        except self._agent.errors as e:
            raise TransferError(f"no connection: {type(e).__name__}: {e}") from e
        return peer.name

    def _reached(self, blob: bytes, deadline: Deadline) -> Peer:
        """A peer that was read from. One that is known may be asking us at this moment, so it is
        made known anew only if it cannot be read, or reads of failed pulls are still under way."""
        peer = self._admit(blob, fresh=self._door.num_late() > 0)
        try:
            self._door.probe(peer, deadline)
        except self._agent.errors:
            peer = self._admit(blob, fresh=True)
            self._door.probe(peer, deadline)
        return peer

    def _admit(self, blob: bytes, fresh: bool = False) -> Peer:
        """Makes the sender of an export known. With `fresh`, a known peer is removed first, for
        NIXL never reconnects by itself."""
        export = decode_export(self._key, blob)
        with self._lock:
            for old in [p for p in self._peers.values() if p.export.label == export.label]:
                if old.export.generation > export.generation:
                    raise TransferError(
                        f"{export.name} has generation {export.generation}, "
                        f"{old.name} is already connected with {old.export.generation}"
                    )
                if old.name == export.name and not fresh:
                    return old
                self._retire(old)
            self._remove_retired()
            if export.name in self._retired:
                raise TransferError(f"{export.name} still has reads under way: connect later")
            peer = Peer(export)
            for lane in (self._agent, *self._lanes):
                if (name := lane.add_peer(export.agent)) != export.name:
                    raise TransferError(f"the agent of {export.name} calls itself {name}")
            self._peers[peer.name] = peer
            return peer

    def _retire(self, peer: Peer) -> None:
        """Forgets a peer at once; its agent is removed when no read from it is under way."""
        del self._peers[peer.name]
        self._retired.append(peer.name)

    def _remove_retired(self) -> None:
        if self._door.num_in_flight() == 0:
            for name in self._retired:
                for lane in (self._agent, *self._lanes):
                    lane.remove_peer(name)
            self._retired.clear()

    def pull(
        self,
        bound: BoundPlan,
        dst_rank: int,
        peers: Mapping[int, str],
        *,
        timeout: float,
        verify: bool = False,
        strategy: Strategy | None = None,
        stage: Stage = "links",
    ) -> TransferReport:
        """See `Endpoint.pull`. `strategy` forces one way for everything; by default the cheapest
        is taken for each link. With `stage` "copies", the second stage of a plan for ranks that
        share a host: `peers` then names the endpoints of target ranks, all of which have pulled
        their links."""
        return self._transfer(stage, bound, dst_rank, peers, timeout, verify, strategy)

    def push(
        self,
        bound: BoundPlan,
        src_rank: int,
        peers: Mapping[int, str],
        *,
        timeout: float,
        verify: bool = False,
        strategy: Strategy | None = None,
    ) -> TransferReport:
        """See `Pusher.push`: direct strategies only, for nobody places what waits in staging."""
        if strategy is not None and strategy not in DIRECT:
            raise TransferError(f"strategy {strategy!r} of a push, must be one of {DIRECT}")
        return self._transfer("push", bound, src_rank, peers, timeout, verify, strategy)

    def _transfer(
        self,
        stage: Stage,
        bound: BoundPlan,
        rank: int,
        peers: Mapping[int, str],
        timeout: float,
        verify: bool,
        strategy: Strategy | None,
    ) -> TransferReport:
        word = "push" if stage == "push" else "pull"
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        if rank != self.cache.rank:
            raise TransferError(f"a {word} for rank {rank} at the cache of {self.cache.rank}")
        if strategy is not None and strategy not in STRATEGIES:
            raise TransferError(f"strategy {strategy!r}, must be one of {STRATEGIES}")
        with self._lock:
            if unknown := sorted(set(peers.values()) - set(self._peers)):
                raise TransferError(f"not connected to {unknown}")
            known = {rank: self._peers[name] for rank, name in peers.items()}
        deadline = Deadline.after(timeout)
        try:
            pull = Pull(self._door, bound, rank, known, deadline, strategy, stage)
            return pull.run(verify=verify)
        except self._agent.errors as e:
            kind = "write" if stage == "push" else "read"
            raise TransferError(f"a {kind} failed: {type(e).__name__}: {e}") from e

    def quiesced(self) -> bool:
        return self._closed or self._door.num_late() == 0

    def close(self, timeout: float = 5.0) -> None:
        """Raises `TransferError` if reads of failed pulls are still under way after `timeout`
        seconds: their buffers must stay, so nothing is freed. May be called again."""
        if self._closed:
            return
        deadline = Deadline.after(timeout)
        while self._door.num_in_flight():
            deadline.check(f"{self._door.num_in_flight()} reads of failed pulls")
            time.sleep(0.01)
        self._closed = True
        self._door.service.close()
        with self._lock:
            for peer in list(self._peers.values()):
                self._retire(peer)
            self._remove_retired()
            for lane in (self._agent, *self._lanes):
                lane.close()
