"""KVLayout: spec x token placement x paging, and the bindings that make it concrete."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import SupportsIndex

import numpy as np
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paging, kernel_slots, num_entries
from kvflow.layouts.sharding import Ints, IntsLike, frozen_ints
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.values import integer, names, tuple_of


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
class KVLayout:
    """Where every byte of a request's KV cache lives, up to the late bindings.

    Maps (component, token, field) to one address per replica: total on the tokens of the
    sharding, injective within a replica.
    """

    spec: KVCacheSpec
    placement: Placement
    groups: tuple[CacheGroup, ...] = field(converter=_groups)

    def __attrs_post_init__(self) -> None:
        placed = [c for g in self.groups for c in g.components]
        if sorted(placed) != sorted(self.spec.names):
            odd = sorted(set(placed) ^ set(self.spec.names))
            raise LayoutError(f"groups must place every component once; not so for {odd or placed}")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise LayoutError(f"groups named twice: {names}")

    @classmethod
    def uniform(
        cls, spec: KVCacheSpec, placement: Placement, paging: Paging, group: str = "kv"
    ) -> "KVLayout":
        """All components in one group: one block id stands for a page of each."""
        return cls(spec, placement, (CacheGroup(group, spec.names, paging),))

    def group(self, name: str) -> CacheGroup:
        for g in self.groups:
            if g.name == name:
                return g
        raise LayoutError(f"no group {name!r} in {[g.name for g in self.groups]}")

    def group_of(self, component: str) -> CacheGroup:
        for g in self.groups:
            if component in g.components:
                return g
        raise LayoutError(f"no component {component!r} in {list(self.spec.names)}")

    def num_blocks_for(self, length: int) -> dict[str, int]:
        """Block ids a request of `length` tokens needs, by group."""
        return {g.name: num_entries(self.placement, g.paging, length) for g in self.groups}

    def __str__(self) -> str:
        return " ".join([str(self.placement), *map(str, self.groups)])


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
