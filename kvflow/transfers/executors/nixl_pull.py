"""One pull: proves every link in bounds, chooses how it moves, moves it, compares digests."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from attrs import define, evolve, field, frozen

from kvflow.errors import CapacityError, TransferError
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.base import TransferReport
from kvflow.transfers.executors.nixl_agent import Flight
from kvflow.transfers.executors.nixl_door import Deadline, Door
from kvflow.transfers.executors.nixl_lists import (
    Grain,
    Peer,
    check_bounds,
    check_layouts,
    same_pages,
)
from kvflow.transfers.executors.nixl_wire import Digest, Digested, Pack, Packed, Release, pack_runs
from kvflow.transfers.executors.place import Placing
from kvflow.transfers.executors.seal import digest_rows
from kvflow.transfers.executors.strategy import (
    STRATEGIES,
    Strategy,
    cut_runs,
    estimate,
    split_whole,
)
from kvflow.transfers.lower import BoundPlan, PageGeometry, SlotRuns

PART_NBYTES = 4 << 20
_POST_NBYTES = 64 << 20
_POST_ELEMENTS = 1 << 12
_AHEAD = 2


@frozen(eq=False)
class Job:
    """The same runs of several components that look alike, from one peer."""

    peer: Peer
    names: tuple[str, ...]
    runs: SlotRuns
    src: PageGeometry
    dst: PageGeometry


@frozen(eq=False)
class _Landing:
    """A part on its way into staging, and what to do once it is there."""

    flight: Flight
    offset: int
    place: Callable[[], None]


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
    _num_parts: int = field(init=False, default=0)

    def run(self, *, verify: bool) -> TransferReport:
        """Raises `TransferError`, or NIXL's exception, with nothing left unaccounted for."""
        begin = time.monotonic()
        links = list(self.bound.links_to(self.dst_rank))
        jobs = [
            job for part, rank, runs in links for job in self._jobs(part.components, rank, runs)
        ]
        try:
            todo: dict[Strategy, list[Job]] = {s: [] for s in STRATEGIES}
            for job in jobs:
                self._nbytes += job.runs.num_tokens * job.dst.record.nbytes * len(job.names)
                self._assign(job, todo)
            self._land(self._packed_parts(todo["pack"]), todo["direct"])
            self._land(self._staged_parts(todo["stage"]), [])
            self.door.wait(self._flights, self.deadline)
            verified = self._verify(jobs) if verify else None
        finally:
            self.door.keep(self._flights)
        return TransferReport(
            self.bound.plan.digest,
            self._nbytes,
            self._num_descriptors,
            len({rank for _, rank, _ in links}),
            tuple(s for s in STRATEGIES if s in self._used),
            time.monotonic() - begin,
            verified,
            self._num_parts,
        )

    def _jobs(self, components: tuple[str, ...], rank: int, runs: SlotRuns) -> Iterator[Job]:
        """Components that look alike on both sides, together. All bounds are proven here."""
        if rank not in self.peers:
            raise TransferError(f"the plan reads rank {rank}, peers are given for {[*self.peers]}")
        peer, wanted = self.peers[rank], set(components)
        for kind in peer.kinds(self.door.geometries):
            names = tuple(name for name in kind.names if name in wanted)
            wanted -= set(names)
            if names:
                check_layouts(self.bound.plan, kind, names)
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
                self._post_direct(job, *blocks, whole=True)
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
        possible: list[Strategy] = ["direct"]
        if job.src.record.page_nbytes(job.src.block_size) <= self.door.landing.capacity:
            possible.append("stage")
        if job.src.record.nbytes <= self._pack_room(job.peer):
            possible.append("pack")
        return tuple(possible)

    def _post_direct(self, job: Job, src: Ints, dst: Ints, *, whole: bool) -> None:
        grain: Grain = "page" if whole else "row"
        unit = job.src.block_size if whole else 1
        lists = job.peer.lists(self.door.agent, self.door.geometries, grain)
        here, there = lists.indices(job.names, src, dst)
        if whole:
            page = job.src.record.page_nbytes(job.src.block_size)
            dense = page == job.src.block_stride == job.dst.block_stride
            breaks = (np.diff(here) != 1) | (np.diff(there) != 1)
            self._num_descriptors += 1 + int(breaks.sum()) if dense else len(here)
        step = max(1, min(_POST_ELEMENTS, _POST_NBYTES // (unit * job.src.record.nbytes)))
        for i in range(0, len(here), step):
            self.deadline.check("posting reads")
            flight = self.door.agent.read_prepared(
                lists.local, there[i : i + step], lists.remote, here[i : i + step]
            )
            self._flights.append(flight)

    def _land(self, parts: Iterator[_Landing], direct: list[Job]) -> None:
        """Keeps a few parts in the air, placing the first while the next arrive."""
        air: deque[_Landing] = deque()
        try:
            for job in direct:
                self._post_direct(job, *job.runs.expand(), whole=False)
            for part in parts:
                air.append(part)
                if len(air) >= _AHEAD:
                    self._place(air)
            while air:
                self._place(air)
        finally:
            for part in air:
                part.flight.when_ended(partial(self.door.landing.give_back, part.offset))

    def _place(self, air: deque[_Landing]) -> None:
        part = air[0]
        self.door.wait([part.flight], self.deadline)
        self.deadline.check("a staged read")  # the owner's lease is as long as our deadline
        part.place()
        air.popleft()
        self.door.landing.give_back(part.offset)

    def _read_to_landing(
        self, peer: Peer, src: Ints, nbytes: int, place: Callable[[int], None]
    ) -> _Landing:
        """Posts the read of equal pieces, to lie one behind the other in landing."""
        landing, total = self.door.landing, nbytes * len(src)
        offset = landing.wait_lend(total, max(self.deadline.left, 0))
        try:
            dst = landing.memory.data_ptr() + offset + np.arange(len(src), dtype=np.int64) * nbytes
            flight = self.door.agent.read(peer.name, src, dst, nbytes)
        except BaseException:
            landing.give_back(offset)
            raise
        self._flights.append(flight)
        self._num_descriptors += len(src)
        self._num_parts += 1
        return _Landing(flight, offset, lambda: place(offset))

    def _staged_parts(self, jobs: list[Job]) -> Iterator[_Landing]:
        """Whole source pages, several components or a range of blocks in each part."""
        for job in jobs:
            page = job.src.record.page_nbytes(job.src.block_size)
            room = min(PART_NBYTES, self.door.landing.capacity // _AHEAD) // page
            if page > self.door.landing.capacity:
                raise CapacityError(
                    f"a page of {page} bytes, landing has {self.door.landing.capacity}"
                )
            src, dst = job.runs.expand()
            order = np.argsort(src, kind="stable")
            src, dst = src[order], dst[order]
            blocks, first = np.unique(src // job.src.block_size, return_index=True)
            ends, step = np.append(first[1:], len(src)), max(room, 1)
            for i in range(0, len(blocks), step):
                some, span = (
                    blocks[i : i + step],
                    slice(first[i], ends[min(i + step, len(ends)) - 1]),
                )
                yield from self._stage(job, some, src[span], dst[span], max(room // len(some), 1))

    def _stage(
        self, job: Job, blocks: Ints, src: Ints, dst: Ints, together: int
    ) -> Iterator[_Landing]:
        size, page = job.src.block_size, job.src.record.page_nbytes(job.src.block_size)
        local = np.searchsorted(blocks, src // size) * size + src % size
        landed = PageGeometry(job.src.record, size, 0, page, len(blocks))
        placing = Placing.of(landed, local, job.dst, dst)
        for n in range(0, len(job.names), together):
            names = job.names[n : n + together]
            base = np.array([job.peer.geometries[name].base for name in names], np.int64)
            at = np.add.outer(base, blocks * job.src.block_stride).ravel()
            place = partial(self._spread, names, placing, landed.nbytes)
            yield self._read_to_landing(job.peer, at, page, place)

    def _spread(self, names: tuple[str, ...], placing: Placing, nbytes: int, offset: int) -> None:
        """Copies what has landed, component after component, to its slots."""
        landing = self.door.landing.memory.numpy()
        for n, name in enumerate(names):
            view, at = self.door.cache.pages[name], offset + n * nbytes
            placing.copy(landing[at : at + nbytes], view.memory.numpy()[view.offset :])

    def _pack_room(self, peer: Peer) -> int:
        """Bytes that a packed part may have: two fit into either staging area if one row does."""
        least = min(peer.export.staging.nbytes, self.door.landing.capacity)
        return min(PART_NBYTES, max(least // _AHEAD, least if least < 2048 else 0))

    def _packed_parts(self, jobs: list[Job]) -> Iterator[_Landing]:
        """Asks a few parts ahead, so that owners pack while we read and place."""
        asked: deque[tuple[int, Job]] = deque()
        parts = (part for job in jobs for part in self._pack_cuts(job))
        for part in parts:
            asked.append((self._ask_pack(part), part))
            if len(asked) > _AHEAD:
                yield self._packed(*asked.popleft())
        while asked:
            yield self._packed(*asked.popleft())

    def _pack_cuts(self, job: Job) -> Iterator[Job]:
        """Jobs whose packed rows fit: several components if possible, else a range of tokens."""
        room, row, tokens = self._pack_room(job.peer), job.src.record.nbytes, job.runs.num_tokens
        if row > room:
            raise CapacityError(f"a row of {row} bytes, staging parts have {room}")
        together = max(1, room // (row * tokens))
        cuts = [job.runs] if row * tokens <= room else cut_runs(job.runs, room // row)
        for i in range(0, len(job.names), together):
            for runs in cuts:
                yield evolve(job, names=job.names[i : i + together], runs=runs)

    def _ask_pack(self, job: Job) -> int:
        lease = max(self.deadline.left, 0)
        make = partial(Pack, components=job.names, runs=pack_runs(job.runs), lease=lease)
        return self.door.ask(job.peer, make)

    def _packed(self, request_id: int, job: Job) -> _Landing:
        reply = self.door.answer(job.peer, request_id, self.deadline)
        if not isinstance(reply, Packed):
            raise TransferError(f"{job.peer.name} answered a pack request with {reply!r}")
        dst, staging = job.runs.expand()[1], job.peer.export.staging
        rows = PageGeometry(job.src.record, 1, 0, job.src.record.nbytes, len(dst))
        size = rows.nbytes
        if not 0 <= reply.offset <= staging.nbytes - size * len(job.names):
            raise TransferError(
                f"{job.peer.name} packed {size * len(job.names)} bytes at {reply.offset}, its "
                f"staging has {staging.nbytes}"
            )

        placing = Placing.of(rows, np.arange(len(dst)), job.dst, dst)

        def place(offset: int) -> None:
            self.door.tell(job.peer, Release(request_id))
            self._spread(job.names, placing, size, offset)

        src = np.array([staging.address + reply.offset], np.int64)
        return self._read_to_landing(job.peer, src, size * len(job.names), place)

    def _verify(self, jobs: list[Job]) -> bool:
        """Compares digests of every component of every link. Raises `TransferError` for the first
        pair that differs."""
        asked = []
        for job in jobs:
            make = partial(Digest, components=job.names, runs=pack_runs(job.runs))
            asked.append(self.door.ask(job.peer, make))
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
