"""LatentPool: one rank's latent rows, all on the host and some on the device, and what moves them.

Everything that touches host memory is in this module and happens inside `host_access`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from attrs import define, field
from torch import Tensor

from kvflow.engine.hisparse.sizes import (
    INDEXER,
    LATENT,
    HiSparseBytes,
    HiSparseSizes,
    block_size_of,
    latent_pool_layout,
)
from kvflow.kernels.pages import PageView
from kvflow.kernels.region import region_memory
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.memory import layer_outermost
from kvflow.layouts.spec import KVCacheSpec
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.operators.hotfetch import FetchReport, HotFetch, Misses, index_groups

Allocate = Callable[[int], Tensor]
"""Bytes -> uint8 [bytes], zeros."""


def zeros(nbytes: int) -> Tensor:
    """Memory of this process."""
    return region_memory(nbytes)


@define(eq=False)
class LatentPool:
    """`cache` is what transfers see: latent pages on the host, index pages on the device. `device`
    holds the latent rows that attention reads. One allocation each: host pages, index pages, pool.

    Slots of the pool: first the tail pages of all requests, then their hot rows."""

    layout: KVLayout
    rank: int
    num_blocks: Mapping[str, int]
    sizes: HiSparseSizes
    allocate_host: Allocate = zeros
    allocate_device: Allocate = zeros
    host_access: Callable[[], AbstractContextManager[object]] = nullcontext
    nbytes: HiSparseBytes = field(init=False)
    cache: RankCache = field(init=False)
    device: RankCache = field(init=False)
    groups: tuple[tuple[str, ...], ...] = field(init=False)
    counters: dict[str, float] = field(init=False)
    _fetches: dict[tuple[str, ...], HotFetch] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.nbytes = HiSparseBytes.of(self.layout, self.num_blocks, self.sizes)
        self.groups = index_groups(self.layout.spec)
        pool = latent_pool_layout(self.layout)
        rows = {LATENT: self.num_tail_slots + self.sizes.max_requests * self.sizes.hot_rows}
        self.device = RankCache(self.rank, self._views(pool, rows, LATENT, self.allocate_device))
        pages = self._views(self.layout, self.num_blocks, LATENT, self.allocate_host)
        if INDEXER in self.num_blocks:
            pages |= self._views(self.layout, self.num_blocks, INDEXER, self.allocate_device)
        self.cache = RankCache(self.rank, pages)
        parts = {part for g in self.groups for part in (g, *((name,) for name in g))}
        self._fetches = {part: HotFetch(self.layout, pool, part) for part in parts}
        self.counters = dict.fromkeys(
            ("fetched_rows", "fetched_nbytes", "mirrored_rows", "mirrored_nbytes"), 0.0
        )

    def _views(
        self, layout: KVLayout, num_blocks: Mapping[str, int], group: str, allocate: Allocate
    ) -> dict[str, PageView]:
        """All pages of a group in one allocation, one component behind the other."""
        names = layout.group(group).components
        spec = KVCacheSpec([layout.spec[name] for name in names], layout.spec.content)
        alone = KVLayout(spec, layout.placement, (layout.group(group),))
        order = layer_outermost(alone, self.rank, num_blocks, region=group)
        memory, size = allocate(order.nbytes), alone.group(group).paging.block_size
        return {
            p.component: PageView(
                memory, order.record(p.component), size, p.block_stride, p.base, p.num_blocks
            )
            for p in order.pages
        }

    @property
    def num_tail_slots(self) -> int:
        sizes = self.sizes
        return sizes.max_requests * sizes.tail_pages * block_size_of(self.layout)

    def fetch(self, components: tuple[str, ...], misses: Sequence[Misses]) -> None:
        """Rows of the host into slots of the pool, of some or all layers of an index group."""
        if any(len(m.positions) for m in misses):
            with self.host_access():
                report = self._fetches[components].execute(misses, self.cache, self.device)
            self._count("fetched", report)

    def mirror(self, components: tuple[str, ...], rows: Sequence[Misses]) -> None:
        """The way back, of all layers of an index group."""
        if any(len(r.positions) for r in rows):
            with self.host_access():
                report = self._fetches[components].mirror(rows, self.cache, self.device)
            self._count("mirrored", report)

    def _count(self, what: str, report: FetchReport) -> None:
        self.counters[f"{what}_rows"] += report.num_rows
        self.counters[f"{what}_nbytes"] += report.nbytes

    def write(self, component: str, slots: Tensor, rows: Tensor) -> None:
        """New rows into slots of the pool."""
        scatter_rows(self.device.pages[component], slots, rows)

    def write_through(self, component: str, host_slots: Tensor, rows: Tensor) -> None:
        """New rows for which the device has no tail page: into the host's pages."""
        if len(rows):
            with self.host_access():
                scatter_rows(self.cache.pages[component], host_slots, rows)
            self.counters["mirrored_rows"] += len(rows)
            self.counters["mirrored_nbytes"] += rows.numel()

    def read(self, component: str, slots: Tensor) -> Tensor:
        """Packed rows uint8 [n, nbytes] of slots of the pool."""
        return gather_rows(self.device.pages[component], slots)

    def copy_block(self, group: str, source: int, target: int) -> None:
        """The whole page of a block, of every component of the group, into that of another."""
        for name in self.layout.group(group).components:
            view = self.cache.pages[name]
            old, new = (
                torch.arange(block * view.block_size, (block + 1) * view.block_size)
                for block in (source, target)
            )
            with self.host_access():
                scatter_rows(view, new, gather_rows(view, old))
