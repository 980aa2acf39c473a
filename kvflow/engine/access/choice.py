"""What each way of reaching cached rows would put on the wire, and which costs least.

Everything here follows from counts that all ranks hold alike, so all ranks choose alike. Bytes are
those that the ranks receive from each other, summed over the ranks of a group, for one layer.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from attrs import frozen

from kvflow.engine.access.options import AttentionWay, IndexWay

Way = TypeVar("Way", AttentionWay, IndexWay)

INDEX_NBYTES = 4
"""A local index on the wire (`exchange_lists`)."""

COLLECTIVE_NBYTES = 1 << 15
"""What a rank could receive while a collective starts: 32 KiB are 3 microseconds at 10 GB/s."""


@frozen
class StepCounts:
    """Of one step: for every request its cached tokens and its tokens with the new ones; for every
    rank, how many queries it has of each request; over how many shards a request is dealt."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    num_queries: Sequence[Sequence[int]]
    num_shards: int

    @property
    def num_ranks(self) -> int:
        return len(self.num_queries)

    @property
    def num_cached(self) -> int:
        return sum(self.starts)

    @property
    def most_queries(self) -> int:
        """Of the busiest rank."""
        return max((sum(counts) for counts in self.num_queries), default=0)

    @property
    def total_queries(self) -> int:
        return sum(map(sum, self.num_queries))

    @property
    def elsewhere(self) -> float:
        """The share of a context that lies on other ranks of a replica."""
        return 1 - 1 / self.num_shards

    def union(self, topk: int, part: int | None = None) -> float:
        """Cached rows that the ranks' queries choose, each once a rank and part of `part` queries
        (None: all of them), if every query chose its topk independently: a part with n queries of
        a request chooses ``start * (1 - (1 - topk / context)^n)`` of its rows."""
        total, size = 0.0, part or max(1, self.most_queries)
        for counts in self.num_queries:
            room = size
            for start, stop, num in zip(self.starts, self.stops, counts, strict=True):
                share = min(1.0, topk / max(stop, 1))
                while num:
                    count = min(num, room)
                    total += start * (1 - (1 - share) ** count)
                    num -= count
                    room = room - count or size
        return total

    def scored(self, topk: int) -> tuple[float, float]:
        """How many queries see more than topk positions: of all ranks, and of the busiest one;
        exact where whole requests do."""
        by_rank = [0.0] * self.num_ranks
        for rank, counts in enumerate(self.num_queries):
            for start, stop, num in zip(self.starts, self.stops, counts, strict=True):
                if stop > start:
                    by_rank[rank] += num * max(0, stop - max(start, topk)) / (stop - start)
        return sum(by_rank), max(by_rank, default=0.0)


@frozen
class AttentionShape:
    """Bytes of one layer's attention: a latent row, a query of this rank's heads, what comes back
    for one (output and lse); the topk; and how many layers share a choice."""

    row_nbytes: int
    query_nbytes: int
    partial_nbytes: int
    topk: int
    layers_per_choice: float = 1.0

    def query_workspace_nbytes(self, num_shards: int) -> int:
        """What one query of each rank takes on a rank: those that arrive, what is answered to
        them, and the answers to its own."""
        return num_shards * (self.query_nbytes + 2 * self.partial_nbytes)

    def query_part(self, workspace_tokens: int, num_shards: int) -> int:
        """Queries of a rank answered at once: what they take fits one workspace, and there is at
        least one."""
        each = self.query_workspace_nbytes(num_shards)
        return max(1, workspace_tokens * self.row_nbytes // each)

    def union_part(self, workspace_tokens: int) -> int:
        """Queries of a rank whose union fits one workspace however they choose."""
        return max(1, workspace_tokens // self.topk)

    def union_parts(self, step: StepCounts, workspace_tokens: int) -> tuple[int, int]:
        """Queries of a rank in a part, and how many parts there are on every rank."""
        most = step.most_queries
        if min(most * self.topk, step.num_cached) <= workspace_tokens:
            return max(1, most), 1
        part = self.union_part(workspace_tokens)
        return part, -(-most // part)

    def nbytes(
        self, way: AttentionWay, step: StepCounts, workspace_tokens: int | None = None
    ) -> float:
        """On the wire, all ranks together; in parts where a union exceeds a workspace."""
        lists = INDEX_NBYTES * step.elsewhere / self.layers_per_choice
        if way == "whole":
            return float((step.num_ranks - 1) * step.num_cached * self.row_nbytes)
        if way == "union":
            part = self.union_parts(step, workspace_tokens)[0] if workspace_tokens else None
            return step.union(self.topk, part) * (self.row_nbytes * step.elsewhere + lists)
        chosen = min(self.topk, max(step.stops, default=0))
        return self.total_moved(step) + step.total_queries * chosen * lists

    def total_moved(self, step: StepCounts) -> int:
        """Queries to the other shards, and their answers."""
        each = (step.num_shards - 1) * (self.query_nbytes + self.partial_nbytes)
        return step.total_queries * each

    def num_collectives(self, way: AttentionWay, step: StepCounts, workspace_tokens: int) -> float:
        if way == "whole":
            return 1
        told = 2 / self.layers_per_choice
        if way == "union":
            return (1 + told) * self.union_parts(step, workspace_tokens)[1]
        part = self.query_part(workspace_tokens, step.num_shards)
        return told + 2 * -(-step.most_queries // part)


@frozen
class IndexShape:
    """Bytes of one indexer: a key, a query with its weights, one answer (score and index)."""

    row_nbytes: int
    query_nbytes: int
    answer_nbytes: int
    topk: int

    def query_workspace_nbytes(self, num_shards: int) -> int:
        """As `AttentionShape.query_workspace_nbytes`."""
        return num_shards * (self.query_nbytes + 2 * self.topk * self.answer_nbytes)

    def query_part(self, workspace_tokens: int, num_shards: int) -> int:
        """As `AttentionShape.query_part`."""
        each = self.query_workspace_nbytes(num_shards)
        return max(1, workspace_tokens * self.row_nbytes // each)

    def nbytes(self, way: IndexWay, step: StepCounts) -> float:
        """On the wire, all ranks together."""
        if way == "keys":
            long = sum(a for a, b in zip(step.starts, step.stops, strict=True) if b > self.topk)
            return float((step.num_ranks - 1) * long * self.row_nbytes)
        longest = max(step.stops, default=0)
        answers = min(self.topk, -(-longest // step.num_shards)) * self.answer_nbytes
        moved = (step.num_shards - 1) * (self.query_nbytes + answers)
        return step.scored(self.topk)[0] * moved

    def num_collectives(self, way: IndexWay, step: StepCounts, workspace_tokens: int) -> float:
        if way == "keys":
            return -(-step.num_cached // workspace_tokens)
        part = self.query_part(workspace_tokens, step.num_shards)
        return 3 * -(-step.scored(self.topk)[1] // part)


def price(nbytes: float, num_collectives: float, num_ranks: int) -> float:
    """Bytes, and what the ranks could have received while the collectives started."""
    return nbytes + num_collectives * COLLECTIVE_NBYTES * num_ranks


def cheapest(prices: Mapping[Way, float]) -> Way:
    """Of equal prices the first."""
    return min(prices, key=prices.__getitem__)


def choose_attention(
    shape: AttentionShape, step: StepCounts, asked: AttentionWay | None, workspace_tokens: int
) -> AttentionWay:
    """The way asked for, or the cheapest; a context that is too long for one workspace does not
    move whole."""
    ways: tuple[AttentionWay, ...] = ("whole", "union", "queries") if asked is None else (asked,)
    if step.num_cached > workspace_tokens:
        ways = tuple(way for way in ways if way != "whole") or ("union", "queries")
    return cheapest(
        {
            way: price(
                shape.nbytes(way, step, workspace_tokens),
                shape.num_collectives(way, step, workspace_tokens),
                step.num_ranks,
            )
            for way in ways
        }
    )


def choose_index(
    shape: IndexShape, step: StepCounts, asked: IndexWay | None, workspace_tokens: int
) -> IndexWay:
    """The way asked for, or the cheapest."""
    ways: tuple[IndexWay, ...] = ("keys", "queries") if asked is None else (asked,)
    return cheapest(
        {
            way: price(
                shape.nbytes(way, step),
                shape.num_collectives(way, step, workspace_tokens),
                step.num_ranks,
            )
            for way in ways
        }
    )
