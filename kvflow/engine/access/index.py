"""What a step does for the indexer when its keys lie on several ranks."""

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.ahead import Ahead
from kvflow.engine.access.choice import IndexShape, choose_index
from kvflow.engine.access.choosing import Asking, ShardedChoice
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts, cut_ranges
from kvflow.engine.access.fresh import FreshRows
from kvflow.engine.access.options import AccessOptions, IndexWay
from kvflow.engine.access.order import LayerOrder
from kvflow.engine.access.shard import ShardRows
from kvflow.engine.access.whole import WholeRanges
from kvflow.models.candidates import Keys
from kvflow.models.kvstep import IndexQueries
from kvflow.models.segment import Segment


@define(eq=False)
class IndexKeys:
    """Chooses positions in the way that the first indexer's shapes decide for the step."""

    facts: StepFacts
    shard: ShardRows
    comm: Comm
    options: AccessOptions
    counters: Counters
    fresh: FreshRows
    ahead: Ahead
    order: LayerOrder
    shape: IndexShape | None = field(init=False, default=None)
    way: IndexWay | None = field(init=False, default=None)
    _parts: Sequence[WholeRanges] = field(init=False, default=())

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        """A collective, as `KVStep.topk`."""
        shape, way = self._choose(component, queries)
        if way == "keys":
            return self._by_keys(component, queries, segments)
        part = shape.query_part(self.options.workspace_tokens, self.facts.num_shards)
        choice = ShardedChoice(self.facts, self.shard, part, self.counters)
        return choice.topk(self.comm, component, queries, segments)

    def look_ahead(self, latent: str) -> None:
        """Fetches the keys of the next layer's indexer while this layer computes."""
        indexer = self.order.indexer(self.order.after(latent))
        if indexer and self._parts:
            self.ahead.issue_ahead(self._parts[0].fetch(indexer))

    def limit_nbytes(self) -> int:
        """What its workspaces take at most: 0 before the first indexer."""
        if self.shape is None:
            return 0
        tokens, shape = self.options.workspace_tokens, self.shape
        if self.way == "keys":
            return self.ahead.depth * tokens * shape.row_nbytes
        part = shape.query_part(tokens, self.facts.num_shards)
        return part * shape.query_workspace_nbytes(self.facts.num_shards)

    def _choose(self, component: str, queries: IndexQueries) -> tuple[IndexShape, IndexWay]:
        if self.shape is None or self.way is None:
            record, size = self.facts.layout.spec[component].record, queries.queries.element_size()
            heads, dim = queries.queries.shape[1:]
            answer = size + self.facts.index_dtype.itemsize
            self.shape = IndexShape(record.nbytes, heads * (dim + 1) * size, answer, queries.topk)
            asked = None if self.options.index == "auto" else self.options.index
            tokens = self.options.workspace_tokens
            self.way = choose_index(self.shape, self.facts.counts, asked, tokens)
            if self.way == "keys":
                self._parts = self._cut(queries.topk, tokens)
        return self.shape, self.way

    def _cut(self, topk: int, tokens: int) -> list[WholeRanges]:
        """The cached keys that some query may have to score, a workspace full at a time."""
        lengths = [
            (i, r.start) for i, r in enumerate(self.facts.requests) if r.stop > topk and r.start
        ]
        parts = cut_ranges(lengths, tokens)
        return [
            WholeRanges(self.facts, self.shard, "index keys", part, i)
            for i, part in enumerate(parts)
        ]

    def _by_keys(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        asking = Asking(queries, segments)
        asked = {s.request_idx for _, s, _, _ in asking.scored()}
        fetches = [part.fetch(component) for part in self._parts]
        for n, (part, fetch) in enumerate(zip(self._parts, fetches, strict=True)):
            gathered = self.ahead.take(fetch, fetches[n + 1] if n + 1 < len(fetches) else None)
            for i, (request, start, stop) in enumerate(part.ranges):
                if request in asked:
                    packed = part.rows(gathered, i)
                    asking.offer(request, self._keys(component, packed, start, stop, queries))
            self.ahead.drop(fetch)
        for request in sorted(asked):
            r = self.facts.requests[request]
            packed = self.fresh.rows(component, request, torch.arange(r.start, r.stop))
            asking.offer(request, self._keys(component, packed, r.start, r.stop, queries))
        return asking.chosen()

    def _keys(
        self, component: str, packed: Tensor, start: int, stop: int, queries: IndexQueries
    ) -> Keys:
        record = self.facts.layout.spec[component].record
        return Keys.decode(record, packed, torch.arange(start, stop), queries.queries.dtype)
