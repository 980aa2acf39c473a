"""Prepared lists: the pages, or the rows, of components that look alike, described once per peer.

Afterwards a transfer is two int32 index arrays, and NIXL merges neighbours that ascend together.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from kvflow.errors import CapacityError, TransferError
from kvflow.layouts.counts import each_of
from kvflow.layouts.layout import Binding
from kvflow.layouts.pieces import Heads, Piece
from kvflow.layouts.record import Record
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.nixl_agent import LOCAL, Agent, Index
from kvflow.transfers.executors.nixl_wire import Export, geometry_of
from kvflow.transfers.lower import PageGeometry, SlotRuns, paired_pieces
from kvflow.transfers.plan import PlanPart
from kvflow.transfers.slot_cuts import take_runs

WHOLE = 0
"""The grain of lists whose elements are whole pages. Any other grain is a number of tokens: an
element is one piece of as many neighbouring rows."""
_INT32_END = 2**31

Grain = tuple[int, Heads | None, Heads | None]
"""Tokens of an element, and the heads that move of what the source and the target store."""


@frozen(eq=False)
class PreparedLists:
    """A remote and a local list with the same components in the same order. `starts` says at
    which element of (remote, local) each piece of a component begins."""

    remote: Any
    local: Any
    starts: Mapping[str, tuple[tuple[int, int], ...]]

    def indices(self, names: Iterable[str], src: Ints, dst: Ints) -> tuple[Index, Index]:
        """The same elements of several components: piece by piece, in the given order."""
        first = np.array([s for name in names for s in self.starts[name]], np.int64)
        both = (np.add.outer(first[:, i], at).ravel() for i, at in ((0, src), (1, dst)))
        here, there = (np.ascontiguousarray(index, dtype=np.int32) for index in both)
        return here, there


@frozen(eq=False)
class Kind:
    """Components whose pages look alike on both sides: same record, sizes and strides. `src` is
    the peer's side and `dst` ours, relative (base 0)."""

    names: tuple[str, ...]
    src: PageGeometry
    dst: PageGeometry


@define(eq=False)
class Peer:
    """A connected endpoint: what it exported, checked, and the lists prepared for it."""

    export: Export
    geometries: Mapping[str, PageGeometry] = field(init=False)
    _kinds: tuple[Kind, ...] = field(init=False, default=())
    _lists: dict[tuple[str, Kind, Grain], PreparedLists] = field(init=False, factory=dict)
    _pages: dict[str, Any] = field(init=False, factory=dict)

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

    def lists(
        self, agent: Agent, mine: Mapping[str, PageGeometry], kind: Kind, grain: Grain
    ) -> PreparedLists:
        """The lists of a kind in one grain for an agent of ours, prepared at first use."""
        key = (agent.name, kind, grain)
        if key not in self._lists:
            self._lists[key] = self._prepare(agent, mine, kind, grain)
        return self._lists[key]

    def _prepare(
        self, agent: Agent, mine: Mapping[str, PageGeometry], kind: Kind, grain: Grain
    ) -> PreparedLists:
        size, src_heads, dst_heads = grain
        pairs: list[tuple[Piece | None, Piece | None]] = [(None, None)]
        if size != WHOLE:
            pairs = [*paired_pieces(kind.src, kind.dst, src_heads, dst_heads)]
        tables: tuple[list[Ints], list[Ints]] = ([], [])
        length, starts = [0, 0], {}
        for name in kind.names:
            begins = []
            for pair in pairs:
                begins.append((length[0], length[1]))
                for side, at in enumerate((self.geometries[name], mine[name])):
                    piece = pair[side]
                    table = _pages(at) if piece is None else _rows(at, piece, size)
                    tables[side].append(table)
                    length[side] += int(table[:, 4].sum())
            starts[name] = tuple(begins)
        remote, local = (_joined(f"grain {size}", t) for t in tables)
        return PreparedLists(agent.prepare(self.name, remote), agent.prepare(LOCAL, local), starts)

    @cached_property
    def page_starts(self) -> dict[str, int]:
        """At which element of `source_pages` each component begins."""
        ends = np.cumsum([geometry.num_blocks for geometry in self.geometries.values()])
        return dict(zip(self.geometries, (int(e) for e in (0, *ends[:-1])), strict=True))

    def source_pages(self, agent: Agent) -> Any:
        """A list of every page of this peer for an agent of ours, prepared at first use."""
        if agent.name not in self._pages:
            table = _joined("page", [_pages(geometry) for geometry in self.geometries.values()])
            self._pages[agent.name] = agent.prepare(self.name, table)
        return self._pages[agent.name]


def landing_pages(agent: Agent, address: int, capacity: int, page: int) -> Any:
    """A prepared list over staging of ours: element i is its i-th page of `page` bytes."""
    table = np.array([[address, page, 0, page, capacity // page]], np.uint64)
    return agent.prepare(LOCAL, table)


def grains(runs: SlotRuns, src: PageGeometry, dst: PageGeometry) -> list[tuple[int, SlotRuns]]:
    """The runs by the number of tokens that an element of their list may hold: as many as start,
    length and both block sizes are multiples of, if tokens lie together on both sides."""
    pairs = paired_pieces(src, dst, runs.src_heads, runs.dst_heads)
    if any(p.stride != p.nbytes for pair in pairs for p in pair):
        return [(1, runs)]
    size = np.gcd(np.gcd(runs.src, runs.dst), runs.count)
    size = np.gcd(size, np.gcd(src.block_size, dst.block_size))
    size[(runs.src_stride != 1) | (runs.dst_stride != 1)] = 1
    return [(int(n), take_runs(runs, size == n)) for n in np.unique(size)]


def elements(runs: SlotRuns, grain: int) -> tuple[Ints, Ints]:
    """Source and target element, `grain` tokens each, of lists over all slots."""
    which, nth = each_of(runs.count // grain)
    src = runs.src[which] // grain + nth * runs.src_stride[which]
    return src, runs.dst[which] // grain + nth * runs.dst_stride[which]


def _joined(what: str, tables: list[Ints]) -> npt.NDArray[np.uint64]:
    table = np.concatenate(tables)
    if (length := int(table[:, 4].sum())) >= _INT32_END:
        raise CapacityError(f"a {what} list of {length} elements, NIXL indexes below {_INT32_END}")
    return table.astype(np.uint64)


def _pages(at: PageGeometry) -> Ints:
    """One strided row (address, length, device, stride, count) for all pages."""
    page = at.record.page_extent(at.block_size)
    return np.array([[at.base, page, 0, at.block_stride, at.num_blocks]], np.int64)


def _rows(at: PageGeometry, piece: Piece, grain: int) -> Ints:
    """Strided rows for a piece of every `grain` slots: one if the pitch is even, else one a
    page."""
    even = at.block_stride == at.block_size * piece.stride
    num_tables, count = (1, at.num_blocks) if even else (at.num_blocks, 1)
    table = np.zeros((num_tables, 5), np.int64)
    table[:, 0] = at.address(np.arange(num_tables, dtype=np.int64) * at.block_size, piece)
    table[:, 1], table[:, 4] = grain * piece.nbytes, count * at.block_size // grain
    table[:, 3] = max(grain * piece.stride, grain * piece.nbytes)  # one row alone may have 0
    return table


def check_bounds(kind: Kind, runs: SlotRuns, names: tuple[str, str]) -> None:
    """Every slot of the runs lies in the pages of a registered region, on both sides; `names` are
    what to call them. Raises `TransferError` with the offending run."""
    sides = (
        (names[0], kind.src, runs.src, runs.src_stride),
        (names[1], kind.dst, runs.dst, runs.dst_stride),
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


@frozen(eq=False)
class Planned:
    """The pages that a rank has on one side of a bound plan, by component."""

    side: str
    binding: Binding
    _records: Mapping[str, Record] = field(init=False)
    _samples: dict[tuple[str, ...], list[str]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        records = {c.name: c.record for c in self.binding.layout.spec.components}
        object.__setattr__(self, "_records", records)

    def _one_of_each(self, names: tuple[str, ...]) -> list[str]:
        """A component of each record; what links have in common is asked for each of them."""
        if names not in self._samples:
            self._samples[names] = [*{id(self._records[name]): name for name in names}.values()]
        return self._samples[names]

    def check(self, at: PageGeometry, names: tuple[str, ...], rank: int) -> None:
        """The cache has the pages that the plan was made for. Raises `TransferError` otherwise.
        `names` have the same holders."""
        layout = self.binding.layout
        for name in self._one_of_each(names):
            record = layout.local_record(name, rank)
            size = layout.group_of(name).paging.block_size
            if size != at.block_size or record != at.record:
                raise TransferError(
                    f"the {self.side} cache has pages of {at.block_size} x {at.record}, "
                    f"the plan says {size} x {record}"
                )

    def check_blocks(self, at: PageGeometry, part: PlanPart, name: str, rank: int) -> None:
        """The cache has as many pages of a component, one of those of the part that look alike, as
        the binding says, or more. Raises `TransferError` otherwise."""
        group = part.src_group if self.side == "source" else part.dst_group
        need = self.binding.num_blocks[group]
        if at.num_blocks < need:
            raise TransferError(
                f"{name} has {at.num_blocks} blocks in the {self.side} cache of rank {rank}, the "
                f"binding needs {need}"
            )
