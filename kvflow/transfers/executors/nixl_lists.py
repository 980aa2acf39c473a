"""Prepared lists: all pages, or all rows, that two caches share, described to NIXL once per peer.

Afterwards a transfer is two int32 index arrays, and NIXL merges neighbours that ascend together.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from kvflow.errors import CapacityError, TransferError
from kvflow.layouts.record import Piece
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.nixl_agent import LOCAL, Agent
from kvflow.transfers.executors.nixl_wire import Export, geometry_of
from kvflow.transfers.lower import PageGeometry, SlotRuns, paired_pieces
from kvflow.transfers.plan import Plan

Grain = Literal["page", "row"]
_INT32_END = 2**31


@frozen(eq=False)
class PreparedLists:
    """A local and a remote list with the same components in the same order. `starts` says at
    which element of (remote, local) each piece of a component begins."""

    remote: Any
    local: Any
    starts: Mapping[str, tuple[tuple[int, int], ...]]

    def indices(
        self, names: Iterable[str], src: Ints, dst: Ints
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Elements of the same blocks (or slots) of several components: piece by piece, in the
        given order."""
        first = np.array([s for name in names for s in self.starts[name]], np.int64)
        both = (np.add.outer(first[:, i], at).ravel() for i, at in ((0, src), (1, dst)))
        here, there = (np.ascontiguousarray(index, dtype=np.int32) for index in both)
        return here, there


@frozen(eq=False)
class Kind:
    """Components whose pages look alike on both sides: same record, sizes and strides. `src` and
    `dst` are relative (base 0)."""

    names: tuple[str, ...]
    src: PageGeometry
    dst: PageGeometry


@define(eq=False)
class Peer:
    """A connected endpoint: what it exported, checked, and the lists prepared for it."""

    export: Export
    geometries: Mapping[str, PageGeometry] = field(init=False)
    _kinds: tuple[Kind, ...] = field(init=False, default=())
    _lists: dict[tuple[str, Grain], PreparedLists] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.geometries = {n: geometry_of(n, i) for n, i in self.export.components.items()}

    @property
    def name(self) -> str:
        return self.export.name

    def kinds(self, mine: Mapping[str, PageGeometry]) -> tuple[Kind, ...]:
        """The components that both sides have, by kind; `mine` is the same at every call."""
        if not self._kinds:
            alike: dict[tuple[PageGeometry, PageGeometry], list[str]] = {}
            for name, dst in mine.items():
                if (src := self.geometries.get(name)) is not None:
                    looks = (evolve(src, base=0), evolve(dst, base=0))
                    alike.setdefault(looks, []).append(name)
            self._kinds = tuple(Kind(tuple(names), *looks) for looks, names in alike.items())
        return self._kinds

    def lists(self, agent: Agent, mine: Mapping[str, PageGeometry], grain: Grain) -> PreparedLists:
        """The lists of one grain for an agent of ours, prepared at first use."""
        key = (agent.name, grain)
        if key not in self._lists:
            self._lists[key] = _prepare(agent, self, mine, grain)
        return self._lists[key]


def same_pages(src: PageGeometry, dst: PageGeometry) -> bool:
    """A page of one can be copied as a page of the other."""
    return (src.record, src.block_size) == (dst.record, dst.block_size)


def _prepare(
    agent: Agent, peer: Peer, mine: Mapping[str, PageGeometry], grain: Grain
) -> PreparedLists:
    tables: tuple[list[Ints], list[Ints]] = ([], [])
    length, starts = [0, 0], {}
    for name, dst in mine.items():
        src = peer.geometries.get(name)
        if src is None or src.record.fields != dst.record.fields:
            continue
        if grain == "page" and not same_pages(src, dst):
            continue
        pairs = paired_pieces(src, dst) if grain == "row" else [(None, None)]
        begins = []
        for pair in pairs:
            begins.append((length[0], length[1]))
            for side, (geometry, piece) in enumerate(zip((src, dst), pair, strict=True)):
                table = _pages(geometry) if piece is None else _rows(geometry, piece)
                tables[side].append(table)
                length[side] += int(table[:, 4].sum())
        starts[name] = tuple(begins)
    if max(length) >= _INT32_END:
        raise CapacityError(f"{grain} lists of {length} elements, NIXL indexes below {_INT32_END}")
    remote, local = (np.concatenate(t).astype(np.uint64) for t in tables)
    return PreparedLists(agent.prepare(peer.name, remote), agent.prepare(LOCAL, local), starts)


def _pages(at: PageGeometry) -> Ints:
    """One strided row (address, length, device, stride, count) for all pages."""
    page = at.record.page_nbytes(at.block_size)
    return np.array([[at.base, page, 0, at.block_stride, at.num_blocks]], np.int64)


def _rows(at: PageGeometry, piece: Piece) -> Ints:
    """Strided rows for a piece of every slot: one if the pitch is even, else one a page."""
    even = at.block_stride == at.block_size * piece.stride
    num_tables, count = (1, at.num_blocks) if even else (at.num_blocks, 1)
    table = np.zeros((num_tables, 5), np.int64)
    table[:, 0] = at.address(np.arange(num_tables, dtype=np.int64) * at.block_size, piece)
    table[:, 1], table[:, 3], table[:, 4] = piece.nbytes, piece.stride, count * at.block_size
    return table


def check_bounds(kind: Kind, runs: SlotRuns) -> None:
    """Every slot of the runs lies in the pages of a registered region, on both sides. Raises
    `TransferError` with the offending run."""
    sides = (
        ("source", kind.src, runs.src, runs.src_stride),
        ("target", kind.dst, runs.dst, runs.dst_stride),
    )
    for side, at, slot, stride in sides:
        last, num_slots = slot + stride * (runs.count - 1), at.num_blocks * at.block_size
        bad = np.flatnonzero((slot < 0) | (last >= num_slots))
        if len(bad):
            i = int(bad[0])
            raise TransferError(
                f"{side} {kind.names[0]}: slots {int(slot[i])}..{int(last[i])} of run {i} must be "
                f"in [0, {num_slots}), the registered pages: {at.nbytes} bytes"
            )


def check_layouts(plan: Plan, kind: Kind, names: Iterable[str]) -> None:
    """The caches have the pages that the plan was made for. Raises `TransferError` otherwise."""
    for side, at, layout in (("source", kind.src, plan.src), ("target", kind.dst, plan.dst)):
        chosen = set(names)
        sizes = {g.paging.block_size for g in layout.groups if not chosen.isdisjoint(g.components)}
        records = {id(c.record): c.record for c in layout.spec.components if c.name in chosen}
        for record in records.values():
            if record != at.record or sizes != {at.block_size}:
                raise TransferError(
                    f"the {side} cache has pages of {at.block_size} x {at.record}, "
                    f"the plan says {sorted(sizes)} x {record}"
                )
