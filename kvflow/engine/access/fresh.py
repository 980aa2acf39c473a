"""The new rows of a step: from the ranks that computed them to everybody, and to their owners."""

from functools import cached_property

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.kernels.rows import scatter_rows
from kvflow.layouts.paging import PADDING_SLOT, kernel_slots
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.collective import GatherSchedule


@define(eq=False)
class FreshRows:
    """All-gathers new rows, writes those that this rank owns, and keeps what will be read."""

    facts: StepFacts
    counters: Counters
    _kept: dict[str, Tensor] = field(init=False, factory=dict)
    _writes: dict[str, tuple[Tensor, Tensor]] = field(init=False, factory=dict)

    @cached_property
    def _schedule(self) -> GatherSchedule:
        return self.facts.fresh_schedule()

    @cached_property
    def _sent(self) -> Tensor:
        """Which of this rank's rows it sends: replicas of a query's rank share them."""
        request, local = self._schedule.send[self.facts.rank]
        lengths = np.array(self.facts.num_queries[self.facts.rank], np.int64)
        return torch.from_numpy((np.cumsum(lengths) - lengths)[request] + local)

    def publish(self, comm: Comm, component: str, rows: Tensor, *, keep: bool) -> None:
        """A collective. rows: uint8 [n_local, nbytes] of this rank's new tokens."""
        counts = self._schedule.counts
        sent = rows if counts[comm.rank] == len(rows) else rows.index_select(0, self._sent)
        gathered = comm.all_gather(sent, counts)
        mine = sum(counts) - counts[comm.rank]
        self.counters.received("new rows", mine * rows.shape[1])
        slots, places = self._write(component)
        scatter_rows(self.facts.cache.pages[component], slots, gathered.index_select(0, places))
        if keep:
            self._kept[component] = gathered
            self.counters.hold(gathered.numel())

    def _write(self, component: str) -> tuple[Tensor, Tensor]:
        """Slots that this rank writes, and the places of their rows among those gathered."""
        group = self.facts.layout.group_of(component)
        if group.name not in self._writes:
            slots = [
                kernel_slots(
                    self.facts.placement,
                    group.paging,
                    r.tables[group.name],
                    np.arange(r.start, r.stop),
                    self.facts.rank,
                )
                for r in self.facts.requests
            ]
            every = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *slots]))
            empty = torch.empty(0, dtype=torch.int64)
            places = torch.cat([empty, *self._schedule.arrival])
            owned = every != PADDING_SLOT
            self._writes[group.name] = every[owned], places[owned]
        return self._writes[group.name]

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
