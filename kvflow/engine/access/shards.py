"""Attention where the rows are: queries go to the ranks of a replica, parts come back and merge.

A rank that answers knows queries and the local indices each chose of its shard, and nothing of
layers or pages: whoever keeps the rows does the attending (`AttendShard`).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts, joined
from kvflow.engine.access.lists import Lists, exchange_lists
from kvflow.engine.access.shard import ShardRows
from kvflow.layouts.sharding import Ints
from kvflow.models.partial import Natural, attend_part
from kvflow.models.selection import Selection
from kvflow.transfers.operators.merge import PartialAttention, merge_partials


@frozen(eq=False)
class ShardQueries:
    """Queries of several ranks, and the rows of this rank's shard that each attends to.

    request: int64 ``[m]``, the index in the step of each query's request. counts: int64 ``[m]``,
    how many rows it chose here, 0 included. local: int64 ``[sum(counts)]``, their local indices
    in the shard, query after query, ascending in each. topk: the most there can be."""

    request: Ints
    counts: Ints
    local: Ints
    topk: int


AttendShard = Callable[[str, Tensor, ShardQueries], Natural]
"""(latent component, queries ``[m, h, R + dr]``, which rows) -> partial attention of each query
over its rows here: out ``[m, h, R]`` and lse ``[m, h]`` with natural logarithms; zeros and -inf
for a query with no rows here. Same dtype as the queries."""


def attend_by_shard(facts: StepFacts, shard: ShardRows) -> AttendShard:
    """Over rows that this rank can read: every chosen one is read and decoded once."""

    def attend(component: str, queries: Tensor, which: ShardQueries) -> Natural:
        asker = np.repeat(which.request, which.counts)
        rows, index = [], np.empty(len(which.local), np.int64)
        num = 0
        for request in np.unique(asker).tolist():
            mine = asker == request
            local, inverse = np.unique(which.local[mine], return_inverse=True)
            index[mine] = num + inverse
            rows.append((request, local))
            num += len(local)
        record = facts.layout.spec[component].record
        packed, counts = shard.read(component, rows), torch.from_numpy(which.counts)
        return attend_part(record, packed, queries, torch.from_numpy(index), counts, which.topk)

    return attend


def lists_by_shard(facts: StepFacts, selection: Selection) -> list[Lists]:
    """By shard: the local indices that each query chose of it."""
    sharding, lists = facts.placement.sharding, []
    chosen, counts, lo = [], selection.counts.numpy(), 0
    for c in selection.chosen:
        real = np.arange(c.shape[1]) < counts[lo : lo + len(c), None]
        chosen.append(c.numpy()[real])
        lo += len(c)
    positions, query = joined(chosen), np.repeat(np.arange(len(counts)), counts)
    shard, local = sharding.owner(positions), sharding.local(positions)
    for s in range(facts.num_shards):
        mine = shard == s
        lists.append(Lists(np.bincount(query[mine], minlength=len(counts)), local[mine]))
    return lists


@define(eq=False)
class ShardedAttention:
    """One selection, told to the shards it chose from; made by a collective. Its queries are
    answered in parts of `part_size` a rank, which all ranks know alike."""

    facts: StepFacts
    part_size: int
    attend_shard: AttendShard
    counters: Counters
    _asked: list[ShardQueries] = field(init=False)

    @classmethod
    def agree(
        cls,
        comm: Comm,
        facts: StepFacts,
        selection: Selection,
        part_size: int,
        attend_shard: AttendShard,
        counters: Counters,
    ) -> "ShardedAttention":
        """A collective: every rank tells the shards which of their rows its queries chose."""
        self = cls(facts, part_size, attend_shard, counters)
        totals = [sum(counts) for counts in facts.num_queries]
        wanted = lists_by_shard(facts, selection)
        asked = exchange_lists(comm, facts, wanted, totals.__getitem__, counters)
        self._asked = [
            ShardQueries(
                np.repeat(np.arange(len(facts.requests)), facts.num_queries[rank]),
                lists.counts,
                lists.values,
                selection.topk,
            )
            for rank, lists in zip(facts.askers, asked, strict=True)
        ]
        return self

    @property
    def num_parts(self) -> int:
        most = max((sum(counts) for counts in self.facts.num_queries), default=0)
        return -(-most // self.part_size)

    def attend(self, comm: Comm, component: str, queries: Tensor, rank_dim: int) -> Tensor:
        """A collective. Attention of this rank's queries ``[n, h, R + dr]``: out ``[n, h, R]``,
        R being `rank_dim`."""
        out = queries.new_zeros(*queries.shape[:2], rank_dim)
        for part in range(self.num_parts):
            lo, hi = part * self.part_size, (part + 1) * self.part_size
            out[lo:hi] = self._part(comm, component, queries[lo:hi], lo, hi)
        return out

    def _part(self, comm: Comm, component: str, queries: Tensor, lo: int, hi: int) -> Tensor:
        facts, size = self.facts, comm.size
        to_shards, from_askers = [0] * size, [0] * size
        for rank in facts.members:
            to_shards[rank] = len(queries)
        for rank in facts.askers:
            from_askers[rank] = len(range(sum(facts.num_queries[rank]))[lo:hi])
        sent = queries.repeat(len(facts.members), 1, 1)
        arrived, _ = comm.all_to_all(sent, to_shards, from_askers)
        asked = [_cut(q, lo, hi) for q in self._asked]
        part = self.attend_shard(component, arrived, _joined(asked))
        both = torch.cat([part.out, part.lse[..., None]], -1)
        answers, _ = comm.all_to_all(both, from_askers, to_shards)
        held = (arrived.numel() + both.numel() + answers.numel()) * queries.element_size()
        self.counters.hold(held)
        self._count("queries", arrived, from_askers)
        self._count("partials", answers, to_shards)
        merged = merge_partials(
            [
                PartialAttention(answer[..., :-1], answer[..., -1], "e")
                for answer in answers.view(len(facts.members), len(queries), *both.shape[1:])
            ]
        )
        self.counters.free(held)
        return merged.out

    def _count(self, kind: str, rows: Tensor, counts: Sequence[int]) -> None:
        others = len(rows) - counts[self.facts.rank]
        nbytes = others * rows.shape[1:].numel() * rows.element_size()
        self.counters.received("queries" if kind == "queries" else "partials", nbytes)


def _cut(queries: ShardQueries, lo: int, hi: int) -> ShardQueries:
    ends = np.cumsum(queries.counts)
    first, last = (
        int(ends[i - 1]) if i and len(ends) else 0 for i in (min(lo, len(ends)), min(hi, len(ends)))
    )
    return ShardQueries(
        queries.request[lo:hi], queries.counts[lo:hi], queries.local[first:last], queries.topk
    )


def _joined(parts: Sequence[ShardQueries]) -> ShardQueries:
    return ShardQueries(
        joined([p.request for p in parts]),
        joined([p.counts for p in parts]),
        joined([p.local for p in parts]),
        max(p.topk for p in parts),
    )
