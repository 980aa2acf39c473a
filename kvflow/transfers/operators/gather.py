"""AllGather: rows that are sharded over a group, packed as they are, to every rank of it."""

from itertools import product

import numpy as np
import torch
from attrs import field, frozen

from kvflow.comm import Comm
from kvflow.errors import LayoutError
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, slots_of
from kvflow.layouts.sharding import Ints, Replicated
from kvflow.transfers.executors.base import RankCache, check_pages
from kvflow.transfers.executors.collective import GatherSchedule, gather_schedule
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.protocol import (
    Caches,
    Operator,
    Tokens,
    check_bound,
    check_claims,
)
from kvflow.transfers.planner import plan_transfer


@frozen
class GatherReport:
    """What the collectives of one run carry: each row counted once, though size - 1 ranks receive
    it. `padding_nbytes` is what a padded gather sends and nobody keeps."""

    num_collectives: int
    payload_nbytes: int
    padding_nbytes: int

    @property
    def wire_nbytes(self) -> int:
        return self.payload_nbytes + self.padding_nbytes


@frozen(eq=False)
class AllGather(Operator):
    """Tokens sharded over the ranks of a group -> a copy of all of them on each of those ranks.

    Law: read(target, t) == read(source, t) on every rank. Rows stay in the encoding of the cache,
    an fp8 row is 656 bytes on the wire. Run by every rank of `comm` alike, each with its own
    caches. The number of collectives and their sizes follow from the layouts and the token range
    alone, so they are equal on all ranks, and a rank without tokens joins every one. With `padded`
    all ranks send as many rows as the fullest one, and the filling is skipped on arrival.

    Raises `LayoutError` unless `target` is replicated over exactly the ranks of `source`, those
    are 0..n-1 of the group, and each holds all heads of the components."""

    source: KVLayout
    target: KVLayout
    comm: Comm
    components: tuple[str, ...] = field()
    padded: bool = field(default=False, kw_only=True)

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.source.spec.names

    def __attrs_post_init__(self) -> None:
        here, there = self.source.placement, self.target.placement
        if there.sharding.num_shards != 1 or here.all_ranks != there.all_ranks:
            raise LayoutError(
                f"AllGather needs a target replicated over the ranks of the source "
                f"{here.all_ranks}, got {there}"
            )
        if here.all_ranks != tuple(range(self.comm.size)):
            raise LayoutError(
                f"AllGather over ranks {here.all_ranks}, the group has 0..{self.comm.size - 1}"
            )
        for layout, name in product((self.source, self.target), self.components):
            shards = layout.head_shards(name)
            if len(shards) > 1 or shards[0].placement.all_ranks != here.all_ranks:
                raise LayoutError(
                    f"{name}: AllGather moves whole rows between all ranks, in [{layout}] not "
                    f"every rank holds all its heads"
                )
        check_claims(self)

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        check_bound(self, bound)
        rank = self.comm.rank
        for part, name in ((p, name) for p in bound.plan.parts for name in p.components):
            check_pages(sources[rank], bound.src, part.src_group, name, f"source rank {rank}", rank)
            check_pages(targets[rank], bound.dst, part.dst_group, name, f"target rank {rank}", rank)
        for part in bound.plan.parts:
            schedule = self._schedule(part.start, part.stop)
            src_slots = _slots(bound.src, part.src_group, schedule.send[rank][1])
            positions = np.arange(part.start, part.stop)
            dst_local = self.target.placement.sharding.local(positions)
            dst_slots = _slots(bound.dst, part.dst_group, dst_local)
            for name in part.components:
                self._gather(name, schedule, src_slots, dst_slots, sources[rank], targets[rank])

    def report(self, tokens: Tokens) -> GatherReport:
        """What gathering `tokens` puts on the wire; derived, nothing moves."""
        schedule = self._schedule(*tokens)
        row = sum(self.source.spec[name].record.nbytes for name in self.components)
        payload = row * (tokens[1] - tokens[0])
        return GatherReport(len(self.components), payload, row * sum(schedule.counts) - payload)

    def _schedule(self, start: int, stop: int) -> GatherSchedule:
        """Who sends which rows, and where they arrive in one dense buffer of ``[start, stop)``."""
        once = Placement.simple(Replicated(start, stop))
        rows = KVLayout.uniform(self.source.spec, once, Dense(max(stop - start, 1)))
        plain = KVLayout.uniform(self.source.spec, self.source.placement, Dense(max(stop, 1)))
        plan = plan_transfer(plain, rows, (start, stop))
        return gather_schedule([plan], self.comm.size, padded=self.padded)

    def _gather(
        self,
        name: str,
        schedule: GatherSchedule,
        src_slots: Ints,
        dst_slots: Ints,
        source: RankCache,
        target: RankCache,
    ) -> None:
        rows = gather_rows(source.pages[name], torch.from_numpy(src_slots))
        full = rows.new_empty(len(dst_slots), rows.shape[1])
        schedule.gather(self.comm, rows, [full])
        scatter_rows(target.pages[name], torch.from_numpy(dst_slots), full)


def _slots(binding: Binding, group: str, local: Ints) -> Ints:
    return slots_of(binding.layout.group(group).paging, binding.tables[group], local)
