"""PagedStep: the KV cache of one rank during one forward pass.

New rows are all-gathered and written to the slots this rank owns. Where the cache is sharded,
each component's cached context is gathered into a workspace that lives until it is released;
where the rank holds everything, rows are read from its own pages.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.memory import StepRequest
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, kernel_slots, slots_of
from kvflow.layouts.sharding import Replicated
from kvflow.models.kvstep import IndexQueries
from kvflow.models.reading import attend_by_reading, topk_by_reading
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.collective import GatherSchedule, gather_schedule
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


@frozen(eq=False)
class _GroupSlots:
    """Slots of one block-table group in this step: where new rows are written (-1 where another
    rank owns them), where this rank's cached rows lie that others need, and, if it holds every
    token, where each request's context lies."""

    write: Tensor
    send: Tensor
    context: tuple[Tensor, ...]


@define(eq=False)
class PagedMemory:
    """A `KVMemory` of pages; what other ranks hold of a context is gathered step by step."""

    layout: KVLayout
    cache: RankCache
    comm: Comm
    _steps: "list[PagedStep]" = field(init=False, factory=list)
    _workspace_nbytes: int = field(init=False, default=0)

    @property
    def workspace_nbytes(self) -> int:
        held = max((step.workspace_nbytes for step in self._steps), default=0)
        self._workspace_nbytes = max(self._workspace_nbytes, held)
        return self._workspace_nbytes

    def open(self, requests: Sequence[StepRequest], write_only: frozenset[str]) -> "PagedStep":
        _ = self.workspace_nbytes
        step = PagedStep(self.layout, self.cache, self.comm, requests, write_only)
        self._steps = [step]
        return step

    def forget(self, request_id: str) -> None:
        """Nothing is kept besides blocks."""


@define(eq=False)
class PagedStep:
    """Implements the models' `KVStep`. All ranks build it from the same requests."""

    layout: KVLayout
    cache: RankCache
    comm: Comm
    requests: Sequence[StepRequest]
    write_only: frozenset[str] = frozenset()
    """Components that nobody reads in this step: their context is not gathered."""
    workspace_nbytes: int = field(init=False, default=0)
    """The largest workspace this step held, in bytes."""
    _new: GatherSchedule = field(init=False)
    _cached: GatherSchedule | None = field(init=False)
    _slots: dict[str, _GroupSlots] = field(init=False)
    _workspaces: dict[str, list[Tensor]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        size, placement = self.comm.size, self.layout.placement
        fresh = [self._dense_plan(r.queries, r.start, r.stop) for r in self.requests]
        self._new = gather_schedule(fresh, size)
        self._cached = None
        if placement.sharding.num_shards > 1:
            cached = [self._dense_plan(placement, 0, r.start) for r in self.requests]
            self._cached = gather_schedule(cached, size)
        self._slots = {g.name: self._group_slots(g) for g in self.layout.groups}

    def _dense_plan(self, placement: Placement, start: int, stop: int) -> Plan:
        """How [start, stop) gets from the ranks of a placement into one dense target."""
        spec, capacity = self.layout.spec, Dense(max(stop, 1))
        src = KVLayout.uniform(spec, placement, capacity)
        dst = KVLayout.uniform(spec, Placement.simple(Replicated(start)), capacity)
        return plan_transfer(src, dst, (start, stop))

    def _group_slots(self, group: CacheGroup) -> _GroupSlots:
        placement, paging, rank = self.layout.placement, group.paging, self.cache.rank
        write, send, context = [], np.empty(0, np.int64), []
        for r in self.requests:
            table, new = r.tables[group.name], np.arange(r.start, r.stop)
            write.append(kernel_slots(placement, paging, table, new, rank))
            if self._cached is None:
                everything = np.arange(r.stop)
                context.append(
                    torch.from_numpy(kernel_slots(placement, paging, table, everything, rank))
                )
        if self._cached is not None:
            request, local = self._cached.send[self.comm.rank]
            send = np.empty_like(local)
            for i, r in enumerate(self.requests):
                mine = request == i
                send[mine] = slots_of(paging, r.tables[group.name], local[mine])
        joined = np.concatenate(write) if write else np.empty(0, np.int64)
        return _GroupSlots(torch.from_numpy(joined), torch.from_numpy(send), tuple(context))

    def publish(self, component: str, rows: Tensor) -> None:
        """Stores new packed rows uint8 [n_local, nbytes] of this rank. A collective."""
        slots = self._slots[self.layout.group_of(component).name]
        pages, nbytes = self.cache.pages[component], rows.shape[1]
        keep = self._cached is not None and component not in self.write_only
        spaces = [
            torch.empty((r.stop if keep else r.stop - r.start, nbytes), dtype=torch.uint8)
            for r in self.requests
        ]
        new = [
            space[r.start :] if keep else space
            for space, r in zip(spaces, self.requests, strict=True)
        ]
        self._new.gather(self.comm, rows, new)
        scatter_rows(pages, slots.write, torch.cat(new) if new else rows)
        if keep:
            assert self._cached is not None
            cached = [s[: r.start] for s, r in zip(spaces, self.requests, strict=True)]
            self._cached.gather(self.comm, gather_rows(pages, slots.send), cached)
            self._workspaces[component] = spaces
            held = sum(s.numel() for group in self._workspaces.values() for s in group)
            self.workspace_nbytes = max(self.workspace_nbytes, held)

    @property
    def max_context_len(self) -> int:
        return max((r.stop for r in self.requests), default=0)

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        record = self.layout.spec[component].record
        return topk_by_reading(record, partial(self._rows, component), queries, segments)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        record = self.layout.spec[component].record
        return attend_by_reading(record, partial(self._rows, component), queries, selection)

    def _rows(self, component: str, request_idx: int, positions: Tensor | None) -> Tensor:
        """Packed rows uint8 [m, nbytes] at positions int64 [m], or of the whole context."""
        if component in self._workspaces:
            space = self._workspaces[component][request_idx]
            return space if positions is None else space.index_select(0, positions)
        slots = self._slots[self.layout.group_of(component).name].context[request_idx]
        wanted = slots if positions is None else slots[positions]
        return gather_rows(self.cache.pages[component], wanted)

    def release(self, component: str) -> None:
        """Frees the component's workspace."""
        self._workspaces.pop(component, None)
