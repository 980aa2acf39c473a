"""One pull: proves every link in bounds, chooses how it moves, moves it, compares digests."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from attrs import define, evolve, field, frozen

from kvflow.errors import TransferError
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.base import TransferReport
from kvflow.transfers.executors.nixl_agent import Agent, Flight
from kvflow.transfers.executors.nixl_door import Deadline, Door
from kvflow.transfers.executors.nixl_landing import Landings
from kvflow.transfers.executors.nixl_lists import (
    WHOLE,
    Index,
    Peer,
    Planned,
    check_bounds,
    same_pages,
)
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
from kvflow.transfers.executors.slot_cuts import split_whole
from kvflow.transfers.executors.strategy import STRATEGIES, Strategy, estimate
from kvflow.transfers.lower import BoundPlan, SlotRuns
from kvflow.transfers.plan import PlanPart

_POST_NBYTES = 8 << 20
_POST_ELEMENTS = 1 << 12
_LANES_NBYTES = 16 << 20
_ASK_AHEAD = 3


@frozen(eq=False)
class _Post:
    """One request of direct reads: elements of a peer's prepared list."""

    peer: Peer
    grain: int
    src: Index
    dst: Index


T = TypeVar("T")


def _next(queue: deque[T]) -> T | None:
    """The first of a queue that several lanes empty."""
    try:
        return queue.popleft()
    except IndexError:
        return None


@define(eq=False)
class Pull:
    """Moves what `bound` gives to `dst_rank`; used once. `strategy` forces one way for all."""

    door: Door
    bound: BoundPlan
    dst_rank: int
    peers: Mapping[int, Peer]
    deadline: Deadline
    strategy: Strategy | None = None
    _flights: list[Flight] = field(init=False, factory=list)
    _used: set[str] = field(init=False, factory=set)
    _nbytes: int = field(init=False, default=0)
    _num_descriptors: int = field(init=False, default=0)
    _posts: deque[_Post] = field(init=False, factory=deque)
    _parts: deque[StagedPart] = field(init=False, factory=deque)
    _landings: list[Landings] = field(init=False, factory=list)
    _asked: list[int] = field(init=False, factory=list)

    def run(self, *, verify: bool) -> TransferReport:
        """Raises `TransferError`, or NIXL's exception, with nothing left unaccounted for."""
        begin = time.monotonic()
        links = list(self.bound.links_to(self.dst_rank))
        jobs = list(self._jobs(links))
        try:
            todo: dict[Strategy, list[Job]] = {s: [] for s in STRATEGIES}
            for job in jobs:
                self._nbytes += job.runs.num_tokens * job.dst.record.nbytes * len(job.names)
                self._assign(job, todo)
            for job in todo["direct"]:
                self._add_direct(job, *job.runs.expand(), grain=1)
            self._parts.extend(staged_parts(todo["stage"], self.door.landing.capacity))
            self._read_all()
            self._pack(todo["pack"])
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

    def _jobs(self, links: list[tuple[PlanPart, int, SlotRuns]]) -> Iterator[Job]:
        """Components that look alike on both sides, together. All bounds are proven here."""
        plan = self.bound.plan
        src, dst = Planned.of("source", plan.src), Planned.of("target", plan.dst)
        for part, rank, runs in links:
            if rank not in self.peers:
                raise TransferError(
                    f"the plan reads rank {rank}, peers are given for {[*self.peers]}"
                )
            peer, wanted = self.peers[rank], set(part.components)
            for kind in peer.kinds(self.door.geometries):
                if names := tuple(name for name in kind.names if name in wanted):
                    wanted -= set(names)
                    src.check(kind.src, names)
                    dst.check(kind.dst, names)
                    check_bounds(kind, runs)
                    yield Job(peer, names, runs, kind.src, kind.dst)
            if wanted:
                raise TransferError(f"{peer.name} or this endpoint lacks {sorted(wanted)}")

    def _assign(self, job: Job, todo: dict[Strategy, list[Job]]) -> None:
        """Whole blocks go direct; what is left goes the cheapest way that staging allows."""
        if self.strategy in (None, "direct") and same_pages(job.src, job.dst):
            blocks, rest = split_whole(job.runs, job.src.block_size)
            if len(blocks[0]):
                self._used.add("direct")
                self._add_direct(job, *blocks, grain=WHOLE)
            job = evolve(job, runs=rest)
        if not len(job.runs):
            return
        guess = estimate(self.door.costs, job.runs, job.src, job.dst, len(job.names))
        chosen = self.strategy or guess.best(self._possible(job))
        if chosen == "direct":
            self._num_descriptors += guess.num_descriptors
        self._used.add(chosen)
        todo[chosen].append(job)

    def _possible(self, job: Job) -> tuple[Strategy, ...]:
        page, row = job.src.record.page_nbytes(job.src.block_size), job.src.record.nbytes
        landing, owner = self.door.landing.capacity, job.peer.export.staging.nbytes
        possible: list[Strategy] = ["direct"]
        possible += ["stage"] if part_room(page, landing) else []
        possible += ["pack"] if part_room(row, landing, owner) else []
        return tuple(possible)

    def _add_direct(self, job: Job, src: Ints, dst: Ints, *, grain: int) -> None:
        unit = grain or job.src.block_size
        lists = job.peer.lists(self.door.agent, self.door.geometries, grain)
        here, there = lists.indices(job.names, src, dst)
        if grain == WHOLE:
            page = job.src.record.page_nbytes(job.src.block_size)
            dense = page == job.src.block_stride == job.dst.block_stride
            breaks = (np.diff(here) != 1) | (np.diff(there) != 1)
            self._num_descriptors += 1 + int(breaks.sum()) if dense else len(here)
        step = max(1, min(_POST_ELEMENTS, _POST_NBYTES // (unit * job.src.record.nbytes)))
        for i in range(0, len(here), step):
            self._posts.append(_Post(job.peer, grain, here[i : i + step], there[i : i + step]))

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
        landings = self._landing(lane)
        try:
            while post := _next(self._posts):
                self.deadline.check("posting reads")
                lists = post.peer.lists(lane, self.door.geometries, post.grain)
                flight = lane.read_prepared(lists.local, post.dst, lists.remote, post.src)
                self._flights.append(flight)
            while part := _next(self._parts):
                landings.fetch(part)
            landings.drain()
        except BaseException:
            self._posts.clear()  # the other lanes need not go on
            self._parts.clear()
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
        runs = pack_runs(job.runs)
        return self._ask(job.peer, lambda i: Pack(i, job.names, runs, lease))

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
            make = partial(Digest, components=job.names, runs=pack_runs(job.runs))
            asked.append(self._ask(job.peer, make))
        for job, request_id in zip(jobs, asked, strict=True):
            slots = job.runs.expand()[1]
            mine = [digest_rows(self.door.cache.pages[name], slots) for name in job.names]
            reply = self.door.answer(job.peer, request_id, self.deadline)
            theirs = reply.digests if isinstance(reply, Digested) else ()
            for name, a, b in zip(job.names, theirs, mine, strict=True):
                if a != b:
                    raise TransferError(
                        f"{name} from {job.peer.name}: source digest {a.hex()}, here {b.hex()}"
                    )
        return True
