"""What executors share: a rank's cache memory, the report of a transfer, and two protocols.

An `Executor` moves a bound plan when both sides are reachable as memory. An `Endpoint` is one
rank's door to ranks in other processes: it exports its cache, connects to the exports of others
and pulls bound plans from them.
"""

from collections.abc import Container, Mapping
from typing import Protocol

import numpy as np
from attrs import frozen

from kvflow.errors import LayoutError, PlanError
from kvflow.kernels.pages import PageView
from kvflow.kernels.region import region_memories
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.memory import MemoryOrder
from kvflow.transfers.lower import BoundPlan, PageGeometry
from kvflow.transfers.plan import Plan


@frozen(eq=False)
class RankCache:
    """The memory of one rank's KV cache: a `PageView` for each component of its layout."""

    rank: int
    pages: Mapping[str, PageView]

    @classmethod
    def allocate(
        cls, layout: KVLayout, rank: int, num_blocks: Mapping[str, int], fill: int = 0
    ) -> "RankCache":
        """One region for each component that the rank holds, filled with a byte. `num_blocks` is
        by group. Raises `LayoutError` for a group without blocks."""
        shapes = []
        for group in layout.groups:
            n, size = num_blocks[group.name], group.paging.block_size
            if n < 1:
                raise LayoutError(f"group {group.name!r} gets {n} blocks, must be at least 1")
            for name in group.components:
                if layout.head_shard_of(name, rank) is None:
                    continue
                record = layout.local_record(name, rank)
                shapes.append((name, record, size, record.page_pitch(size), n))
        memories = region_memories([n * page for *_, page, n in shapes], fill)
        pages = {
            name: PageView(memory, record, size, page)
            for (name, record, size, page, _), memory in zip(shapes, memories, strict=True)
        }
        return cls(rank, pages)

    @classmethod
    def on(cls, order: MemoryOrder, fill: int = 0) -> "RankCache":
        """The regions of a memory order, each filled with a byte, and the pages of
        every component where the order says."""
        memories = region_memories([region.nbytes for region in order.regions], fill)
        memory = {region.name: at for region, at in zip(order.regions, memories, strict=True)}
        return cls(
            order.rank,
            {
                pages.component: PageView(
                    memory[pages.region],
                    order.record(pages.component),
                    order.block_size(pages.component),
                    pages.block_stride,
                    pages.base,
                    pages.num_blocks,
                )
                for pages in order.pages
            },
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all regions, one that components share counted once."""
        regions = {v.memory.data_ptr(): v.memory.numel() for v in self.pages.values()}
        return sum(regions.values())

    def geometries(self) -> dict[str, PageGeometry]:
        """Addresses of the pages in this process, by component."""
        return {
            name: PageGeometry(
                view.record,
                view.block_size,
                view.memory.data_ptr() + view.offset,
                view.block_stride,
                view.num_blocks,
            )
            for name, view in self.pages.items()
        }


@frozen
class TransferReport:
    """What one pull did. `nbytes` is payload written at the target, `num_descriptors` what the
    transport was given, `num_parts` into how many parts a staging area split the payload (0 if
    none was used), `verified` None if nobody compared digests of the payload."""

    plan_digest: str
    nbytes: int
    num_descriptors: int
    num_links: int
    strategies: tuple[str, ...]
    seconds: float
    verified: bool | None = None
    num_parts: int = 0


def require_caches(bound: BoundPlan, sources: Container[int], targets: Container[int]) -> None:
    """Raises `PlanError` naming the first rank that the plan reads or writes and that has no
    cache."""
    for _, rank in bound.plan.local_links:
        if rank not in targets:
            raise PlanError(f"the plan needs target rank {rank}, which has no cache here")
    for src_rank, dst_rank in bound.plan.links:
        for side, rank, caches in (("source", src_rank, sources), ("target", dst_rank, targets)):
            if rank not in caches:
                raise PlanError(f"the plan needs {side} rank {rank}, which has no cache here")


def check_caches(
    bound: BoundPlan, sources: Mapping[int, RankCache], targets: Mapping[int, RankCache]
) -> None:
    """Raises `PlanError` unless every rank that the plan reads or writes has a cache of its own,
    with pages of each component of the record, as large and as many as layout and binding say."""
    require_caches(bound, sources, targets)
    check_pages_of(bound.plan, bound.src, bound.dst, sources, targets)


def check_pages_of(
    plan: Plan,
    src: Binding,
    dst: Binding,
    sources: Mapping[int, RankCache],
    targets: Mapping[int, RankCache],
) -> None:
    """`check_pages` of the ranks that the plan reads or writes, as far as they have a cache."""
    for part in plan.parts:
        for side, binding, group, caches, ranks in (
            ("source", src, part.src_group, sources, part.runs.src_rank),
            ("target", dst, part.dst_group, targets, part.runs.dst_rank),
            ("target", dst, part.dst_group, targets, part.copies.dst_rank),
        ):
            for rank in map(int, np.unique(ranks)):
                for name in part.components if rank in caches else ():
                    check_pages(caches[rank], binding, group, name, f"{side} rank {rank}", rank)


def check_pages(
    cache: RankCache, binding: Binding, group: str, component: str, whose: str, rank: int
) -> None:
    """Raises `PlanError` unless a cache is that of the rank and has the pages of a component that
    the binding is of: of the rank's record, the size of the group's, and enough of them."""
    if cache.rank != rank:
        raise PlanError(f"the cache of {whose} is that of rank {cache.rank}")
    view, need = cache.pages.get(component), binding.num_blocks[group]
    if view is None or view.num_blocks < need:
        raise PlanError(
            f"{component} has {view.num_blocks if view else 0} blocks in the cache of {whose}, the "
            f"binding needs {need}"
        )
    check_form(view, binding.layout, component, whose, rank)


def check_form(view: PageView, layout: KVLayout, component: str, whose: str, rank: int) -> None:
    """Raises `PlanError` unless pages are those of a component of the layout: of the rank's record
    and the size of the group's."""
    size = layout.group_of(component).paging.block_size
    if view.block_size != size:
        raise PlanError(
            f"{component} has pages of {view.block_size} in the cache of {whose}, the layout's "
            f"have {size}"
        )
    record = layout.local_records.get(rank, {}).get(component)
    if view.record is not record and view.record != record:
        raise PlanError(
            f"{component} has records {view.record} in the cache of {whose}, the layout's are "
            f"{record}"
        )


class Executor(Protocol):
    """Carries out bound plans between caches of this process."""

    def execute(
        self,
        bound: BoundPlan,
        sources: Mapping[int, RankCache],
        targets: Mapping[int, RankCache],
    ) -> None:
        """Moves every byte of the plan; caches are by rank. Targets change nowhere else. Raises
        `PlanError` before anything moves for a rank of the plan without a cache, or if a byte that
        is read would be written."""
        ...


class Endpoint(Protocol):
    """One rank's door to other processes."""

    @property
    def name(self) -> str:
        """Unique among all processes and restarts."""
        ...

    def export(self) -> bytes:
        """Sealed description of this rank's cache, for `connect` on another endpoint."""
        ...

    def connect(self, blob: bytes) -> str:
        """Makes a peer reachable; returns its name. Raises `TransferError` for a bad seal."""
        ...

    def pull(
        self,
        bound: BoundPlan,
        dst_rank: int,
        peers: Mapping[int, str],
        *,
        timeout: float,
        verify: bool = False,
    ) -> TransferReport:
        """Blocks until every byte that the plan gives to `dst_rank` (this endpoint's cache) is
        here; `peers` names the endpoint of each source rank. A plan without tokens completes at
        once. With `verify`, payload digests of both sides are compared. Raises `TransferError`:
        then the target's blocks hold nothing provable and must stay quarantined until `quiesced`.
        """
        ...

    def quiesced(self) -> bool:
        """True once no write of an earlier failed pull can still arrive."""
        ...

    def close(self) -> None:
        """Ends service and frees what was registered."""
        ...


class Pusher(Protocol):
    """An endpoint that can also write into the caches of its peers."""

    def push(
        self,
        bound: BoundPlan,
        src_rank: int,
        peers: Mapping[int, str],
        *,
        timeout: float,
        verify: bool = False,
    ) -> TransferReport:
        """Blocks until every byte that the plan takes from `src_rank` (this endpoint's cache) is
        at its targets; `peers` names the endpoint of each target rank. A plan without tokens
        completes at once. The targets are told by whoever runs the transfer: a target rank is
        complete when all source ranks of the plan have returned. Raises `TransferError`: then the
        targets' blocks must stay quarantined until this endpoint has `quiesced`."""
        ...


class TwoWayEndpoint(Endpoint, Pusher, Protocol):
    """An endpoint that pulls and pushes."""
