"""KVStep for tests: rows of every component kept per request, position by position.

Slow and obvious on purpose; shares no code with the engine's cache.
"""

from functools import partial

import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models import Segment
from kvflow.models.reading import attend_by_reading, topk_by_reading


@define(eq=False)
class DenseKV:
    """One rank's full copy of the cache. `begin` states a step's local segments; `publish`
    gathers the rows of all ranks, as PCP does. The longest context is of any step so far."""

    comm: Comm
    spec: KVCacheSpec
    table: dict[tuple[str, int, int], Tensor] = field(factory=dict)
    visible: dict[int, int] = field(factory=dict)
    published: list[str] = field(factory=list)
    released: list[str] = field(factory=list)
    _owners: list[tuple[int, int]] = field(factory=list)
    _counts: list[int] = field(factory=list)

    def begin(self, segments: list[Segment]) -> None:
        pairs = [[s.request_idx, p] for s in segments for p in s.positions.tolist()]
        mine = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        lens, n = torch.tensor([[len(pairs)]]), self.comm.size
        self._counts = self.comm.all_gather(lens, [1] * n).flatten().tolist()
        everyone = self.comm.all_gather(mine, self._counts)
        self._owners = [tuple(x) for x in everyone.tolist()]
        self.published, self.released = [], []
        for s in segments:
            self.visible[s.request_idx] = s.context_len

    def publish(self, component: str, rows: Tensor) -> None:
        assert rows.dtype == torch.uint8
        assert rows.dim() == 2
        for owner, row in zip(self._owners, self.comm.all_gather(rows, self._counts), strict=True):
            self.table[component, *owner] = row
        self.published.append(component)

    @property
    def max_context_len(self) -> int:
        return max(self.visible.values(), default=0)

    def topk(self, component, queries, segments):
        record = self.spec[component].record
        return topk_by_reading(record, partial(self.rows, component), queries, segments)

    def attend(self, component, queries, selection):
        record = self.spec[component].record
        return attend_by_reading(record, partial(self.rows, component), queries, selection)

    def rows(self, component: str, request_idx: int, positions: Tensor | None) -> Tensor:
        assert component in self.published
        assert component not in self.released
        limit = self.visible[request_idx]
        wanted = range(limit) if positions is None else positions.tolist()
        assert all(0 <= p < limit for p in wanted)
        return torch.stack([self.table[component, request_idx, p] for p in wanted])

    def release(self, component: str) -> None:
        self.released.append(component)


def segment(request_idx: int, positions: object, context_len: int) -> Segment:
    return Segment(request_idx, torch.as_tensor(positions, dtype=torch.int64), context_len)
