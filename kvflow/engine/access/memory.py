"""PagedMemory: a rank's share of the KV cache in pages, and how its steps reach the others'."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import define, field

from kvflow.comm import Background, Comm, Inline, Lane
from kvflow.comm.blobs import all_gather_blobs
from kvflow.engine.access.alone import AloneStep
from kvflow.engine.access.counters import Counters, StepLog
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.options import AccessOptions
from kvflow.engine.access.shard import PageShard
from kvflow.engine.access.step import PagedStep
from kvflow.engine.memory import StepRequest
from kvflow.errors import LayoutError
from kvflow.kernels.slots import SlotRows
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.executors.base import RankCache


@define(eq=False)
class PagedMemory:
    """A `KVMemory` of pages. `options` must be equal on all ranks, which the first step checks;
    what a step cannot know alike on all ranks decides nothing."""

    layout: KVLayout
    cache: RankCache
    comm: Comm
    options: AccessOptions = field(factory=AccessOptions)
    counters: Counters = field(init=False, factory=Counters)
    log: StepLog = field(init=False, factory=StepLog)
    """Of the last step opened."""
    _lane: Lane | None = field(init=False, default=None)

    @cached_property
    def _rows(self) -> dict[str, SlotRows]:
        return {name: SlotRows(pages) for name, pages in self.cache.pages.items()}

    @property
    def workspace_nbytes(self) -> int:
        return self.counters.workspace_peak_nbytes

    @property
    def gauges(self) -> Mapping[str, float]:
        return self.counters.gauges()

    @property
    def totals(self) -> Mapping[str, float]:
        return self.counters.totals()

    def open(
        self, requests: Sequence[StepRequest], write_only: frozenset[str]
    ) -> PagedStep | AloneStep:
        """A collective when first called."""
        if self.comm.size == 1 and self.layout.placement.sharding.num_shards == 1:
            return AloneStep(StepFacts(self.layout, self.comm.rank, requests, 1), self._rows)
        if self._lane is None:
            self._lane = self._agree()
        self.log = StepLog()
        facts = StepFacts(self.layout, self.comm.rank, requests, self.comm.size)
        shard = PageShard(facts, self.cache)
        return PagedStep(
            facts, shard, self.comm, self._lane, self.options, write_only, self.counters, self.log
        )

    def flush(self, request_id: str) -> None:
        """Every row is in `cache` as soon as it is published."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept besides blocks."""

    def _agree(self) -> Lane:
        """A collective. Raises `LayoutError` where ranks have other options or another layout."""
        if self.comm.size == 1 or self.layout.placement.sharding.num_shards == 1:
            return Inline(self.comm)
        mine = f"{self.layout} {self.options}".encode()
        for rank, theirs in enumerate(all_gather_blobs(self.comm, mine)):
            if theirs != mine:
                raise LayoutError(
                    f"rank {self.comm.rank} reads [{mine.decode()}], rank {rank} "
                    f"[{theirs.decode()}]; a group must do alike"
                )
        return Background(self.comm.channel()) if self.options.overlap else Inline(self.comm)
