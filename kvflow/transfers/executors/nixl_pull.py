"""One transfer: proves every link in bounds, chooses how it moves, moves it, compares digests."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, Literal, TypeVar

from attrs import define, evolve, field

from kvflow.errors import CapacityError, TransferError
from kvflow.transfers.cost import DIRECT, STRATEGIES, Strategy, choose, num_descriptors, ways
from kvflow.transfers.executors.base import TransferReport
from kvflow.transfers.executors.nixl_agent import Agent, Flight, Op
from kvflow.transfers.executors.nixl_direct import Post, direct_posts
from kvflow.transfers.executors.nixl_door import Deadline, Door
from kvflow.transfers.executors.nixl_landing import Landings
from kvflow.transfers.executors.nixl_lists import Peer, Planned, check_bounds
from kvflow.transfers.executors.nixl_parts import (
    Job,
    StagedPart,
    pack_cuts,
    packed_part,
    part_room,
    staged_parts,
)
from kvflow.transfers.executors.nixl_wire import Digest, Digested, Message, Pack, Packed, pack_runs
from kvflow.transfers.executors.seal import digest_rows
from kvflow.transfers.lower import BoundPlan, SlotRuns
from kvflow.transfers.plan import PlanPart
from kvflow.transfers.slot_cuts import mirrored

_LANES_NBYTES = 16 << 20
_ASK_AHEAD = 3

Stage = Literal["links", "copies", "push"]
"""What to move: what links give to a target rank, what it copies from its neighbours on a host, or
what links take from a source rank, which then writes."""
T = TypeVar("T")


@define(eq=False)
class _Feed(Generic[T]):
    """Work that several lanes take from: what one makes, the others need not wait to move."""

    _source: Iterator[T]
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                item = next(self._source, None)
            if item is None:
                return
            yield item

    def end(self) -> None:
        """Nothing more to take."""
        with self._lock:
            self._source = iter(())


@define(eq=False)
class Pull:
    """Moves one stage of `bound` for our `rank`; used once. `strategy` forces one way for all. In
    a push the runs are mirrored: `src` is always the peer's side."""

    door: Door
    bound: BoundPlan
    rank: int
    peers: Mapping[int, Peer]
    deadline: Deadline
    strategy: Strategy | None = None
    stage: Stage = "links"
    _flights: list[Flight] = field(init=False, factory=list)
    _used: set[Strategy] = field(init=False, factory=set)
    _nbytes: int = field(init=False, default=0)
    _num_descriptors: int = field(init=False, default=0)
    _posts: _Feed[Post] = field(init=False)
    _parts: _Feed[StagedPart] = field(init=False)
    _landings: list[Landings] = field(init=False, factory=list)
    _asked: list[int] = field(init=False, factory=list)

    def run(self, *, verify: bool) -> TransferReport:
        """Raises `TransferError`, or NIXL's exception, with nothing left unaccounted for."""
        begin = time.monotonic()
        links = self._links()
        jobs = list(self._jobs(links))
        try:
            packed = self._queue(jobs)
            self._read_all()
            self._pack(packed)
            self.door.wait(self._flights, self.deadline)
            verified = self._verify(jobs) if verify else None
        finally:
            for landings in self._landings:
                landings.abandon()
            self.door.keep(self._flights)
            self.door.service.mailbox.forget(self._asked)
        return TransferReport(
            self.bound.plan.digest,
            self._nbytes,
            self._num_descriptors + sum(g.num_descriptors for g in self._landings),
            len({rank for _, rank, _ in links}),
            tuple(s for s in STRATEGIES if s in self._used),
            time.monotonic() - begin,
            verified,
            sum(g.num_parts for g in self._landings),
        )

    @property
    def _op(self) -> Op:
        return "WRITE" if self.stage == "push" else "READ"

    def _links(self) -> list[tuple[PlanPart, int, SlotRuns]]:
        match self.stage:
            case "links":
                return list(self.bound.links_to(self.rank))
            case "copies":
                return list(self.bound.copies_to(self.rank))
        links = self.bound.links_from(self.rank)
        return [(part, rank, mirrored(runs)) for part, rank, runs in links]

    def _jobs(self, links: list[tuple[PlanPart, int, SlotRuns]]) -> Iterator[Job]:
        """Components that look alike on both sides, together. All bounds are proven here."""
        source, target = (
            Planned("source", self.bound.src),
            Planned("target", self.bound.dst),
        )
        src = source if self.stage == "links" else target
        dst = source if self.stage == "push" else target
        for part, rank, runs in links:
            peer, wanted = self._peer(rank), set(part.components)
            for kind in peer.kinds(self.door.geometries):
                if names := tuple(name for name in kind.names if name in wanted):
                    wanted -= set(names)
                    src.check(kind.src, names, rank)
                    dst.check(kind.dst, names, self.rank)
                    check_bounds(kind, runs, (src.side, dst.side))
                    src.check_blocks(kind.src, part, names[0], rank)
                    dst.check_blocks(kind.dst, part, names[0], self.rank)
                    job = Job(peer, kind, names, runs)
                    self._nbytes += runs.num_tokens * job.row_nbytes * len(names)
                    yield job
            if wanted:
                raise TransferError(f"{peer.name} or this endpoint lacks {sorted(wanted)}")

    def _peer(self, rank: int) -> Peer:
        """The endpoint that stands for a rank of the plan, if it says that it is that rank."""
        if (peer := self.peers.get(rank)) is None:
            raise TransferError(f"the plan moves rank {rank}, peers are given for {[*self.peers]}")
        if peer.export.rank != rank:
            raise TransferError(f"{peer.name} is named for rank {rank}, it is {peer.export.rank}")
        return peer

    def _queue(self, jobs: list[Job]) -> list[Job]:
        """Puts everything to read in place; returns what owners must pack first."""
        todo: dict[Strategy, list[Job]] = {s: [] for s in STRATEGIES}
        for job in jobs:
            for way, runs in self._ways(job):
                todo[way].append(evolve(job, runs=runs))
        self._used = {way for way, some in todo.items() if some}
        direct = [(w, job) for w in DIRECT for job in todo[w]]
        self._num_descriptors = sum(
            num_descriptors(way, job.runs, job.src, job.dst) * len(job.names) for way, job in direct
        )
        if self._num_descriptors > self.door.max_descriptors:
            raise CapacityError(
                f"{self._num_descriptors} descriptors for {self._nbytes} bytes, at most "
                f"{self.door.max_descriptors} are allowed: stage or pack, or pull fewer tokens"
            )
        agent, mine = self.door.agent, self.door.geometries
        made = (post for way, job in direct for post in direct_posts(way, job, mine, agent))
        self._posts = _Feed(made)
        self._parts = _Feed(staged_parts(todo["stage"], self.door.landing.capacity))
        return todo["pack"]

    def _ways(self, job: Job) -> list[tuple[Strategy, SlotRuns]]:
        if self.strategy is not None:
            return ways(self.strategy, job.runs, job.src, job.dst)
        landing, owner = self.door.landing.capacity, job.peer.export.staging.nbytes
        allowed = [*DIRECT]
        if self.stage != "push":  # what waits in staging, a reader places
            allowed += ["stage"] if part_room(job.page_nbytes, landing) else []
            allowed += ["pack"] if part_room(job.row_nbytes, landing, owner) else []
        return choose(self.door.costs, job.runs, job.src, job.dst, len(job.names), allowed)

    def _landing(self, agent: Agent) -> Landings:
        self._landings.append(Landings(self.door, agent, self.deadline, self._flights))
        return self._landings[-1]

    def _read_all(self) -> None:
        """Posts the direct reads, then the staged ones. A post over shared memory is the copy
        itself and placing is another, so lanes share the work if there is much of it."""
        lanes = self.door.open_lanes() if self._nbytes >= _LANES_NBYTES else (self.door.agent,)
        if len(lanes) == 1:
            self._read_from(self.door.agent)
            return
        with ThreadPoolExecutor(len(lanes)) as threads:
            for done in [threads.submit(self._read_from, lane) for lane in lanes]:
                done.result()

    def _read_from(self, lane: Agent) -> None:
        landings, op = self._landing(lane), self._op
        try:
            for post in self._posts:
                self.deadline.check("posting reads")
                self._flights.append(post.post(lane, op))
            for part in self._parts:
                landings.fetch(part)
            landings.drain()
        except BaseException:
            self._posts.end()  # the other lanes need not go on
            self._parts.end()
            raise

    def _pack(self, jobs: list[Job]) -> None:
        """Asks a few parts ahead, so that owners pack while we read and place."""
        asked: deque[tuple[int, Job]] = deque()
        landings = self._landing(self.door.agent)
        for job in jobs:
            for part in pack_cuts(job, self.door.landing.capacity):
                asked.append((self._ask_pack(part), part))
                if len(asked) > _ASK_AHEAD:
                    self._fetch_packed(*asked.popleft(), landings)
        while asked:
            self._fetch_packed(*asked.popleft(), landings)
        landings.drain()

    def _ask_pack(self, job: Job) -> int:
        lease = max(self.deadline.left, 0)
        runs, heads = pack_runs(job.runs), job.runs.src_heads
        return self._ask(job.peer, lambda i: Pack(i, job.names, runs, lease, heads))

    def _ask(self, peer: Peer, make: Callable[[int], Message]) -> int:
        self._asked.append(self.door.ask(peer, make))
        return self._asked[-1]

    def _fetch_packed(self, request_id: int, job: Job, landings: Landings) -> None:
        """While the owner keeps us waiting, what has arrived is placed and its loan ended: two
        readers never wait for each other's room."""
        reply = self.door.answer(job.peer, request_id, self.deadline, landings.drain)
        if not isinstance(reply, Packed):
            raise TransferError(f"{job.peer.name} answered a pack request with {reply!r}")
        staging = job.peer.export.staging
        part = packed_part(job, request_id, staging.address + reply.offset)
        if not 0 <= reply.offset <= staging.nbytes - part.nbytes:
            raise TransferError(
                f"{job.peer.name} packed {part.nbytes} bytes at {reply.offset}, its "
                f"staging has {staging.nbytes}"
            )
        landings.fetch(part)

    def _verify(self, jobs: list[Job]) -> bool:
        """Compares digests of every component of every link. Raises `TransferError` for the first
        pair that differs."""
        asked = []
        for job in jobs:
            make = partial(
                Digest,
                components=job.names,
                runs=pack_runs(job.runs),
                heads=job.runs.src_heads,
            )
            asked.append(self._ask(job.peer, make))
        for job, request_id in zip(jobs, asked, strict=True):
            slots, heads = job.runs.expand()[1], job.runs.dst_heads
            mine = [digest_rows(self.door.cache.pages[name], slots, heads) for name in job.names]
            reply = self.door.answer(job.peer, request_id, self.deadline)
            theirs = reply.digests if isinstance(reply, Digested) else ()
            for name, a, b in zip(job.names, theirs, mine, strict=True):
                if a != b:
                    raise TransferError(
                        f"{name} from {job.peer.name}: source digest {a.hex()}, here {b.hex()}"
                    )
        return True
