"""The new rows of a step: from the ranks that computed them to everybody, and to their owners."""

from functools import cached_property

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.shard import ShardRows
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.collective import GatherSchedule


@define(eq=False)
class FreshRows:
    """All-gathers new rows, writes those that this rank owns, and keeps what will be read."""

    facts: StepFacts
    counters: Counters
    shard: ShardRows
    _kept: dict[str, Tensor] = field(init=False, factory=dict)

    @cached_property
    def _schedule(self) -> GatherSchedule:
        return self.facts.fresh_schedule()

    @cached_property
    def _sent(self) -> Tensor:
        """Which of this rank's rows it sends: replicas of a query's rank share them."""
        request, local = self._schedule.send[self.facts.rank]
        lengths = np.array(self.facts.num_queries[self.facts.rank], np.int64)
        return torch.from_numpy((np.cumsum(lengths) - lengths)[request] + local)

    @cached_property
    def _owned(self) -> tuple[list[tuple[int, Ints]], Tensor]:
        """What this rank's shard holds of the new positions, and where among those gathered."""
        sharding, rows, places = self.facts.placement.sharding, [], []
        for i, r in enumerate(self.facts.requests):
            new = np.arange(r.start, r.stop)
            mine = new[sharding.owner(new) == self.facts.shard]
            rows.append((i, sharding.local(mine)))
            places.append(self.places(i, mine))
        return rows, torch.cat([torch.empty(0, dtype=torch.int64), *places])

    def publish(self, comm: Comm, component: str, rows: Tensor, *, keep: bool) -> None:
        """A collective. rows: uint8 [n_local, nbytes] of this rank's new tokens."""
        counts = self._schedule.counts
        sent = rows if counts[comm.rank] == len(rows) else rows.index_select(0, self._sent)
        gathered = comm.all_gather(sent, counts)
        others = sum(counts) - counts[comm.rank]
        self.counters.received("new rows", others * rows.shape[1])
        owned, places = self._owned
        self.shard.write(component, owned, gathered.index_select(0, places))
        if keep:
            self._kept[component] = gathered
            self.counters.hold(gathered.numel())

    def rows(self, component: str, request: int, positions: Ints | Tensor) -> Tensor:
        """Packed rows at new positions int64 [m] of a request."""
        return self._kept[component].index_select(0, self.places(request, positions))

    def places(self, request: int, positions: Ints | Tensor) -> Tensor:
        """Where rows of new positions stand among those kept."""
        index = torch.as_tensor(positions) - self.facts.requests[request].start
        return self._schedule.arrival[request].index_select(0, index)

    def drop(self, component: str) -> None:
        if (kept := self._kept.pop(component, None)) is not None:
            self.counters.free(kept.numel())
