"""The torch executor: lowers a link once for all components that look alike, then copies bytes.

On a CPU a link is byte ranges: whole pages and long runs are slices, short rows indexed items. The
links to one target take turns, for ranks that are interleaved write neighbouring rows; components
are dealt to as many threads as torch uses. On a GPU one kernel moves rows from pages to pages.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, product, zip_longest

import numpy as np
import numpy.typing as npt
import torch

from kvflow.errors import PlanError
from kvflow.kernels.lanes import in_lanes
from kvflow.kernels.pages import PageView
from kvflow.kernels.ranges import RangeCopy
from kvflow.kernels.rows import repack_rows
from kvflow.layouts.pieces import Piece
from kvflow.transfers.executors.apart import check_apart
from kvflow.transfers.executors.base import RankCache, check_caches
from kvflow.transfers.lower import (
    BoundPlan,
    Descriptors,
    PageGeometry,
    SlotRuns,
    descriptors,
    paired_pieces,
)
from kvflow.transfers.plan import PlanPart
from kvflow.transfers.slot_cuts import cut_runs, take_runs

MAX_RANGES = 1 << 20
"""Byte ranges that are lowered at a time."""

Pages = Mapping[str, PageView]
Link = tuple[SlotRuns, Pages]
"""What is moved, and the pages of the rank it comes from."""


class StridedExecutor:
    """Moves links between caches of one process, on CPU or one GPU."""

    def execute(
        self,
        bound: BoundPlan,
        sources: Mapping[int, RankCache],
        targets: Mapping[int, RankCache],
    ) -> None:
        check_caches(bound, sources, targets)
        check_apart(bound, sources, targets)
        for dst_rank, target in targets.items():
            for part, links in _by_part(bound.links_to(dst_rank), sources):
                move_links(links, part.components, target.pages)
        for dst_rank, target in targets.items():
            for part, links in _by_part(bound.copies_to(dst_rank), targets):
                move_links(links, part.components, target.pages)


def _by_part(
    moves: Iterable[tuple[PlanPart, int, SlotRuns]], caches: Mapping[int, RankCache]
) -> Iterator[tuple[PlanPart, list[Link]]]:
    """The links of each part."""
    for _, group in groupby(moves, key=lambda move: id(move[0])):
        same = list(group)
        yield same[0][0], [(runs, caches[rank].pages) for _, rank, runs in same]


def move_links(links: Sequence[Link], components: Iterable[str], dst: Pages) -> None:
    """Moves the components of the links to one target; those whose pages look alike are lowered
    together. Raises `PlanError` for a slot that a cache does not have, before a byte of that
    component moves."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in components:
        views = (dst[name], *(src[name] for _, src in links))
        alike.setdefault(tuple(map(_shape, views)), []).append(name)
    for names in alike.values():
        first = names[0]
        for runs, src in links:
            _check_slots(runs, src[first], dst[first])
        if dst[first].memory.device.type == "cpu":
            _move_ranges(links, names, dst)
        else:
            for name, (runs, src) in product(names, links):
                _move_rows(runs, src[name], dst[name])


def move_link(runs: SlotRuns, components: Iterable[str], src: Pages, dst: Pages) -> None:
    """Moves the components of one link."""
    move_links([(runs, src)], components, dst)


def move_runs(runs: SlotRuns, src: PageView, dst: PageView) -> None:
    """Moves one component on one link."""
    move_links([(runs, {"it": src})], ["it"], {"it": dst})


def _shape(view: PageView) -> tuple[object, ...]:
    return view.record, view.block_size, view.block_stride, view.num_blocks, view.memory.device


def _geometry(view: PageView) -> PageGeometry:
    """Of the pages from the view's first byte on."""
    return PageGeometry(view.record, view.block_size, 0, view.block_stride, view.num_blocks)


def _check_slots(runs: SlotRuns, src: PageView, dst: PageView) -> None:
    for side, first, stride, pages in (
        ("source", runs.src, runs.src_stride, src),
        ("target", runs.dst, runs.dst_stride, dst),
    ):
        last = first + (runs.count - 1) * stride
        if len(last) and int(last.max()) >= pages.num_slots:
            raise PlanError(
                f"the plan uses slot {int(last.max())} of a {side} cache of {pages.num_slots}"
            )


def _move_ranges(links: Sequence[Link], names: Sequence[str], dst: Pages) -> None:
    """Components that look alike, from all sources in turns."""
    there, most = dst[names[0]], max(MAX_RANGES // len(links), 1)
    lowered = [
        _ranges(runs, _geometry(src[names[0]]), _geometry(there), most) for runs, src in links
    ]
    for ranges in zip_longest(*lowered):
        prepared = [
            (RangeCopy.of(part), src)
            for part, (_, src) in zip(ranges, links, strict=True)
            if part is not None
        ]
        nbytes = len(names) * sum(int(part.nbytes.sum()) for part in ranges if part is not None)
        in_lanes([partial(_copy_component, prepared, name, dst) for name in names], nbytes)


def _copy_component(prepared: Sequence[tuple[RangeCopy, Pages]], name: str, dst: Pages) -> None:
    """One component, from all sources in turns."""
    target = _from_first_page(dst[name])
    turns = [copy.chunks(_from_first_page(src[name]), target) for copy, src in prepared]
    for _ in zip_longest(*turns):
        pass


def _from_first_page(view: PageView) -> "npt.NDArray[np.uint8]":
    return view.memory.numpy()[view.offset :]


def _ranges(
    runs: SlotRuns, src: PageGeometry, dst: PageGeometry, most: int
) -> Iterator[Descriptors]:
    """The byte ranges of a link, whole pages first, then at most so many at a time."""
    pairs = paired_pieces(src, dst, runs.src_heads, runs.dst_heads)
    if src.record == dst.record and src.block_size == dst.block_size:
        whole = runs.are_whole(src.block_size) & src.record.is_solid(src.block_size)
        if whole.any():
            yield _pages(take_runs(runs, whole), src, dst)
            runs = take_runs(runs, ~whole)
    for part in cut_runs(runs, max(most // len(pairs), 1)):
        yield descriptors(part, src, dst)


def _pages(runs: SlotRuns, src: PageGeometry, dst: PageGeometry) -> Descriptors:
    """Whole pages in one piece each, whatever their arrangement."""
    page = Piece(0, 0, src.record.page_nbytes(src.block_size), 0)
    nbytes = np.full(len(runs), page.nbytes)
    return Descriptors(src.address(runs.src, page), dst.address(runs.dst, page), nbytes).coalesced()


def _move_rows(runs: SlotRuns, src: PageView, dst: PageView) -> None:
    device = src.memory.device
    here, there = (torch.from_numpy(slots).to(device) for slots in runs.expand())
    repack_rows(src, here, dst, there, runs.src_heads, runs.dst_heads)
