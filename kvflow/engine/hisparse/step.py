"""HiSparseStep: the KV cache of one rank during one forward pass, its latents on the host.

Rows never leave the rank that holds them: where a context is dealt to several ranks, queries go to
the rows and partial attention comes back.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm, Inline
from kvflow.engine.access.ahead import Ahead
from kvflow.engine.access.attention import AttentionRows
from kvflow.engine.access.counters import Counters, StepLog
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.fresh import FreshRows
from kvflow.engine.access.index import IndexKeys
from kvflow.engine.access.options import AccessOptions
from kvflow.engine.access.order import LayerOrder
from kvflow.engine.access.shards import ShardQueries
from kvflow.engine.hisparse.shard import HiSparseShard
from kvflow.models.kvstep import IndexQueries
from kvflow.models.partial import Natural
from kvflow.models.reading import topk_by_reading
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection


@define(eq=False)
class HiSparseStep:
    """Implements the models' `KVStep`. All ranks build it from the same requests; `options` say how
    index keys and queries meet."""

    facts: StepFacts
    shard: HiSparseShard
    comm: Comm
    options: AccessOptions
    counters: Counters
    write_only: frozenset[str] = frozenset()
    _asked: tuple[Selection, ShardQueries] | None = field(init=False, default=None)

    @property
    def max_context_len(self) -> int:
        return self.facts.max_context_len

    @property
    def _in_place(self) -> bool:
        return self.facts.num_shards == 1

    @cached_property
    def _fresh(self) -> FreshRows:
        return FreshRows(self.facts, self.counters, self.shard)

    @cached_property
    def _others(self) -> tuple[AttentionRows, IndexKeys]:
        """How queries reach the shards of other ranks."""
        parts = (
            self.facts,
            self.shard,
            self.comm,
            self.options,
            self.counters,
            self._fresh,
            Ahead(Inline(self.comm), self.counters, StepLog()),
            LayerOrder(self.facts.layout.spec),
        )
        return AttentionRows(*parts, self._attend_shard), IndexKeys(*parts)

    def publish(self, component: str, rows: Tensor) -> None:
        """Stores new packed rows uint8 [n_local, nbytes] of this rank. A collective."""
        if self.comm.size == 1:
            new = [np.arange(r.start, r.stop) for r in self.facts.requests]
            self.shard.write(component, list(enumerate(new)), rows)
            return
        kind = self.facts.layout.spec[component].kind
        keep = not self._in_place and kind == "indexer" and component not in self.write_only
        self._fresh.publish(self.comm, component, rows, keep=keep)

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        if not self._in_place:
            return self._others[1].topk(component, queries, segments)

        def read(request: int, positions: Tensor | None) -> Tensor:
            if positions is None:
                positions = torch.arange(self.facts.requests[request].stop)
            return self.shard.read(component, [(request, positions.numpy())])

        record = self.facts.layout.spec[component].record
        return topk_by_reading(record, read, queries, segments)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        if not self._in_place:
            return self._others[0].attend(component, queries, selection)
        if self._asked is None or self._asked[0] is not selection:
            self._asked = selection, whole_queries(selection)
        return self.shard.attend_all(component, queries, self._asked[1])

    def _attend_shard(self, component: str, queries: Tensor, which: ShardQueries) -> Natural:
        shape = self._others[0].shape
        assert shape is not None
        part = shape.query_part(self.options.workspace_tokens, self.facts.num_shards)
        alone = self.facts.counts.most_queries <= part
        return self.shard.attend(component, queries, which, alone=alone)

    def release(self, component: str) -> None:
        if self.comm.size > 1:
            self._fresh.drop(component)


def whole_queries(selection: Selection) -> ShardQueries:
    """A selection where one shard holds every position: local indices are positions."""
    counts, before = selection.counts.numpy(), 0
    request, local = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for segment, chosen in zip(selection.segments, selection.chosen, strict=True):
        n = len(segment)
        real = np.arange(chosen.shape[1]) < counts[before : before + n, None]
        request.append(np.full(n, segment.request_idx))
        local.append(chosen.numpy()[real])
        before += n
    return ShardQueries(np.concatenate(request), counts, np.concatenate(local), selection.topk)
