"""HiSparseShard: a rank's own rows during one step, its latents on the host and some on the device.

Attention reads slots of the device's pool and nothing else; the host is touched when new rows are
written and when rows are missing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.shard import LocalRows
from kvflow.engine.access.shards import ShardQueries
from kvflow.engine.hisparse.reads import Part, Reads
from kvflow.engine.hisparse.request import RequestRows
from kvflow.engine.hisparse.sizes import INDEXER
from kvflow.errors import KvflowError
from kvflow.kernels.codec import decode_latent, latent_rank
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.paging import slots_of
from kvflow.layouts.sharding import Ints
from kvflow.models.partial import Natural, attend_part
from kvflow.models.reading import attend
from kvflow.transfers.operators.merge import PartialAttention

if TYPE_CHECKING:
    from kvflow.engine.hisparse.memory import HiSparseMemory

IndexGroup = tuple[str, ...]
"""Latent components that share a top-k."""


@frozen(eq=False)
class _Writes:
    """Where the new rows of all requests go: which of them to slots of the pool, and which to
    slots of the host."""

    new: Tensor
    slots: Tensor
    through: Tensor
    host_slots: Tensor


@frozen(eq=False)
class _Call:
    """One call of `attend` by the first layer of an index group; the others repeat it."""

    which: ShardQueries
    reads: Reads


@define(eq=False)
class HiSparseShard:
    """Implements `ShardRows` and, by its `attend`, `AttendShard`. `rows` are of the requests of the
    step. Layers of an index group make the same calls in the same order."""

    facts: StepFacts
    memory: "HiSparseMemory"
    rows: Sequence[RequestRows]
    _writes: dict[IndexGroup, _Writes] = field(init=False, factory=dict)
    _calls: dict[IndexGroup, list[_Call]] = field(init=False, factory=dict)
    _next: dict[str, int] = field(init=False, factory=dict)
    _index_slots: dict[int, Tensor] = field(init=False, factory=dict)

    # --- writing

    def write(self, component: str, rows: LocalRows, packed: Tensor) -> None:
        """The new rows uint8 ``[n, nbytes]`` of the step that this rank owns."""
        pool = self.memory.pool
        if pool.layout.spec[component].kind == "indexer":
            scatter_rows(pool.cache.pages[component], self._slots(rows), packed)
            return
        group = self.memory.group_of(component)
        if group not in self._writes:
            self._writes[group] = self._advance(group)
        to = self._writes[group]
        pool.write(component, to.slots, packed[to.new])
        pool.write_through(component, to.host_slots, packed[to.through])

    def _advance(self, group: IndexGroup) -> _Writes:
        columns: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in range(4)]
        before = 0
        for request, held in zip(self.facts.requests, self.rows, strict=True):
            w = held.advance(group, request.start, request.stop)
            parts = (w.new + before, w.slots, w.through + before, w.host_slots)
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
            before += len(w.new) + len(w.through)
        return _Writes(*(torch.from_numpy(np.concatenate(column)) for column in columns))

    # --- reading

    def read(self, component: str, rows: LocalRows) -> Tensor:
        """Packed index keys uint8 ``[n, nbytes]``. Raises `KvflowError` for latents, which are
        read where they are attended to."""
        if self.memory.layout.spec[component].kind != "indexer":
            raise KvflowError(f"{component} lies on the host: queries go to it, rows stay")
        return gather_rows(self.memory.cache.pages[component], self._slots(rows))

    def _slots(self, rows: LocalRows) -> Tensor:
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *(self._context(i)[torch.from_numpy(at)] for i, at in rows)])

    def _context(self, request: int) -> Tensor:
        """Slots of all index keys of a request that this rank holds."""
        if request not in self._index_slots:
            held = np.arange(self.facts.local_len(request, self.facts.shard))
            paging = self.memory.layout.group(INDEXER).paging
            table = self.rows[request].binding.tables[INDEXER]
            self._index_slots[request] = torch.from_numpy(slots_of(paging, table, held))
        return self._index_slots[request]

    # --- attending

    def attend_all(self, component: str, queries: Tensor, which: ShardQueries) -> Tensor:
        """Attention of queries that find all their rows here: ``[m, h, R]``, bit by bit that of
        `kvflow.models.reading`."""
        record = self.memory.layout.spec[component].record
        rank = latent_rank(record)
        out = queries.new_zeros(*queries.shape[:2], rank)
        reads = self._reads(component, which, alone=True)
        for part, groups in zip(reads.parts, reads.groups, strict=True):
            table = decode_latent(record, self._fetched(component, reads, part), queries.dtype)
            out[part.queries] = attend(queries, table, groups, rank)[part.queries]
        reads.unread.discard(component)
        return out

    def attend(
        self, component: str, queries: Tensor, which: ShardQueries, *, alone: bool = False
    ) -> Natural:
        """Partial attention over the rows here, as `AttendShard`. `alone`: no further call of this
        layer follows in this step."""
        record = self.memory.layout.spec[component].record
        out = queries.new_zeros(*queries.shape[:2], latent_rank(record))
        lse = queries.new_full(queries.shape[:2], -torch.inf)
        reads = self._reads(component, which, alone)
        for part in reads.parts:
            packed = self._fetched(component, reads, part)
            asked = queries.index_select(0, part.queries)
            found = attend_part(record, packed, asked, part.index, part.counts, part.topk)
            out[part.queries], lse[part.queries] = found.out, found.lse
        reads.unread.discard(component)
        return PartialAttention(out, lse, "e")

    def _fetched(self, component: str, reads: Reads, part: Part) -> Tensor:
        """Packed rows of the part's slots, which hold what they should from now on."""
        pool = self.memory.pool
        if not reads.together:
            pool.fetch((component,), part.misses)
        elif reads.is_untouched:
            pool.fetch(reads.group, part.misses)
        return pool.read(component, part.slots)

    def _reads(self, component: str, which: ShardQueries, alone: bool) -> Reads:
        """What a call reads, planned by the first layer of the index group that makes it."""
        group = self.memory.group_of(component)
        if group not in self._writes:
            raise KvflowError(f"{component} is attended to before its new rows are published")
        calls, n = self._calls.setdefault(group, []), self._next.get(component, 0)
        self._next[component] = n + 1
        if n == len(calls):
            reads = self.memory.plan_reads(which, self.rows, group, alone=alone and n == 0)
            calls.append(_Call(which, reads))
        elif not _same(which, calls[n].which):
            raise KvflowError(f"{component} attends to other rows than the layers it shares with")
        return calls[n].reads


def _same(a: ShardQueries, b: ShardQueries) -> bool:
    if a is b:
        return True
    pairs = ((a.request, b.request), (a.counts, b.counts), (a.local, b.local))
    return a.topk == b.topk and all(np.array_equal(x, y) for x, y in pairs)
