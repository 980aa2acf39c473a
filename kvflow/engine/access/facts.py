"""StepFacts: what every rank of a group knows of a step without asking.

Who asks whom, how many queries each rank has, and where a rank's own share of a request lies.
Whatever decides about a collective is computed from these.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from attrs import define, field

from kvflow.engine.access.choice import StepCounts
from kvflow.engine.memory import StepRequest
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense
from kvflow.layouts.sharding import Ints, Replicated
from kvflow.transfers.executors.collective import GatherSchedule, gather_schedule
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

Range = tuple[int, int, int]
"""(request index, start, stop): consecutive positions of a request."""


@define(eq=False)
class StepFacts:
    """The requests of a step as rank `rank` of `size` sees them."""

    layout: KVLayout
    rank: int
    requests: Sequence[StepRequest]
    size: int
    _positions: dict[int, list[Ints]] = field(init=False, factory=dict)

    @property
    def placement(self) -> Placement:
        return self.layout.placement

    @property
    def num_shards(self) -> int:
        return self.placement.sharding.num_shards

    @cached_property
    def shard(self) -> int:
        return self.placement.shard_of(self.rank)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks that this rank asks for rows, by shard: one replica of each, its own among
        them. The ranks of a shard's replicas share the askers evenly."""
        return self._members_of(self.rank)

    @cached_property
    def askers(self) -> tuple[int, ...]:
        """The ranks that ask this one, ascending."""
        return tuple(
            r for r in self.placement.all_ranks if self._members_of(r)[self.shard] == self.rank
        )

    def _members_of(self, rank: int) -> tuple[int, ...]:
        groups = self.placement.ranks
        replica = groups[self.placement.shard_of(rank)].index(rank)
        return tuple(group[replica % len(group)] for group in groups)

    def positions(self, rank: int) -> list[Ints]:
        """By request, the new positions whose queries a rank computes: ascending."""
        if rank not in self._positions:
            self._positions[rank] = [r.local_positions(rank) for r in self.requests]
        return self._positions[rank]

    @cached_property
    def num_queries(self) -> tuple[tuple[int, ...], ...]:
        """By rank and request."""
        counts = np.zeros((self.size, len(self.requests)), np.int64)
        for i, r in enumerate(self.requests):
            sharding = r.queries.sharding
            each = sharding.local_len(r.stop, np.arange(sharding.num_shards))
            for ranks, num in zip(r.queries.ranks, each.tolist(), strict=True):
                counts[list(ranks), i] = num
        return tuple(map(tuple, counts.tolist()))

    @cached_property
    def counts(self) -> StepCounts:
        """What the ways of reaching rows are chosen by."""
        starts = tuple(r.start for r in self.requests)
        stops = tuple(r.stop for r in self.requests)
        return StepCounts(starts, stops, self.num_queries, self.num_shards)

    @property
    def index_dtype(self) -> torch.dtype:
        """Of local indices on a wire."""
        return torch.int32 if self.max_context_len < 1 << 31 else torch.int64

    @cached_property
    def num_cached(self) -> int:
        """Cached tokens of all requests."""
        return sum(r.start for r in self.requests)

    @cached_property
    def num_new(self) -> int:
        return sum(r.stop - r.start for r in self.requests)

    @cached_property
    def max_context_len(self) -> int:
        return max((r.stop for r in self.requests), default=0)

    def local_len(self, request: int, shard: int) -> int:
        """Positions of a request, new ones included, that a shard holds."""
        return self._local_lens[request][shard]

    @cached_property
    def _local_lens(self) -> tuple[tuple[int, ...], ...]:
        sharding, shards = self.placement.sharding, np.arange(self.num_shards)
        return tuple(tuple(sharding.local_len(r.stop, shards).tolist()) for r in self.requests)

    def fresh_schedule(self) -> GatherSchedule:
        """How the new rows of all ranks come together on every rank."""
        plans = [self._dense_plan(r.queries, r.start, r.stop) for r in self.requests]
        return gather_schedule(plans, self.size)

    def cached_schedule(self, ranges: Sequence[Range]) -> GatherSchedule:
        """How ranges of cached rows come together on every rank."""
        plans = [self._dense_plan(self.placement, lo, hi) for _, lo, hi in ranges]
        return gather_schedule(plans, self.size)

    def _dense_plan(self, placement: Placement, start: int, stop: int) -> Plan:
        """How [start, stop) gets from the ranks of a placement into one dense target."""
        spec, capacity = self.layout.spec, Dense(max(stop, 1))
        src = KVLayout.uniform(spec, placement, capacity)
        dst = KVLayout.uniform(spec, Placement.simple(Replicated(start)), capacity)
        return plan_transfer(src, dst, (start, stop))


def joined(parts: Sequence[Ints]) -> Ints:
    """One array of all, int64 also where there are none."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def cut_ranges(lengths: Sequence[tuple[int, int]], most: int) -> list[list[Range]]:
    """(request, length) of several requests, dealt to parts of at most `most` positions."""
    parts: list[list[Range]] = [[]]
    room = most
    for request, length in lengths:
        start = 0
        while start < length:
            stop = min(length, start + room)
            parts[-1].append((request, start, stop))
            room -= stop - start
            start = stop
            if not room:
                parts.append([])
                room = most
    return [part for part in parts if part]
