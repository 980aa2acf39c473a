"""KVStep for tests of one rank: packed rows of each component in one tensor, read and written by
places that the host computes before the step. It waits for no device."""

from functools import cached_property

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvflow.layouts.spec import KVCacheSpec
from kvflow.models import Segment
from kvflow.models.reading import attend_by_reading, topk_by_reading


@define(eq=False)
class FlatKV:
    """Rows of `num_requests` requests of up to `capacity` tokens; `begin` opens a step."""

    spec: KVCacheSpec
    num_requests: int
    capacity: int
    segments: list[Segment] = field(factory=list)
    _new: Tensor | None = None

    @cached_property
    def table(self) -> dict[str, Tensor]:
        rows = self.num_requests * self.capacity
        return {
            c.name: torch.zeros(rows, c.record.nbytes, dtype=torch.uint8)
            for c in self.spec.components
        }

    def begin(self, segments: list[Segment]) -> None:
        self.segments = segments
        parts = [s.request_idx * self.capacity + s.host for s in segments]
        self._new = torch.from_numpy(np.concatenate(parts))

    @property
    def max_context_len(self) -> int:
        return max(s.context_len for s in self.segments)

    def publish(self, component: str, rows: Tensor) -> None:
        self.table[component].index_copy_(0, self._new, rows)

    def rows(self, component: str, request_idx: int, positions: Tensor | None) -> Tensor:
        start = request_idx * self.capacity
        if positions is None:
            held = next(s for s in self.segments if s.request_idx == request_idx)
            return self.table[component][start : start + held.context_len]
        return self.table[component].index_select(0, positions + start)

    def topk(self, component, queries, segments):
        record = self.spec[component].record
        read = lambda i, positions: self.rows(component, i, positions)  # noqa: E731
        return topk_by_reading(record, read, queries, segments)

    def attend(self, component, queries, selection):
        record = self.spec[component].record
        read = lambda i, positions: self.rows(component, i, positions)  # noqa: E731
        return attend_by_reading(record, read, queries, selection)

    def release(self, component: str) -> None:
        pass
