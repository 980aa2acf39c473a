"""PagedStep: the KV cache of one rank during one forward pass.

New rows are all-gathered and written to the slots this rank owns. Where the rank holds every
position, rows are read in place; where it does not, the step chooses by what all ranks know
whether rows move to the queries or queries to the rows, and fetches rows ahead of their use.
"""

from collections.abc import Sequence
from functools import partial

import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm, Lane
from kvflow.engine.access.ahead import Ahead
from kvflow.engine.access.attention import AttentionRows
from kvflow.engine.access.counters import Counters, Moment, Point, StepLog
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.fresh import FreshRows
from kvflow.engine.access.index import IndexKeys
from kvflow.engine.access.options import AccessOptions
from kvflow.engine.access.order import LayerOrder
from kvflow.engine.access.shard import ShardRows
from kvflow.engine.access.shards import attend_by_shard
from kvflow.models.kvstep import IndexQueries
from kvflow.models.reading import attend_by_reading, topk_by_reading
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection


@define(eq=False)
class PagedStep:
    """Implements the models' `KVStep`. All ranks build it from the same requests."""

    facts: StepFacts
    shard: ShardRows
    comm: Comm
    lane: Lane
    options: AccessOptions
    write_only: frozenset[str]
    counters: Counters
    log: StepLog
    _fresh: FreshRows = field(init=False)
    _attention: AttentionRows = field(init=False)
    _index: IndexKeys = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._fresh = FreshRows(self.facts, self.counters, self.shard)
        ahead = Ahead(self.lane, self.counters, self.log)
        order = LayerOrder(self.facts.layout.spec)
        parts = (
            self.facts,
            self.shard,
            self.comm,
            self.options,
            self.counters,
            self._fresh,
            ahead,
            order,
        )
        self._attention = AttentionRows(*parts, attend_by_shard(self.facts, self.shard))
        self._index = IndexKeys(*parts)

    @property
    def max_context_len(self) -> int:
        return self.facts.max_context_len

    @property
    def workspace_limit_nbytes(self) -> int:
        """What rows of other ranks, and answers to their queries, take at most in this step as far
        as it has gone (docs/context-access.md)."""
        spec = self.facts.layout.spec
        latent = max((spec[name].record.nbytes for name in spec.select(kind="latent")), default=0)
        key = max((spec[name].record.nbytes for name in spec.select(kind="indexer")), default=0)
        fresh = 0 if self._in_place else self.facts.num_new * (latent + key)
        return fresh + self._attention.limit_nbytes() + self._index.limit_nbytes()

    @property
    def _in_place(self) -> bool:
        return self.facts.num_shards == 1

    def publish(self, component: str, rows: Tensor) -> None:
        """Stores new packed rows uint8 [n_local, nbytes] of this rank. A collective."""
        self._note("publish", component)
        keep = not self._in_place and component not in self.write_only
        self._fresh.publish(self.comm, component, rows, keep=keep)

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        self._note("topk", component)
        if self._in_place:
            record = self.facts.layout.spec[component].record
            return topk_by_reading(record, partial(self._rows, component), queries, segments)
        return self._index.topk(component, queries, segments)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        self._note("attend", component)
        if self._in_place:
            record = self.facts.layout.spec[component].record
            out = attend_by_reading(record, partial(self._rows, component), queries, selection)
        else:
            self._index.look_ahead(component)
            out = self._attention.attend(component, queries, selection)
        self._note("attended", component)
        return out

    def release(self, component: str) -> None:
        """Frees what is held of the component."""
        self._note("release", component)
        self.counters.bound(self.workspace_limit_nbytes)
        self._fresh.drop(component)

    def _rows(self, component: str, request: int, positions: Tensor | None) -> Tensor:
        """Packed rows uint8 [m, nbytes] at positions int64 [m], or of the whole context."""
        if positions is None:
            positions = torch.arange(self.facts.requests[request].stop)
        local = self.facts.placement.sharding.local(positions.numpy())
        return self.shard.read(component, [(request, local)])

    def _note(self, what: Point, component: str) -> None:
        self.log.moments.append(Moment(what, component, self.lane.clock()))
