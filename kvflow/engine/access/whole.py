"""Ranges of cached context, brought whole to every rank, packed as they are stored."""

from collections.abc import Sequence

from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.ahead import Fetch
from kvflow.engine.access.counters import Kind
from kvflow.engine.access.facts import Range, StepFacts
from kvflow.engine.access.shard import ShardRows
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.collective import GatherSchedule


@define(eq=False)
class WholeRanges:
    """Cached ranges of requests, at most one workspace full. `part` numbers several of these."""

    facts: StepFacts
    shard: ShardRows
    kind: Kind
    ranges: Sequence[Range]
    part: int = 0
    schedule: GatherSchedule = field(init=False)
    _send: list[tuple[int, Ints]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.schedule = self.facts.cached_schedule(self.ranges)
        which, local = self.schedule.send[self.facts.rank]
        self._send = [(request, local[which == i]) for i, (request, _, _) in enumerate(self.ranges)]

    def fetch(self, component: str) -> Fetch:
        """One all-gather of a component's rows."""
        counts, nbytes = self.schedule.counts, self.facts.layout.spec[component].record.nbytes

        def run(comm: Comm) -> Tensor:
            return comm.all_gather(self.shard.read(component, self._send), counts)

        total = sum(counts)
        others = total - counts[self.facts.rank]
        return Fetch(self.kind, component, self.part, total * nbytes, others * nbytes, run)

    def rows(self, gathered: Tensor, range_idx: int, positions: Tensor | None = None) -> Tensor:
        """Packed rows of one range, at positions int64 [m] in it or all of them, ascending."""
        places = self.schedule.arrival[range_idx]
        if positions is not None:
            places = places.index_select(0, positions - self.ranges[range_idx][1])
        return gathered.index_select(0, places)

    def rows_of(self, gathered: Tensor, request: int, positions: Tensor) -> Tensor:
        """Packed rows of a request at positions int64 [m], in the one range that it has."""
        range_idx = [r for r, _, _ in self.ranges].index(request)
        return self.rows(gathered, range_idx, positions)
