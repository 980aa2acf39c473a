"""Lowering: a plan plus bindings -> slots, and slots plus page geometry -> byte descriptors."""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
from attrs import field, fields, frozen

from kvflow.errors import PlanError
from kvflow.layouts.counts import each_of
from kvflow.layouts.layout import Binding
from kvflow.layouts.paging import bytes_of_slots, in_page, page_of, slots_of
from kvflow.layouts.record import Piece, Record
from kvflow.layouts.sharding import Ints
from kvflow.transfers.plan import Plan, PlanPart
from kvflow.transfers.verify import verify_plan


@frozen(eq=False)
class SlotRuns:
    """Runs in slots of one link: ``src + k*src_stride`` -> ``dst + k*dst_stride`` for
    k < ``count``. Neither side leaves its page. int64 columns of equal length."""

    src: Ints
    src_stride: Ints
    dst: Ints
    dst_stride: Ints
    count: Ints

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
        """Which runs are one whole block of `block_size` on both sides."""
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
        verify_plan(self.plan, self.src, self.dst)

    def link(self, part: PlanPart, src_rank: int, dst_rank: int) -> SlotRuns:
        """The runs of a part between two ranks, in slots, ordered by target local index."""
        runs = part.runs.take((part.runs.src_rank == src_rank) & (part.runs.dst_rank == dst_rank))
        return SlotRuns(
            _slots(self.src, part.src_group, runs.src_local),
            runs.src_stride,
            _slots(self.dst, part.dst_group, runs.dst_local),
            runs.dst_stride,
            runs.count,
        )

    def links_to(self, dst_rank: int) -> Iterator[tuple[PlanPart, int, SlotRuns]]:
        """Every (part, source rank, runs) that writes to `dst_rank`."""
        for part in self.plan.parts:
            for src_rank in np.unique(part.runs.src_rank[part.runs.dst_rank == dst_rank]):
                yield part, int(src_rank), self.link(part, int(src_rank), dst_rank)

    def links_from(self, src_rank: int) -> Iterator[tuple[PlanPart, int, SlotRuns]]:
        """Every (part, target rank, runs) that reads from `src_rank`."""
        for part in self.plan.parts:
            for dst_rank in np.unique(part.runs.dst_rank[part.runs.src_rank == src_rank]):
                yield part, int(dst_rank), self.link(part, src_rank, int(dst_rank))


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
        page = self.record.page_nbytes(self.block_size)
        if self.block_stride < page:
            raise PlanError(f"block_stride {self.block_stride} is below the page's {page} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes from the first page's first byte to the last page's last."""
        page = self.record.page_nbytes(self.block_size)
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
    parts = [_piece(runs, src, dst, a, b) for a, b in paired_pieces(src, dst)]
    joined = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Descriptors)
    }
    return Descriptors(**joined).coalesced()


def paired_pieces(src: PageGeometry, dst: PageGeometry) -> list[tuple[Piece, Piece]]:
    """The bytes of a token as pieces that are contiguous on both sides. Raises `PlanError` for
    records with different fields."""
    if src.record.fields != dst.record.fields:
        raise PlanError(f"records differ: source {src.record}, target {dst.record}")
    alike = src.record.arrangement == dst.record.arrangement
    a, b = (
        side.record.pieces(side.block_size) if alike else side.record.field_pieces(side.block_size)
        for side in (src, dst)
    )
    return list(zip(a, b, strict=True))


def _piece(runs: SlotRuns, src: PageGeometry, dst: PageGeometry, a: Piece, b: Piece) -> Descriptors:
    src_pitch, dst_pitch = runs.src_stride * a.stride, runs.dst_stride * b.stride
    solid = (src_pitch == a.nbytes) & (dst_pitch == b.nbytes)
    num = np.where(solid, 1, runs.count)
    which, nth = each_of(num)
    nbytes = np.where(solid, runs.count * a.nbytes, a.nbytes)
    return Descriptors(
        src.address(runs.src, a)[which] + nth * src_pitch[which],
        dst.address(runs.dst, b)[which] + nth * dst_pitch[which],
        nbytes[which],
    )


Geometries = Mapping[str, PageGeometry]
"""Page geometry of one rank's cache, by component name."""
