"""The rows that a rank itself holds, by local index: `ShardRows`, and its pages."""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.engine.access.facts import StepFacts
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.paging import slots_of
from kvflow.layouts.sharding import Ints, as_ints
from kvflow.transfers.executors.base import RankCache

LocalRows = Sequence[tuple[int, Ints]]
"""(request index in the step, local indices int64 of this rank's shard): rows, request after
request."""


class ShardRows(Protocol):
    """A rank's own shard during a step. Reading may happen on another thread than writing: what is
    read there was written in an earlier step."""

    def read(self, component: str, rows: LocalRows) -> Tensor:
        """Packed rows uint8 ``[n, nbytes]``, n the number of local indices."""
        ...

    def write(self, component: str, rows: LocalRows, packed: Tensor) -> None:
        """Stores packed rows uint8 ``[n, nbytes]``."""
        ...


@frozen(eq=False)
class PageShard:
    """A shard in pages, each request's by its block tables."""

    facts: StepFacts
    cache: RankCache
    _tables: dict[tuple[str, int], Ints] = field(init=False, factory=dict)

    def read(self, component: str, rows: LocalRows) -> Tensor:
        return gather_rows(self.cache.pages[component], self._slots(component, rows))

    def write(self, component: str, rows: LocalRows, packed: Tensor) -> None:
        scatter_rows(self.cache.pages[component], self._slots(component, rows), packed)

    def _slots(self, component: str, rows: LocalRows) -> Tensor:
        group = self.facts.layout.group_of(component)
        slots = [torch.empty(0, dtype=torch.int64)]
        for request, local in rows:
            if (table := self._tables.get((group.name, request))) is None:
                table = as_ints(self.facts.requests[request].tables[group.name])
                self._tables[group.name, request] = table
            slots.append(torch.from_numpy(slots_of(group.paging, table, local)))
        return torch.cat(slots)
