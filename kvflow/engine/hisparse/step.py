"""HiSparseStep: the KV cache of one rank during one forward pass, its latents on the host."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.engine.hisparse.reads import Part, Reads, ShardQueries
from kvflow.engine.hisparse.request import RequestRows
from kvflow.engine.hisparse.sizes import INDEXER
from kvflow.engine.memory import StepRequest
from kvflow.errors import KvflowError
from kvflow.kernels.codec import decode_latent, latent_rank
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.models.kvstep import IndexQueries
from kvflow.models.reading import attend, topk_by_reading
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection

if TYPE_CHECKING:
    from kvflow.engine.hisparse.memory import HiSparseMemory


@frozen(eq=False)
class _Writes:
    """Where the new rows of all requests go: rows of the step and slots, of pool and host."""

    new: Tensor
    slots: Tensor
    through: Tensor
    host_slots: Tensor


@define(eq=False)
class HiSparseStep:
    """Implements the models' `KVStep`. Attention reads slots of the device's pool and nothing
    else; the host is touched when new rows are published and when rows are missing."""

    memory: "HiSparseMemory"
    requests: Sequence[StepRequest]
    rows: Sequence[RequestRows]
    _writes: dict[tuple[str, ...], _Writes] = field(init=False, factory=dict)
    _planned: dict[tuple[str, ...], tuple[Selection, Reads]] = field(init=False, factory=dict)
    _index_slots: tuple[Tensor, ...] = field(init=False, default=())

    def __attrs_post_init__(self) -> None:
        if INDEXER in self.memory.pool.num_blocks:
            rank = self.memory.pool.rank
            self._index_slots = tuple(
                torch.from_numpy(held.binding.slots(INDEXER, np.arange(r.stop), rank))
                for r, held in zip(self.requests, self.rows, strict=True)
            )

    @property
    def max_context_len(self) -> int:
        return max((r.stop for r in self.requests), default=0)

    def publish(self, component: str, rows: Tensor) -> None:
        """Stores new packed rows uint8 [n, nbytes] of this rank."""
        pool = self.memory.pool
        if pool.layout.spec[component].kind == "indexer":
            new = [s[r.start :] for r, s in zip(self.requests, self._index_slots, strict=True)]
            slots = torch.cat(new) if new else torch.empty(0, dtype=torch.int64)
            scatter_rows(pool.cache.pages[component], slots, rows)
            return
        group = self.memory.group_of(component)
        if group not in self._writes:
            self._writes[group] = self._advance(group)
        to = self._writes[group]
        pool.write(component, to.slots, rows[to.new])
        pool.write_through(component, to.host_slots, rows[to.through])

    def _advance(self, group: tuple[str, ...]) -> _Writes:
        columns: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(4)]
        before = 0
        for r, held in zip(self.requests, self.rows, strict=True):
            w = held.advance(group, r.start, r.stop)
            for column, part in zip(
                columns, (w.new + before, w.slots, w.through + before, w.host_slots), strict=True
            ):
                column.append(part)
            before += r.stop - r.start
        return _Writes(*(torch.from_numpy(np.concatenate(column)) for column in columns))

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        record = self.memory.layout.spec[component].record
        return topk_by_reading(record, partial(self._keys, component), queries, segments)

    def _keys(self, component: str, request_idx: int, positions: Tensor | None) -> Tensor:
        slots = self._index_slots[request_idx]
        wanted = slots if positions is None else slots[positions]
        return gather_rows(self.memory.cache.pages[component], wanted)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        record = self.memory.layout.spec[component].record
        out = queries.new_zeros(*queries.shape[:2], latent_rank(record))
        reads = self._reads(component, selection)
        for part, groups in zip(reads.parts, reads.groups, strict=True):
            table = decode_latent(record, self._fetched(component, reads, part), queries.dtype)
            for group in groups:
                attend(queries, table, group, out)
        reads.unread.remove(component)
        return out

    def _fetched(self, component: str, reads: Reads, part: Part) -> Tensor:
        """Packed rows of the part's slots, which hold what they should from now on."""
        pool = self.memory.pool
        if not reads.together:
            pool.fetch((component,), part.misses)
        elif reads.is_untouched:
            pool.fetch(reads.group, part.misses)
        return pool.read(component, part.slots)

    def _reads(self, component: str, selection: Selection) -> Reads:
        """The reads of a selection, planned by the first layer of its index group."""
        group = self.memory.group_of(component)
        if group not in self._writes:
            raise KvflowError(f"{component} is attended to before its new rows are published")
        planned = self._planned.get(group)
        if planned is None or planned[0] is not selection or component not in planned[1].unread:
            reads = self.memory.plan_reads(self._queries(selection), self.rows, group)
            planned = self._planned[group] = (selection, reads)
        return planned[1]

    def _queries(self, selection: Selection) -> ShardQueries:
        """The same selection by local indices."""
        counts, before = selection.counts.numpy(), 0
        none = np.empty(0, np.int64)
        request, chosen = [none], [none]
        for segment, positions in zip(selection.segments, selection.chosen, strict=True):
            n = len(segment)
            real = np.arange(positions.shape[1]) < counts[before : before + n, None]
            request.append(np.full(n, segment.request_idx))
            chosen.append(positions.numpy()[real])
            before += n
        local = self.memory.layout.placement.sharding.local(np.concatenate(chosen))
        return ShardQueries(np.concatenate(request), counts, local, selection.topk)

    def release(self, component: str) -> None:
        """Nothing is kept for one layer."""
