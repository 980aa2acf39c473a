"""Rows that a request takes over from blocks of its own rank before it computes."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from attrs import define

from kvflow.engine.messages import StepItem
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.offload import RankLocal, narrowed
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


@define(eq=False)
class RowCopier:
    """Carries out the copies of a step on one rank; nothing crosses a link, for a shard's rows
    come from the blocks of the rank that wants them."""

    layout: KVLayout
    cache: RankCache
    num_blocks: Mapping[str, int]

    def copy(self, items: Sequence[StepItem]) -> None:
        """Brings every row that the items take over into their own blocks."""
        here = {self.cache.rank: self.cache}
        for item in items:
            if item.copy is None:
                continue
            for group, spans in item.copy.spans.items():
                for start, stop in spans:
                    plan = _own_rows(self.layout, self.cache.rank, group, start, stop)
                    source = Binding.of(plan.src, item.copy.tables, self.num_blocks, stop)
                    target = Binding.of(plan.dst, item.tables, self.num_blocks, stop)
                    RankLocal().execute(BoundPlan(plan, source, target), here, here)


@lru_cache(64)
def _own_rows(layout: KVLayout, rank: int, group: str, start: int, stop: int) -> Plan:
    """From one table to another of the same cache: each shard from one rank, this one's from the
    rank itself."""
    groups = layout.placement.ranks
    ranks = tuple(rank if rank in replicas else replicas[0] for replicas in groups)
    mine = narrowed(layout, ranks)
    components = layout.group(group).components
    absent = set(layout.spec.names) - set(components)
    return plan_transfer(mine, mine, (start, stop), components=components, absent=absent)
