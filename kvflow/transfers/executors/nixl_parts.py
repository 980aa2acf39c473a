"""Parts that travel through staging: how jobs are cut into them.

A part holds whole source pages (stage) or packed rows (pack) of one or more components that look
alike, and knows where each token goes from there.
"""

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import numpy as np
from attrs import evolve, frozen

from kvflow.errors import CapacityError
from kvflow.layouts.paging import in_page, page_of
from kvflow.transfers.executors.nixl_agent import Agent, Flight, Index
from kvflow.transfers.executors.nixl_door import Door
from kvflow.transfers.executors.nixl_lists import Kind, Peer
from kvflow.transfers.executors.place import Placing
from kvflow.transfers.executors.staging import ALIGNMENT
from kvflow.transfers.lower import PageGeometry, SlotRuns
from kvflow.transfers.slot_cuts import cut_runs

PART_NBYTES = 4 << 20
"""Bytes of a part: what was read must still be in the last cache when it is placed, and a part
costs some 100 us of Python whatever its size."""
AHEAD = 2
"""Parts that one agent has in the air."""


@frozen(eq=False)
class Job:
    """The same runs of several components of one kind, from one peer."""

    peer: Peer
    kind: Kind
    names: tuple[str, ...]
    runs: SlotRuns

    @property
    def src(self) -> PageGeometry:
        return self.kind.src

    @property
    def dst(self) -> PageGeometry:
        return self.kind.dst

    @property
    def page_nbytes(self) -> int:
        """Bytes of a source page of one component."""
        return self.src.record.page_extent(self.src.block_size)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token of one component: in the heads that move."""
        return self.dst.record.row_nbytes(self.runs.dst_heads)


@frozen(eq=False)
class Part:
    """Bytes of several components one behind the other, and `placing` for each in turn."""

    peer: Peer
    names: tuple[str, ...]
    placing: Placing
    nbytes: int
    num_descriptors: int
    alignment: int

    def post(self, door: Door, agent: Agent, offset: int) -> Flight:
        """Posts the read into landing at `offset`."""
        raise NotImplementedError


@frozen(eq=False)
class StagedPart(Part):
    """Whole source pages: elements `src` of the peer's list of pages, `alignment` bytes each."""

    src: Index

    def post(self, door: Door, agent: Agent, offset: int) -> Flight:
        local, first = door.landing_pages(agent, self.alignment), offset // self.alignment
        dst = np.arange(first, first + len(self.src), dtype=np.int32)
        remote = self.peer.source_pages(agent)
        return agent.move_prepared("READ", local, dst, remote, self.src)


@frozen(eq=False)
class PackedPart(Part):
    """Rows that their owner packed at `address`; `request_id` names the loan to release."""

    address: int
    request_id: int

    def post(self, door: Door, agent: Agent, offset: int) -> Flight:
        src, dst = np.array([self.address]), np.array([door.landing.memory.data_ptr() + offset])
        return agent.read(self.peer.name, src, dst, self.nbytes)


def part_room(unit: int, *capacities: int) -> int:
    """Bytes that a part made of `unit` bytes each may have, so that two fit into every staging
    area, or at least one unit does. 0 if none does."""
    least = min(capacities)
    if unit > least:
        return 0
    return max(min(PART_NBYTES, least // AHEAD), unit)


def staged_parts(jobs: Iterable[Job], capacity: int) -> Iterator[StagedPart]:
    """Whole source pages, several components or a range of blocks in each part. Peers with the
    same components take turns: their tokens share target pages, which are still in the caches of
    memory translation when the next peer's arrive (2x measured). Raises `CapacityError` at once
    if a page does not fit; parts are made as they are asked for."""
    alike: dict[tuple[str, ...], list[Iterator[StagedPart]]] = {}
    for job in jobs:
        page = job.page_nbytes
        if not (room := part_room(page, capacity) // page):
            raise CapacityError(f"a page of {page} bytes does not fit into staging of {capacity}")
        alike.setdefault(job.names, []).append(_staged(job, room))
    turns = (turn for parts in alike.values() for turn in zip_longest(*parts))
    return (part for turn in turns for part in turn if part is not None)


def _staged(job: Job, room: int) -> Iterator[StagedPart]:
    """The parts of one job, at most `room` pages in each; blocks come in the order of its runs."""
    size, page = job.src.block_size, job.page_nbytes
    src, dst = job.runs.expand()
    blocks, first, which = np.unique(page_of(src, size), return_index=True, return_inverse=True)
    order = np.argsort(first)
    blocks, nth = blocks[order], np.argsort(order)[which]
    landed = nth * size + in_page(src, size)
    tokens = np.argsort(landed, kind="stable")
    landed, dst, nth = landed[tokens], dst[tokens], nth[tokens]
    starts = np.array([job.peer.page_starts[name] for name in job.names], np.int64)
    for i in range(0, len(blocks), room):
        some = blocks[i : i + room]
        span = slice(*np.searchsorted(nth, [i, i + len(some)]))
        pages = PageGeometry(job.src.record, size, 0, page, len(some))
        heads = job.runs.src_heads, job.runs.dst_heads
        placing = Placing.of(pages, landed[span] - i * size, job.dst, dst[span], *heads)
        elements = (starts[:, None] + some).astype(np.int32)
        together = max(room // len(some), 1)
        for n in range(0, len(job.names), together):
            names, of_part = job.names[n : n + together], elements[n : n + together].ravel()
            num = len(of_part)
            yield StagedPart(job.peer, names, placing, num * page, num, page, of_part)


def pack_cuts(job: Job, capacity: int) -> Iterator[Job]:
    """Jobs whose packed rows fit both areas: several components if possible, else a range of
    tokens. Raises `CapacityError` if a row does not fit."""
    row, tokens = job.row_nbytes, job.runs.num_tokens
    least = min(capacity, job.peer.export.staging.nbytes)
    room = part_room(row, least) // row
    if room == 0:
        raise CapacityError(f"a row of {row} bytes does not fit into staging of {least}")
    cuts = [job.runs] if tokens <= room else cut_runs(job.runs, room)
    together = max(1, room // tokens)
    for i in range(0, len(job.names), together):
        for runs in cuts:
            yield evolve(job, names=job.names[i : i + together], runs=runs)


def packed_part(job: Job, request_id: int, address: int) -> PackedPart:
    """The rows of a job, as its owner packed them at `address`."""
    row, dst, heads = job.row_nbytes, job.runs.expand()[1], job.runs.dst_heads
    first, stop = heads or (0, job.dst.record.num_heads)
    packed = evolve(job.dst.record.with_heads(stop - first), arrangement="row")
    rows = PageGeometry(packed, 1, 0, row, len(dst))
    placing = Placing.of(rows, np.arange(len(dst)), job.dst, dst, None, heads)
    size = rows.nbytes * len(job.names)
    return PackedPart(job.peer, job.names, placing, size, 1, ALIGNMENT, address, request_id)
