"""One rank's way to the units of the host tier: which rows it writes there and takes from there."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from attrs import define

from kvflow.engine.messages import AttachTier, StepItem, UnitRows
from kvflow.engine.tiers.memory import GROUP, UnitMemory, unit_layout
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.here import LinksHere
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


@define(eq=False)
class UnitPort:
    """Moves rows between one rank's blocks and the units that all ranks map. The plans decide which
    replica of a shard writes a row, so each row is written once; every rank that holds a row takes
    it from there."""

    layout: KVLayout
    cache: RankCache
    num_blocks: Mapping[str, int]
    units: UnitMemory

    @classmethod
    def attach(
        cls,
        layout: KVLayout,
        cache: RankCache,
        num_blocks: Mapping[str, int],
        tier: AttachTier,
        *,
        writes: bool = True,
    ) -> "UnitPort":
        """Of a rank that only takes rows unless it `writes`. Raises `TransferError` if the tier is
        of other rows."""
        size = tier.unit_size, tier.num_units
        units = UnitMemory.attach(tier.name, layout.spec, *size, writable=writes)
        return cls(layout, cache, num_blocks, units)

    def load(self, items: Sequence[StepItem]) -> list[str]:
        """Brings what the items take from units into their blocks. Returns the requests whose
        units are not labelled, after the reading, as they must be: what they got is worth
        nothing."""
        return [
            item.request_id
            for item in items
            if item.load is not None and not self.take_proven(item.load, item.tables)
        ]

    def take_proven(self, rows: UnitRows, tables: Mapping[str, Sequence[int]]) -> bool:
        """As `take`; whether the units are labelled, after the reading, as they must be."""
        self.take(rows, tables)
        return [self.units.label(unit) for unit in rows.units] == rows.labels

    def store(self, items: Sequence[StepItem]) -> None:
        """Writes this rank's rows of what the items store."""
        for item in items:
            for rows in item.store:
                self.give(rows, item.tables)

    def take(self, rows: UnitRows, tables: Mapping[str, Sequence[int]]) -> None:
        """This rank's part of the way from units to blocks."""
        tier, own = self._sides(rows, tables)
        plan = _plan(tier.layout, own.layout, rows.start, rows.stop)
        targets = {self.cache.rank: self.cache}
        LinksHere().execute(BoundPlan(plan, tier, own), {0: self.units.cache}, targets)

    def give(self, rows: UnitRows, tables: Mapping[str, Sequence[int]]) -> None:
        """This rank's part of the way from blocks to units."""
        tier, own = self._sides(rows, tables)
        plan = _plan(own.layout, tier.layout, rows.start, rows.stop)
        sources = {self.cache.rank: self.cache}
        LinksHere().execute(BoundPlan(plan, own, tier), sources, {0: self.units.cache})

    def _sides(
        self, rows: UnitRows, tables: Mapping[str, Sequence[int]]
    ) -> tuple[Binding, Binding]:
        first = rows.start - rows.skipped
        tier = unit_layout(self.units.spec, self.units.unit_size, first)
        there, all_units = {GROUP: rows.units}, {GROUP: self.units.num_units}
        return (
            Binding.of(tier, there, all_units, rows.stop),
            Binding.of(self.layout, tables, self.num_blocks, rows.stop),
        )


@lru_cache(16)
def _plan(src: KVLayout, dst: KVLayout, start: int, stop: int) -> Plan:
    return plan_transfer(src, dst, (start, stop))
