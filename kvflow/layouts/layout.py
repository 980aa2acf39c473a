"""KVLayout: spec x token placement x paging, and the bindings that make it concrete."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import SupportsIndex, TypeVar

import numpy as np
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import Contiguous
from kvflow.layouts.mesh import Placement, rank_groups, rank_ids
from kvflow.layouts.paging import Paging, kernel_slots, num_entries
from kvflow.layouts.pieces import Heads
from kvflow.layouts.record import Record
from kvflow.layouts.sharding import Ints, IntsLike, frozen_ints
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.values import integer, names, tuple_of

T = TypeVar("T", int, str)


@frozen
class CacheGroup:
    """Components that share one block table, and their paging."""

    name: str
    components: tuple[str, ...] = field(converter=names)
    paging: Paging

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.paging, Paging):
            raise LayoutError(f"group {self.name!r}: {self.paging!r} is no paging")

    def __str__(self) -> str:
        return f"{self.name}:{self.paging}[{len(self.components)}]"


def _groups(groups: Iterable[CacheGroup]) -> tuple[CacheGroup, ...]:
    return tuple_of(CacheGroup, groups)


@frozen
class Stage:
    """Layer split: the components that only these ranks hold (a pipeline stage)."""

    components: tuple[str, ...] = field(converter=names)
    ranks: tuple[int, ...] = field(converter=rank_ids)

    def __str__(self) -> str:
        return f"{len(self.components)} components on {','.join(map(str, self.ranks))}"


def _stages(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    return tuple_of(Stage, stages)


@frozen
class HeadShard:
    """The heads ``[start, stop)`` of a component, and which ranks hold which of their tokens."""

    heads: Heads
    placement: Placement


@frozen(cache_hash=True)
class KVLayout:
    """Where every byte of a request's KV cache lives, up to the late bindings.

    Maps (component, token, head, field) to one address per replica: total on the tokens of the
    sharding, injective within a replica. A product of three shardings: `placement` deals tokens;
    `head_ranks` are the ranks by TP coordinate, to which heads are dealt contiguously (by default
    every rank holds all heads, and where coordinates outnumber heads they share them); `stages`
    deal components. `hosts` groups the ranks that can copy to each other without a link.
    """

    spec: KVCacheSpec
    placement: Placement
    groups: tuple[CacheGroup, ...] = field(converter=_groups)
    head_ranks: tuple[tuple[int, ...], ...] = field(default=(), converter=rank_groups)
    stages: tuple[Stage, ...] = field(default=(), converter=_stages)
    hosts: tuple[tuple[int, ...], ...] = field(default=(), converter=rank_groups)

    def __attrs_post_init__(self) -> None:
        _check_once("groups", "component", [g.components for g in self.groups], self.spec.names)
        group_names = [g.name for g in self.groups]
        if len(set(group_names)) != len(group_names):
            raise LayoutError(f"groups named twice: {group_names}")
        if self.head_ranks:
            _check_once("head_ranks", "rank", self.head_ranks, self.ranks)
        if self.stages:
            _check_once("stages", "component", [s.components for s in self.stages], self.spec.names)
            if odd := sorted({r for s in self.stages for r in s.ranks} - set(self.ranks)):
                raise LayoutError(f"stage ranks {odd} are not of the layout's {self.ranks}")
        flat = [rank for host in self.hosts for rank in host]
        if len(set(flat)) != len(flat) or not set(flat) <= set(self.ranks):
            raise LayoutError(f"hosts {self.hosts} must group ranks of {self.ranks}, each once")
        for component in self.spec.names:
            self.head_shards(component)

    @classmethod
    def uniform(
        cls, spec: KVCacheSpec, placement: Placement, paging: Paging, group: str = "kv"
    ) -> "KVLayout":
        """All components in one group: one block id stands for a page of each."""
        return cls(spec, placement, (CacheGroup(group, spec.names, paging),))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.placement.all_ranks

    def group(self, name: str) -> CacheGroup:
        for g in self.groups:
            if g.name == name:
                return g
        raise LayoutError(f"no group {name!r} in {[g.name for g in self.groups]}")

    def group_of(self, component: str) -> CacheGroup:
        group = self._groups_by_component.get(component)
        if group is None:
            raise LayoutError(f"no component {component!r} in {list(self.spec.names)}")
        return group

    @cached_property
    def _groups_by_component(self) -> Mapping[str, CacheGroup]:
        groups = {name: group for group in self.groups for name in group.components}
        return MappingProxyType(groups)

    def head_shards(self, component: str) -> tuple[HeadShard, ...]:
        """Who holds which heads of a component, ascending by head. Raises `LayoutError` for TP
        coordinates that are neither fewer than the heads nor a multiple of them."""
        num_heads = self.spec[component].record.num_heads
        stage = next((s.ranks for s in self.stages if component in s.components), None)
        return _head_shards(self.placement, self.head_ranks, num_heads, stage)

    def head_shard_of(self, component: str, rank: int) -> HeadShard | None:
        """The heads of a component on a rank, None where the rank holds nothing of it."""
        for shard in self.head_shards(component):
            if rank in shard.placement.all_ranks:
                return shard
        return None

    def components_of(self, rank: int) -> tuple[str, ...]:
        """The components of which a rank holds anything."""
        return tuple(c for c in self.spec.names if self.head_shard_of(c, rank) is not None)

    def local_record(self, component: str, rank: int) -> Record:
        """The record that a rank stores: that of the heads it holds. Raises `LayoutError` for a
        rank without the component."""
        record = self.local_records.get(rank, {}).get(component)
        if record is None:
            raise LayoutError(f"rank {rank} holds nothing of {self.spec[component].name}")
        return record

    @cached_property
    def local_records(self) -> Mapping[int, Mapping[str, Record]]:
        """The records that each rank stores, by component."""
        records: dict[int, dict[str, Record]] = {rank: {} for rank in self.ranks}
        for name in self.spec.names:
            for shard in self.head_shards(name):
                first, end = shard.heads
                record = self.spec[name].record.with_heads(end - first)
                for rank in shard.placement.all_ranks:
                    records[rank][name] = record
        return MappingProxyType({rank: MappingProxyType(held) for rank, held in records.items()})

    def host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the same host, the rank itself among them."""
        return next((host for host in self.hosts if rank in host), (rank,))

    def num_blocks_for(self, length: int) -> dict[str, int]:
        """Block ids a request of `length` tokens needs, by group."""
        return {g.name: num_entries(self.placement, g.paging, length) for g in self.groups}

    def __str__(self) -> str:
        heads = [f"heads/{len(self.head_ranks)}"] if self.head_ranks else []
        stages = [f"stages/{len(self.stages)}"] if self.stages else []
        return " ".join([str(self.placement), *heads, *stages, *map(str, self.groups)])


def _check_once(what: str, member: str, parts: Iterable[Iterable[T]], wanted: Sequence[T]) -> None:
    placed = [one for part in parts for one in part]
    if sorted(placed) != sorted(wanted):
        odd = sorted(set(placed) ^ set(wanted))
        raise LayoutError(f"{what} must place every {member} once; not so for {odd or placed}")


@lru_cache(1024)
def _head_shards(
    placement: Placement,
    head_ranks: tuple[tuple[int, ...], ...],
    num_heads: int,
    stage: tuple[int, ...] | None,
) -> tuple[HeadShard, ...]:
    if stage is not None:
        placement = placement.on(stage)
    if not head_ranks:
        return (HeadShard((0, num_heads), placement),)
    num_coordinates = len(head_ranks)
    num_shards = min(num_coordinates, num_heads)
    if num_shards == num_heads and num_coordinates % num_heads:
        raise LayoutError(
            f"{num_coordinates} TP coordinates share {num_heads} heads: must be at most as many, "
            f"or a multiple"
        )
    heads = Contiguous(num_shards, 0, num_heads).edges
    holders = Contiguous(num_shards, 0, num_coordinates).edges
    shards = []
    for i in range(num_shards):
        ranks = [r for group in head_ranks[holders[i] : holders[i + 1]] for r in group]
        held = [r for r in ranks if r in placement.all_ranks]
        shards.append(HeadShard((int(heads[i]), int(heads[i + 1])), placement.on(held)))
    return tuple(shards)


def _tables(tables: Mapping[str, IntsLike]) -> Mapping[str, Ints]:
    return MappingProxyType({name: frozen_ints(ids) for name, ids in tables.items()})


def _counts(counts: Mapping[str, SupportsIndex]) -> Mapping[str, int]:
    return MappingProxyType({name: integer(n, name) for name, n in counts.items()})


def _check_keys(what: str, given: Mapping[str, object], wanted: Iterable[str]) -> None:
    wanted = set(wanted)
    if unknown := sorted(str(name) for name in given.keys() - wanted):
        raise LayoutError(f"{what}: {unknown} are not of this layout")
    if missing := sorted(wanted - given.keys()):
        raise LayoutError(f"{what}: {missing} are missing")


@frozen(eq=False)
class Binding:
    """One request in one cache: the block table of each group (shared by all ranks), the number
    of blocks its pool has, and how many positions hold valid KV, by component. All three are
    read-only copies."""

    layout: KVLayout
    tables: Mapping[str, Ints] = field(converter=_tables)
    num_blocks: Mapping[str, int] = field(converter=_counts)
    lengths: Mapping[str, int] = field(converter=_counts)

    def __attrs_post_init__(self) -> None:
        groups = [g.name for g in self.layout.groups]
        _check_keys("tables by group", self.tables, groups)
        _check_keys("num_blocks by group", self.num_blocks, groups)
        _check_keys("lengths by component", self.lengths, self.layout.spec.names)
        for group in self.layout.groups:
            ids, pool = self.tables[group.name], self.num_blocks[group.name]
            if ids.ndim != 1 or (ids.size and not (ids.min() >= 0 and ids.max() < pool)):
                raise LayoutError(
                    f"group {group.name}: block ids {ids.tolist()[:8]} must be in [0, {pool})"
                )
            if len(np.unique(ids)) != len(ids):
                raise LayoutError(f"group {group.name}: a block id stands twice in one table")
            self._check_entries(group)

    def _check_entries(self, group: CacheGroup) -> None:
        entries = len(self.tables[group.name])
        lengths = {self.lengths[name] for name in group.components}
        need = {n: num_entries(self.layout.placement, group.paging, n) for n in lengths}
        for name in group.components:
            length = self.lengths[name]
            if need[length] > entries:
                raise LayoutError(
                    f"{name}: {length} tokens need {need[length]} entries of "
                    f"{group.paging.block_size}, the table has {entries}"
                )

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        tables: Mapping[str, IntsLike],
        num_blocks: Mapping[str, int],
        length: int,
        shorter: Mapping[str, int] | None = None,
    ) -> "Binding":
        """`length` valid tokens in every component, but for those named in `shorter`."""
        lengths = dict.fromkeys(layout.spec.names, length) | dict(shorter or {})
        return cls(layout, tables, num_blocks, lengths)

    def slots(self, group: str, positions: IntsLike, rank: int) -> Ints:
        """Slots on `rank`, -1 where another rank owns the position."""
        paging = self.layout.group(group).paging
        return kernel_slots(self.layout.placement, paging, self.tables[group], positions, rank)

    def restricted(self, components: Iterable[str]) -> dict[str, int]:
        return {name: self.lengths[name] for name in components}
