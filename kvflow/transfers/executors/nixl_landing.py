"""Parts that travel through staging: how a job is cut into them, and how they land.

A part holds whole source pages (stage) or packed rows (pack) of one or more components that look
alike, and knows where each token goes from there.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
from attrs import define, evolve, field, frozen

from kvflow.errors import CapacityError
from kvflow.layouts.paging import in_page, page_of
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.nixl_agent import Flight
from kvflow.transfers.executors.nixl_door import Deadline, Door
from kvflow.transfers.executors.nixl_lists import Peer
from kvflow.transfers.executors.nixl_wire import Release
from kvflow.transfers.executors.place import Placing
from kvflow.transfers.executors.strategy import cut_runs
from kvflow.transfers.lower import PageGeometry, SlotRuns

PART_NBYTES = 4 << 20
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
class Part:
    """`nbytes` bytes from each address in `src`, landing one behind the other; then `placing`
    for each component in turn. `request_id` names the loan to release, if rows were packed."""

    peer: Peer
    names: tuple[str, ...]
    src: Ints
    nbytes: int
    placing: Placing
    request_id: int | None = None

    @property
    def total_nbytes(self) -> int:
        return self.nbytes * len(self.src)


def part_room(unit: int, *capacities: int) -> int:
    """Bytes that a part made of `unit` bytes each may have, so that two fit into every staging
    area, or at least one unit does. 0 if none does."""
    least = min(capacities)
    if unit > least:
        return 0
    return max(min(PART_NBYTES, least // _AHEAD), unit)


def staged_parts(job: Job, capacity: int) -> Iterator[Part]:
    """Whole source pages: several components, or a range of blocks, in each part. Raises
    `CapacityError` if a page does not fit."""
    size, page = job.src.block_size, job.src.record.page_nbytes(job.src.block_size)
    room = part_room(page, capacity) // page
    if room == 0:
        raise CapacityError(f"a page of {page} bytes does not fit into staging of {capacity}")
    src, dst = job.runs.expand()
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    blocks, first = np.unique(page_of(src, size), return_index=True)
    edges = np.append(first, len(src))
    for i in range(0, len(blocks), room):
        some = blocks[i : i + room]
        span = slice(edges[i], edges[i + len(some)])
        landed_at = np.searchsorted(some, page_of(src[span], size))
        local = landed_at * size + in_page(src[span], size)
        landed = PageGeometry(job.src.record, size, 0, page, len(some))
        placing = Placing.of(landed, local, job.dst, dst[span])
        together = max(room // len(some), 1)
        for n in range(0, len(job.names), together):
            names = job.names[n : n + together]
            base = np.array([job.peer.geometries[name].base for name in names], np.int64)
            at = np.add.outer(base, some * job.src.block_stride).ravel()
            yield Part(job.peer, names, at, page, placing)


def pack_cuts(job: Job, capacity: int) -> Iterator[Job]:
    """Jobs whose packed rows fit both areas: several components if possible, else a range of
    tokens. Raises `CapacityError` if a row does not fit."""
    row, tokens = job.src.record.nbytes, job.runs.num_tokens
    least = min(capacity, job.peer.export.staging.nbytes)
    room = part_room(row, least) // row
    if room == 0:
        raise CapacityError(f"a row of {row} bytes does not fit into staging of {least}")
    cuts = [job.runs] if tokens <= room else cut_runs(job.runs, room)
    together = max(1, room // tokens)
    for i in range(0, len(job.names), together):
        for runs in cuts:
            yield evolve(job, names=job.names[i : i + together], runs=runs)


def packed_part(job: Job, request_id: int, address: int) -> Part:
    """The rows of a job, as its owner packed them at `address`."""
    row, dst = job.src.record.nbytes, job.runs.expand()[1]
    rows = PageGeometry(job.src.record, 1, 0, row, len(dst))
    placing = Placing.of(rows, np.arange(len(dst)), job.dst, dst)
    src = np.array([address], np.int64)
    return Part(job.peer, job.names, src, rows.nbytes * len(job.names), placing, request_id)


@frozen(eq=False)
class _InAir:
    part: Part
    flight: Flight
    offset: int


@define(eq=False)
class Landings:
    """Parts in the air: while one arrives, the one before it is placed."""

    door: Door
    deadline: Deadline
    flights: list[Flight]
    num_parts: int = field(init=False, default=0)
    num_descriptors: int = field(init=False, default=0)
    _air: deque[_InAir] = field(init=False, factory=deque)

    def fetch(self, part: Part) -> None:
        """Posts the read of a part. Raises `CapacityError` if no landing becomes free in time."""
        while len(self._air) >= _AHEAD:
            self._place_first()
        offset = self._lend(part.total_nbytes)
        try:
            step = np.arange(len(part.src), dtype=np.int64) * part.nbytes
            dst = self.door.landing.memory.data_ptr() + offset + step
            flight = self.door.agent.read(part.peer.name, part.src, dst, part.nbytes)
        except BaseException:
            self.door.landing.give_back(offset)
            raise
        self.flights.append(flight)
        self._air.append(_InAir(part, flight, offset))
        self.num_parts += 1
        self.num_descriptors += len(part.src)

    def _lend(self, nbytes: int) -> int:
        """A slice of landing; ours are freed before others are waited for."""
        while (offset := self.door.landing.lend(nbytes)) is None and self._air:
            self._place_first()
        if offset is not None:
            return offset
        return self.door.landing.wait_lend(nbytes, max(self.deadline.left, 0))

    def drain(self) -> None:
        """Places everything that is in the air."""
        while self._air:
            self._place_first()

    def _place_first(self) -> None:
        head = self._air[0]
        part = head.part
        self.door.wait([head.flight], self.deadline)
        self.deadline.check("a staged read")  # the owner's lease is as long as our deadline
        if part.request_id is not None:
            self.door.tell(part.peer, Release(part.request_id))
        landing = self.door.landing.memory.numpy()
        size = part.total_nbytes // len(part.names)
        for n, name in enumerate(part.names):
            view, at = self.door.cache.pages[name], head.offset + n * size
            part.placing.copy(landing[at : at + size], view.memory.numpy()[view.offset :])
        self._air.popleft()
        self.door.landing.give_back(head.offset)

    def abandon(self) -> None:
        """After a failure: landing stays lent until the last byte has arrived."""
        for head in self._air:
            head.flight.when_ended(partial(self.door.landing.give_back, head.offset))
        self._air.clear()
