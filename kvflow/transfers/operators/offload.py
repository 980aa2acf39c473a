"""Offload and Restore: device pages -> a host pool or files with one copy a shard, and back."""

from attrs import evolve, field, frozen

from kvflow.errors import LayoutError, PlanError
from kvflow.layouts.layout import KVLayout, Stage
from kvflow.transfers.executors.base import Executor, check_pages_of
from kvflow.transfers.executors.strided import move_link
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.difference import first_difference
from kvflow.transfers.operators.protocol import Caches, Operator, check_bound, check_claims


def narrowed(layout: KVLayout, ranks: tuple[int, ...]) -> KVLayout:
    """The same layout on some of its ranks alone. Raises `LayoutError` if they do not hold all of
    it."""
    return evolve(
        layout,
        placement=layout.placement.on(ranks),
        head_ranks=_only(layout.head_ranks, ranks),
        stages=tuple(
            Stage(s.components, tuple(r for r in s.ranks if r in ranks)) for s in layout.stages
        ),
        hosts=tuple(host for host in _only(layout.hosts, ranks) if host),
    )


def _only(
    groups: tuple[tuple[int, ...], ...], ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(r for r in group if r in ranks) for group in groups)


def check_one_copy(layout: KVLayout, components: tuple[str, ...]) -> None:
    """Raises `LayoutError` if a layout stores a shard more than once."""
    for name in components:
        for shard in layout.head_shards(name):
            for i, group in enumerate(shard.placement.ranks):
                if len(group) > 1:
                    raise LayoutError(
                        f"{name}: shard {i} would be stored {len(group)} times, on ranks {group}; "
                        f"a tier holds one copy of each"
                    )


class RankLocal:
    """An executor of plans in which every byte stays on its rank. It moves what the ranks it is
    given hold; other processes do the same for theirs."""

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for src_rank, dst_rank in bound.plan.links:
            if src_rank != dst_rank:
                raise PlanError(f"the plan moves from rank {src_rank} to rank {dst_rank}")
        here = set(sources) & set(targets)
        mine = ({r: side[r] for r in here} for side in (sources, targets))
        check_pages_of(bound.plan, bound.src, bound.dst, *mine)
        for rank in here:
            for part, _, runs in bound.links_to(rank):
                move_link(runs, part.components, sources[rank].pages, targets[rank].pages)


@frozen(eq=False)
class Offload(Operator):
    """Each shard, from one of the ranks that hold it, to the tier of that rank.

    `target` is the tier: the shards of `source` on one rank each, with pages of its own (a host
    pool of pages or rows, or files). No byte crosses a link; replicas are stored once. Law:
    read(target, t) == read(source, t). Raises `LayoutError` at construction for a tier that
    stores a shard twice or on a rank that does not hold it."""

    source: KVLayout
    target: KVLayout
    via: Executor = field(factory=RankLocal)
    components: tuple[str, ...] = field()

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.target.spec.names

    def __attrs_post_init__(self) -> None:
        check_one_copy(self.target, self.components)
        here, there = self.planned
        for name in self.components:
            if difference := first_difference(here.head_shards(name), there.head_shards(name)):
                raise LayoutError(
                    f"{name}: the tier [{self.target}] does not hold the shards of "
                    f"[{self.source}]: {difference}"
                )
        check_claims(self)

    @property
    def planned(self) -> tuple[KVLayout, KVLayout]:
        """The plan reads the ranks that have a tier, no other replica."""
        return narrowed(self.source, self.target.ranks), self.target

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        """Ranks without a tier may call it too: they do nothing."""
        check_bound(self, bound)
        if set(sources) & set(self.target.ranks):
            self.via.execute(bound, sources, targets)


@frozen(eq=False)
class Restore(Operator):
    """From a tier to any layout, derived anew: the tier's own placement is part of `source`.

    Law: read(target, t) == read(source, t) on every replica of the target. Raises `LayoutError`
    at construction for a source that stores a shard twice."""

    source: KVLayout
    target: KVLayout
    via: Executor
    components: tuple[str, ...] = field()

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.source.spec.names

    def __attrs_post_init__(self) -> None:
        check_one_copy(self.source, self.components)
        check_claims(self)

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        check_bound(self, bound)
        self.via.execute(bound, sources, targets)
