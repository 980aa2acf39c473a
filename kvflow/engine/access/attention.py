"""What a step does for attention when latent rows lie on several ranks."""

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.ahead import Ahead, Fetch
from kvflow.engine.access.choice import AttentionShape, choose_attention
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.fresh import FreshRows
from kvflow.engine.access.options import AccessOptions, AttentionWay
from kvflow.engine.access.order import LayerOrder
from kvflow.engine.access.shard import ShardRows
from kvflow.engine.access.shards import AttendShard, ShardedAttention
from kvflow.engine.access.union import Union, cut_selection
from kvflow.engine.access.whole import WholeRanges
from kvflow.kernels.codec import latent_rank
from kvflow.models.reading import attend_by_reading
from kvflow.models.selection import Selection


@define(eq=False)
class AttentionRows:
    """Attends in the way that the first layer's shapes decide for the step."""

    facts: StepFacts
    shard: ShardRows
    comm: Comm
    options: AccessOptions
    counters: Counters
    fresh: FreshRows
    ahead: Ahead
    order: LayerOrder
    attend_shard: AttendShard
    shape: AttentionShape | None = field(init=False, default=None)
    way: AttentionWay | None = field(init=False, default=None)
    _selection: Selection | None = field(init=False, default=None)
    _unions: Sequence[Union] = field(init=False, default=())
    _sharded: ShardedAttention | None = field(init=False, default=None)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        """A collective, as `KVStep.attend`."""
        shape, way = self._choose(component, queries, selection)
        if way == "whole":
            return self._whole(component, queries, selection)
        if selection is not self._selection:
            self._selection = selection
            if way == "union":
                self._unions = self._agree(shape, selection)
            else:
                part = shape.query_part(self.options.workspace_tokens, self.facts.num_shards)
                self._sharded = ShardedAttention.agree(
                    self.comm, self.facts, selection, part, self.attend_shard, self.counters
                )
        if way == "union":
            return self._union(component, queries)
        rank_dim = latent_rank(self.facts.layout.spec[component].record)
        assert self._sharded is not None
        return self._sharded.attend(self.comm, component, queries, rank_dim)

    def limit_nbytes(self) -> int:
        """What its workspaces take at most: 0 before the first layer."""
        if self.shape is None:
            return 0
        tokens, shape = self.options.workspace_tokens, self.shape
        if self.way == "queries":
            part = shape.query_part(tokens, self.facts.num_shards)
            return part * shape.query_workspace_nbytes(self.facts.num_shards)
        return self.ahead.depth * max(tokens, shape.topk) * shape.row_nbytes

    def _choose(
        self, component: str, queries: Tensor, selection: Selection
    ) -> tuple[AttentionShape, AttentionWay]:
        if self.shape is None or self.way is None:
            record = self.facts.layout.spec[component].record
            heads, size = queries.shape[1], queries.element_size()
            self.shape = AttentionShape(
                record.nbytes,
                heads * queries.shape[2] * size,
                heads * (latent_rank(record) + 1) * size,
                selection.topk,
                self.order.layers_per_choice,
            )
            asked = None if self.options.attention == "auto" else self.options.attention
            tokens = self.options.workspace_tokens
            self.way = choose_attention(self.shape, self.facts.counts, asked, tokens)
        return self.shape, self.way

    # --- the whole context

    @cached_property
    def _ranges(self) -> WholeRanges:
        ranges = [(i, 0, r.start) for i, r in enumerate(self.facts.requests) if r.start]
        return WholeRanges(self.facts, self.shard, "attention rows", ranges)

    def _whole(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        whole, after = self._ranges, self.order.after(component)
        cached = torch.empty(0)
        if whole.ranges:
            fetch = whole.fetch(component)
            cached = self.ahead.take(fetch, whole.fetch(after) if after else None)

        def read(request: int, positions: Tensor | None) -> Tensor:
            if positions is None:
                positions = torch.arange(self.facts.requests[request].stop)
            return self._context_rows(component, cached, request, positions)

        record = self.facts.layout.spec[component].record
        out = attend_by_reading(record, read, queries, selection)
        if whole.ranges:
            self.ahead.drop(fetch)
        return out

    def _context_rows(
        self, component: str, cached: Tensor, request: int, positions: Tensor
    ) -> Tensor:
        """Rows at any positions, of the cached ones gathered and of the step's own."""
        old = positions < self.facts.requests[request].start
        if not old.any():
            return self.fresh.rows(component, request, positions)
        before = self._ranges.rows_of(cached, request, positions[old])
        if old.all():
            return before
        rows = before.new_empty(len(positions), before.shape[1])
        rows[old], rows[~old] = before, self.fresh.rows(component, request, positions[~old])
        return rows

    # --- the union of what is chosen

    def _agree(self, shape: AttentionShape, selection: Selection) -> list[Union]:
        """A collective for every part."""
        size, num = shape.union_parts(self.facts.counts, self.options.workspace_tokens)
        parts = [cut_selection(selection, i * size, (i + 1) * size) for i in range(num)]
        return [
            Union.agree(self.comm, self.facts, self.shard, i, part, self.counters)
            for i, part in enumerate(parts)
        ]

    def _union(self, component: str, queries: Tensor) -> Tensor:
        rank_dim = latent_rank(self.facts.layout.spec[component].record)
        out = queries.new_zeros(*queries.shape[:2], rank_dim)
        sharing, lo = self.order.sharing(component), 0
        fetches = [union.fetch(component) for union in self._unions]
        upcoming: list[Fetch | None] = [*fetches[1:]]
        upcoming.append(self._unions[0].fetch(sharing) if sharing and fetches else None)
        for union, fetch, soon in zip(self._unions, fetches, upcoming, strict=False):
            hi = lo + len(union.selection.counts)
            cached = self.ahead.take(fetch, soon)
            out[lo:hi] = union.attend(component, queries[lo:hi], cached, self.fresh)
            self.ahead.drop(fetch)
            lo = hi
        return out
