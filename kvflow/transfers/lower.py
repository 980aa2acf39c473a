"""Lowering: a plan plus bindings -> slots, and slots plus page geometry -> byte descriptors."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, fields, frozen

from kvflow.errors import PlanError
from kvflow.layouts.counts import each_of
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.memory import pages_are_apart
from kvflow.layouts.paging import bytes_of_slots, in_page, page_of, slots_of
from kvflow.layouts.pieces import Heads, Piece, glued, refine
from kvflow.layouts.record import CACHED_PAGES, Record
from kvflow.layouts.sharding import Ints
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns
from kvflow.transfers.verify import verify_plan


@frozen(eq=False)
class SlotRuns:
    """Runs in slots of one link: ``src + k*src_stride`` -> ``dst + k*dst_stride`` for
    k < ``count``. Neither side leaves its page. int64 columns of equal length. What moves of a
    slot are the heads `src_heads` of those that the source rank stores, to `dst_heads` of those
    that the target rank stores; None is all of them."""

    src: Ints
    src_stride: Ints
    dst: Ints
    dst_stride: Ints
    count: Ints
    src_heads: Heads | None = None
    dst_heads: Heads | None = None

    def __len__(self) -> int:
        return len(self.count)

    @property
    def num_tokens(self) -> int:
        return int(self.count.sum())

    def expand(self) -> tuple[Ints, Ints]:
        """Source and target slot of every token, in the order of the runs."""
        which, nth = each_of(self.count)
        return (
            self.src[which] + nth * self.src_stride[which],
            self.dst[which] + nth * self.dst_stride[which],
        )

    def are_whole(self, block_size: int) -> npt.NDArray[np.bool_]:
        """Which runs are one whole block of `block_size` on both sides, all heads included."""
        if self.src_heads or self.dst_heads:
            return np.zeros(len(self), np.bool_)
        whole: npt.NDArray[np.bool_] = (
            (self.count == block_size)
            & (self.src_stride == 1)
            & (self.dst_stride == 1)
            & (in_page(self.src, block_size) == 0)
            & (in_page(self.dst, block_size) == 0)
        )
        return whole

    def whole_blocks(self, src_block_size: int, dst_block_size: int) -> tuple[Ints, Ints] | None:
        """Source and target block ids if every run is one whole block on both sides, else None.
        A whole page moves in one piece whatever its arrangement."""
        size = src_block_size
        if size != dst_block_size or not self.are_whole(size).all():
            return None
        return page_of(self.src, size), page_of(self.dst, size)


@frozen(eq=False)
class BoundPlan:
    """A verified plan of one request: bindings attached, ready to be moved."""

    plan: Plan
    src: Binding
    dst: Binding

    def __attrs_post_init__(self) -> None:
        for side, binding in (("source", self.src), ("target", self.dst)):
            if not isinstance(binding, Binding):
                raise PlanError(f"the {side} binding is {binding!r}, must be a Binding")
        verify_plan(self.plan, self.src, self.dst)

    def link(self, part: PlanPart, src_rank: int, dst_rank: int) -> SlotRuns:
        """The runs of a part between two ranks, in slots, ordered by target local index."""
        return self._bind(part, part.runs, src_rank, dst_rank)

    def links_to(self, dst_rank: int) -> Iterator[tuple[PlanPart, int, SlotRuns]]:
        """Every (part, source rank, runs) that writes to `dst_rank` over a link."""
        for part in self.plan.parts:
            for src_rank in np.unique(part.runs.src_rank[part.runs.dst_rank == dst_rank]):
                yield part, int(src_rank), self.link(part, int(src_rank), dst_rank)

    def links_from(self, src_rank: int) -> Iterator[tuple[PlanPart, int, SlotRuns]]:
        """Every (part, target rank, runs) that reads from `src_rank` over a link."""
        for part in self.plan.parts:
            for dst_rank in np.unique(part.runs.dst_rank[part.runs.src_rank == src_rank]):
                yield part, int(dst_rank), self.link(part, src_rank, int(dst_rank))

    def copies_to(self, dst_rank: int) -> Iterator[tuple[PlanPart, int, SlotRuns]]:
        """The second stage, once all links have ended: every (part, target rank that has received
        the tokens, runs) that `dst_rank` copies from a neighbour on its host."""
        for part in self.plan.parts:
            for rank in np.unique(part.copies.src_rank[part.copies.dst_rank == dst_rank]):
                yield part, int(rank), self._bind(part, part.copies, int(rank), dst_rank)

    def _bind(self, part: PlanPart, runs: TransferRuns, src_rank: int, dst_rank: int) -> SlotRuns:
        link = runs.take((runs.src_rank == src_rank) & (runs.dst_rank == dst_rank))
        src, group = (self.src, part.src_group) if runs is part.runs else (self.dst, part.dst_group)
        return SlotRuns(
            _slots(src, group, link.src_local),
            link.src_stride,
            _slots(self.dst, part.dst_group, link.dst_local),
            link.dst_stride,
            link.count,
            _local_heads(src.layout, part, src_rank),
            _local_heads(self.dst.layout, part, dst_rank),
        )


def _local_heads(layout: KVLayout, part: PlanPart, rank: int) -> Heads | None:
    """The heads of a part, counted from the first one that the rank stores."""
    shard = layout.head_shard_of(part.components[0], rank)
    if shard is None or shard.heads == part.heads:
        return None
    return part.heads[0] - shard.heads[0], part.heads[1] - shard.heads[0]


def _slots(binding: Binding, group: str, local: Ints) -> Ints:
    return slots_of(binding.layout.group(group).paging, binding.tables[group], local)


@frozen
class PageGeometry:
    """Where the pages of one component on one rank lie: page b begins at
    ``base + b*block_stride`` (bytes), for b < ``num_blocks``."""

    record: Record
    block_size: int
    base: int
    block_stride: int
    num_blocks: int

    def __attrs_post_init__(self) -> None:
        if not pages_are_apart(self.record, self.block_size, self.block_stride, self.num_blocks):
            page = self.record.page_extent(self.block_size)
            raise PlanError(f"block_stride {self.block_stride} is below the page's {page} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes from the first page's first byte to the last page's last."""
        page = self.record.page_extent(self.block_size)
        return (self.num_blocks - 1) * self.block_stride + page if self.num_blocks else 0

    def address(self, slot: Ints, piece: Piece) -> Ints:
        """Byte address of a piece of each slot: exact in int64."""
        return self.base + bytes_of_slots(slot, self.block_size, self.block_stride, piece)


@frozen(eq=False)
class Descriptors:
    """Byte ranges to copy: ``nbytes[i]`` bytes from ``src[i]`` to ``dst[i]`` (addresses)."""

    src: Ints = field()
    dst: Ints = field()
    nbytes: Ints = field()

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())

    def coalesced(self) -> "Descriptors":
        """Neighbours on both sides merged, in target order."""
        order = np.argsort(self.dst, kind="stable")
        src, dst, nbytes = self.src[order], self.dst[order], self.nbytes[order]
        glued = (src[1:] == src[:-1] + nbytes[:-1]) & (dst[1:] == dst[:-1] + nbytes[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~glued])[: len(nbytes)])
        total = np.add.reduceat(nbytes, first) if len(first) else nbytes
        return Descriptors(src[first], dst[first], total)


def descriptors(runs: SlotRuns, src: PageGeometry, dst: PageGeometry) -> Descriptors:
    """Byte descriptors of one component on one link, coalesced: contiguous runs are one each, a
    planar page cut mid-page is one a field, whole neighbouring pages merge."""
    pairs = paired_pieces(src, dst, runs.src_heads, runs.dst_heads)
    parts = [_piece(runs, src, dst, a, b) for a, b in pairs]
    joined = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Descriptors)
    }
    return Descriptors(**joined).coalesced()


def paired_pieces(
    src: PageGeometry,
    dst: PageGeometry,
    src_heads: Heads | None = None,
    dst_heads: Heads | None = None,
) -> list[tuple[Piece, Piece]]:
    """The bytes of a token in some heads of either side (default: all) as pieces that are
    contiguous on both. Raises `PlanError` for records with different fields, or another number of
    heads."""
    return list(
        _paired(src.record, src.block_size, dst.record, dst.block_size, src_heads, dst_heads)
    )


@lru_cache(CACHED_PAGES)
def _paired(
    src: Record,
    src_size: int,
    dst: Record,
    dst_size: int,
    src_heads: Heads | None,
    dst_heads: Heads | None,
) -> tuple[tuple[Piece, Piece], ...]:
    if _stored(src) != _stored(dst):
        raise PlanError(f"records differ: source {src}, target {dst}")
    if src.row_nbytes(src_heads) != dst.row_nbytes(dst_heads):
        raise PlanError(
            f"heads {src_heads or 'all'} of {src} do not pair with "
            f"heads {dst_heads or 'all'} of {dst}"
        )
    pairs = refine(src.pieces(src_size, src_heads), dst.pieces(dst_size, dst_heads))
    joined = _joined(pairs)
    return tuple(pairs if len(joined) == len(pairs) else joined)


def _joined(pairs: Sequence[tuple[Piece, Piece]]) -> list[tuple[Piece, Piece]]:
    """Those that follow each other on both sides as one: neighbours in pages need not be in the
    packed row, as fields of a head before its next head."""
    joined: list[tuple[Piece, Piece]] = []
    ordered = iter(sorted(pairs, key=_source_offset))
    here, there = next(ordered)
    for a, b in ordered:
        if glued(here, a) and glued(there, b):
            nbytes = here.nbytes + a.nbytes
            here, there = evolve(here, nbytes=nbytes), evolve(there, nbytes=nbytes)
        else:
            joined.append((here, there))
            here, there = a, b
    return [*joined, (here, there)]


def _source_offset(pair: tuple[Piece, Piece]) -> int:
    source, _ = pair
    return source.offset


def _stored(record: Record) -> list[tuple[str, str, int]]:
    return [(f.name, f.dtype, f.num_elements) for f in record.fields]


def _piece(runs: SlotRuns, src: PageGeometry, dst: PageGeometry, a: Piece, b: Piece) -> Descriptors:
    even = not (a.tiles or b.tiles)
    src_pitch, dst_pitch = runs.src_stride * a.stride, runs.dst_stride * b.stride
    solid = (src_pitch == a.nbytes) & (dst_pitch == b.nbytes) & even
    which, nth = each_of(np.where(solid, 1, runs.count))
    nbytes = np.where(solid, runs.count * a.nbytes, a.nbytes)
    return Descriptors(
        src.address(runs.src[which] + nth * runs.src_stride[which], a),
        dst.address(runs.dst[which] + nth * runs.dst_stride[which], b),
        nbytes[which],
    )


Geometries = Mapping[str, PageGeometry]
"""Page geometry of one rank's cache, by component name."""
