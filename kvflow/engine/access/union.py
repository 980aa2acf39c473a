"""The union of the rows that a rank's queries choose, brought from one replica of each shard.

Which rows is said once for an index group; its layers then move rows alone. Rows of the step
itself are here already.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.ahead import Fetch
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts, joined
from kvflow.engine.access.fresh import FreshRows
from kvflow.engine.access.lists import Lists, exchange_lists
from kvflow.engine.access.shard import ShardRows
from kvflow.layouts.sharding import Ints
from kvflow.models.partial import attend_rows, groups_of
from kvflow.models.segment import Segment
from kvflow.models.selection import Group, Selection, group_size


@frozen(eq=False)
class Wanted:
    """What one rank's queries choose of one request: ascending positions, each once, those of
    `cached` before those of `new`; `index` int64 ``[m, k]`` names each query's among both."""

    request: int
    cached: Ints
    new: Ints
    index: Tensor


def wanted_rows(selection: Selection, starts: Sequence[int]) -> list[Wanted]:
    """By segment of a selection; requests begin at `starts`."""
    wanted, lo = [], 0
    for s, chosen in zip(selection.segments, selection.chosen, strict=True):
        counts = selection.counts[lo : lo + len(s)]
        lo += len(s)
        real = torch.arange(chosen.shape[1]) < counts[:, None]
        rows = torch.unique(chosen[real])
        # What stands behind the real ones may be no wanted position; nobody reads its index.
        index = torch.searchsorted(rows, chosen).clamp_(max=max(len(rows) - 1, 0))
        cut = int(torch.searchsorted(rows, starts[s.request_idx]))
        positions = rows.numpy()
        wanted.append(Wanted(s.request_idx, positions[:cut], positions[cut:], index))
    return wanted


@define(eq=False)
class Union:
    """The rows of one part of a selection; made by a collective that tells owners what to send."""

    facts: StepFacts
    shard: ShardRows
    part: int
    selection: Selection
    _wanted: list[Wanted] = field(init=False)
    _send: list[tuple[int, Ints]] = field(init=False, factory=list)
    _counts: list[int] = field(init=False)
    _received: list[int] = field(init=False)
    _groups: tuple[Group, ...] = field(init=False)

    @classmethod
    def agree(
        cls,
        comm: Comm,
        facts: StepFacts,
        shard: ShardRows,
        part: int,
        selection: Selection,
        counters: Counters,
    ) -> "Union":
        """A collective: every rank says which rows of whose shard it wants."""
        union = cls(facts, shard, part, selection)
        starts = [r.start for r in facts.requests]
        union._wanted = wanted_rows(selection, starts)
        owner, local = union._owners()
        union._tell(exchange_lists(comm, facts, union._asked(owner, local), union._num, counters))
        union._place(owner)
        return union

    def _num(self, rank: int) -> int:
        return len(self.facts.requests)

    def _owners(self) -> tuple[Ints, Ints]:
        """Shard and local index of every cached row wanted, request after request."""
        sharding = self.facts.placement.sharding
        cached = joined([w.cached for w in self._wanted])
        return sharding.owner(cached), sharding.local(cached)

    def _asked(self, owner: Ints, local: Ints) -> list[Lists]:
        """By member: the local indices wanted of it, a list for each request of the step."""
        request = joined([np.full(len(w.cached), w.request, np.int64) for w in self._wanted])
        num = len(self.facts.requests)
        return [
            Lists(np.bincount(request[owner == s], minlength=num), local[owner == s])
            for s in range(self.facts.num_shards)
        ]

    def _tell(self, asked: list[Lists]) -> None:
        self._counts = [0] * self.facts.size
        for rank, lists in zip(self.facts.askers, asked, strict=True):
            self._counts[rank] = len(lists.values)
            self._send += enumerate(lists.split())

    def _place(self, owner: Ints) -> None:
        """Where each wanted row will stand: cached rows by the rank they come from, then new ones;
        and which of them each query reads."""
        rank = np.array(self.facts.members, np.int64)[owner]
        self._received = np.bincount(rank, minlength=self.facts.size).tolist()
        place = np.empty(len(owner), np.int64)
        place[np.argsort(rank, kind="stable")] = np.arange(len(owner))
        topk, counts = self.selection.topk, self.selection.counts
        width = group_size(max((w.index.shape[1] for w in self._wanted), default=0), topk)
        rows, cached, new = [], 0, len(owner)
        for w in self._wanted:
            here = np.arange(new, new + len(w.new))
            both = torch.from_numpy(np.concatenate([place[cached : cached + len(w.cached)], here]))
            index = both[w.index]
            rows.append(torch.cat([index, index[:, :1].expand(-1, width - index.shape[1])], 1))
            cached, new = cached + len(w.cached), new + len(w.new)
        self._groups = groups_of(torch.cat(rows), counts, topk) if rows else ()

    def fetch(self, component: str) -> Fetch:
        """One exchange of a component's rows."""
        nbytes = self.facts.layout.spec[component].record.nbytes

        def run(comm: Comm) -> Tensor:
            rows = self.shard.read(component, self._send)
            return comm.all_to_all(rows, self._counts, self._received)[0]

        total = sum(self._received)
        others = total - self._received[self.facts.rank]
        return Fetch("attention rows", component, self.part, total * nbytes, others * nbytes, run)

    def attend(self, component: str, queries: Tensor, cached: Tensor, fresh: FreshRows) -> Tensor:
        """Attention of the part's queries over the rows that `fetch` has brought."""
        new = [fresh.rows(component, w.request, w.new) for w in self._wanted if len(w.new)]
        record = self.facts.layout.spec[component].record
        return attend_rows(record, torch.cat([cached, *new]), queries, self._groups)


def cut_selection(selection: Selection, start: int, stop: int) -> Selection:
    """The queries [start, stop) of a selection."""
    segments, chosen, lo = [], [], 0
    for s, c in zip(selection.segments, selection.chosen, strict=True):
        part = slice(max(start - lo, 0), max(stop - lo, 0))
        if len(c[part]):
            segments.append(Segment(s.request_idx, s.positions[part], s.context_len))
            chosen.append(c[part])
        lo += len(s)
    return Selection(tuple(segments), tuple(chosen), selection.counts[start:stop], selection.topk)
