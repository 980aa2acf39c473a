"""AloneStep: the KV cache during one forward pass of a rank that has no others and holds all.

Every slot follows from positions that the host knows, or from positions chosen on the device by a
look-up there; they are checked when the step is opened, and then the host waits for nothing.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvflow.engine.access.facts import StepFacts, joined
from kvflow.errors import LayoutError
from kvflow.kernels.codec import decode_index_key, latent_rank, view_latent
from kvflow.kernels.slots import SlotRows
from kvflow.layouts.layout import CacheGroup
from kvflow.layouts.paging import slots_of
from kvflow.models.kvstep import IndexQueries
from kvflow.models.reading import attend, attend_by_fetching, topk_by_reading
from kvflow.models.segment import Segment
from kvflow.models.selection import Fetch, Group, Selection
from kvflow.models.together import FEW_QUERIES, Together


@define(eq=False)
class _Places:
    """Slots of one block-table group: of every request's context, request i's from ``begins[i]``
    on, and of the new rows. What was looked up last is kept: layers that read the same share it."""

    context: Tensor
    begins: tuple[int, ...]
    stops: tuple[int, ...]
    new: Tensor
    _read: tuple[Sequence[Fetch], Tensor] | None = field(init=False, default=None)
    _moved: tuple[Selection, Sequence[Group]] | None = field(init=False, default=None)

    def slots(self, fetches: Sequence[Fetch]) -> Tensor:
        """Of all rows of fetches: int64 ``[t]``."""
        if self._read is None or self._read[0] is not fetches:
            slots = [self._slots(fetch) for fetch in fetches]
            self._read = fetches, torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
        return self._read[1]

    def groups(self, selection: Selection) -> Sequence[Group]:
        """The selection's groups, with slots for rows."""
        if self._moved is None or self._moved[0] is not selection:
            slots = self.slots(selection.fetches)
            self._moved = selection, [group.moved(slots) for group in selection.groups]
        return self._moved[1]

    def _slots(self, fetch: Fetch) -> Tensor:
        begin = self.begins[fetch.request_idx]
        if fetch.positions is None:
            return self.context[begin : begin + self.stops[fetch.request_idx]]
        return self.context.index_select(0, fetch.positions + begin)


@define(eq=False)
class AloneStep:
    """Implements the models' `KVStep`; `rows` are the pages of each component. Raises `LayoutError`
    for block tables that name a slot twice for new rows, or one that is none."""

    facts: StepFacts
    rows: Mapping[str, SlotRows]
    _places: dict[str, _Places] = field(init=False)
    """By component; those of a group share them."""
    _together: Together | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._places = {}
        for group in self.facts.layout.groups:
            self._places |= dict.fromkeys(group.components, self._of_group(group))

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
        stops = tuple(r.stop for r in self.facts.requests)
        return _Places(torch.from_numpy(every), tuple(begins), stops, torch.from_numpy(fresh))

    @property
    def max_context_len(self) -> int:
        return self.facts.max_context_len

    @property
    def workspace_limit_nbytes(self) -> int:
        """Rows are read where they lie."""
        return 0

    def publish(self, component: str, rows: Tensor) -> None:
        self.rows[component].write(self._places[component].new, rows)

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
        record, rows = self.facts.layout.spec[component].record, self.rows[component].in_place
        table = None if rows is None else view_latent(record, rows, queries.dtype)
        if table is None or not selection.fetches:
            return attend_by_fetching(record, partial(self._fetch, component), queries, selection)
        return attend(
            queries, table, self._places[component].groups(selection), latent_rank(record)
        )

    def release(self, component: str) -> None:
        """Nothing is kept for one layer."""

    def _fetch(self, component: str, fetches: Sequence[Fetch]) -> Tensor:
        """Packed rows."""
        return self.rows[component].read(self._places[component].slots(fetches))
