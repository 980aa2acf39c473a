"""AloneStep: the KV cache during one forward pass of a rank that has no others and holds all.

Every slot follows from positions that the host knows, or from positions chosen on the device by a
look-up there; they are checked when the step is opened, and then the host waits for nothing.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.engine.access.facts import StepFacts, joined
from kvflow.errors import LayoutError
from kvflow.kernels.codec import decode_index_key
from kvflow.kernels.slots import SlotRows
from kvflow.layouts.layout import CacheGroup
from kvflow.layouts.paging import slots_of
from kvflow.models.kvstep import IndexQueries
from kvflow.models.reading import attend_by_fetching, topk_by_reading
from kvflow.models.segment import Segment
from kvflow.models.selection import Fetch, Selection
from kvflow.models.together import FEW_QUERIES, Together


@frozen(eq=False)
class _Places:
    """Slots of one block-table group: of every request's context, request i's from ``begins[i]``
    on, and of the new rows."""

    context: Tensor
    begins: tuple[int, ...]
    new: Tensor


@define(eq=False)
class AloneStep:
    """Implements the models' `KVStep`; `rows` are the pages of each component. Raises `LayoutError`
    for block tables that name a slot twice for new rows, or one that is none."""

    facts: StepFacts
    rows: Mapping[str, SlotRows]
    _places: dict[str, _Places] = field(init=False)
    _read: dict[str, tuple[Sequence[Fetch], Tensor]] = field(init=False, factory=dict)
    _together: Together | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._places = {g.name: self._of_group(g) for g in self.facts.layout.groups}

    def _of_group(self, group: CacheGroup) -> _Places:
        context, new, sharding = [], [], self.facts.placement.sharding
        for r in self.facts.requests:
            local = sharding.local(np.arange(r.stop))
            slots = slots_of(group.paging, r.tables[group.name], local)
            context.append(slots)
            new.append(slots[r.start :])
        every, fresh = joined(context), joined(new)
        num_slots = min(self.rows[name].pages.num_slots for name in group.components)
        if len(every) and not 0 <= every.min() <= every.max() < num_slots:
            raise LayoutError(
                f"slots of group {group.name!r} reach from {every.min()} to {every.max()}, must "
                f"be 0 <= slot < {num_slots}"
            )
        if len(np.unique(fresh)) != len(fresh):
            raise LayoutError(f"new rows of group {group.name!r} share a slot: {fresh}")
        begins = np.cumsum([0, *map(len, context)])[:-1].tolist()
        return _Places(torch.from_numpy(every), tuple(begins), torch.from_numpy(fresh))

    @property
    def max_context_len(self) -> int:
        return self.facts.max_context_len

    @property
    def workspace_limit_nbytes(self) -> int:
        """Rows are read where they lie."""
        return 0

    def publish(self, component: str, rows: Tensor) -> None:
        self.rows[component].write(self._of(component).new, rows)

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        record, read = self.facts.layout.spec[component].record, partial(self._fetch, component)
        if any(len(s) > FEW_QUERIES for s in segments):
            return topk_by_reading(record, lambda i, at: read([Fetch(i, at)]), queries, segments)
        if self._together is None or self._together.segments != tuple(segments):
            self._together = Together.of(segments, queries.topk)
        keys = read(self._together.fetches)
        decoded = decode_index_key(record, keys, queries.queries.dtype)
        return self._together.choose(decoded, queries)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        record = self.facts.layout.spec[component].record
        return attend_by_fetching(record, partial(self._fetch, component), queries, selection)

    def release(self, component: str) -> None:
        """Nothing is kept for one layer."""

    def _of(self, component: str) -> _Places:
        return self._places[self.facts.layout.group_of(component).name]

    def _fetch(self, component: str, fetches: Sequence[Fetch]) -> Tensor:
        """Packed rows; layers that read the same share the look-up."""
        group = self.facts.layout.group_of(component).name
        known = self._read.get(group)
        if known is None or known[0] is not fetches:
            slots = [self._slots(self._places[group], fetch) for fetch in fetches]
            known = fetches, torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
            self._read[group] = known
        return self.rows[component].read(known[1])

    def _slots(self, places: _Places, fetch: Fetch) -> Tensor:
        begin = places.begins[fetch.request_idx]
        if fetch.positions is None:
            return places.context[begin : begin + self.facts.requests[fetch.request_idx].stop]
        return places.context.index_select(0, fetch.positions + begin)
