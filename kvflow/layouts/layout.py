"""KVLayout: spec x token placement x paging, and the bindings that make it concrete."""

from collections.abc import Iterable, Mapping

import numpy as np
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paging, kernel_slots, num_entries
from kvflow.layouts.sharding import Ints, IntsLike, as_ints
from kvflow.layouts.spec import KVCacheSpec


@frozen
class CacheGroup:
    """Components that share one block table, and their paging."""

    name: str
    components: tuple[str, ...]
    paging: Paging

    def __str__(self) -> str:
        return f"{self.name}:{self.paging}[{len(self.components)}]"


@frozen
class KVLayout:
    """Where every byte of a request's KV cache lives, up to the late bindings.

    Maps (component, token, field) to one address per replica: total on the tokens of the
    sharding, injective within a replica.
    """

    spec: KVCacheSpec
    placement: Placement
    groups: tuple[CacheGroup, ...]

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
    return {name: as_ints(ids) for name, ids in tables.items()}


@frozen(eq=False)
class Binding:
    """One request in one cache: the block table of each group (shared by all ranks), the number
    of blocks its pool has, and how many positions hold valid KV, by component."""

    layout: KVLayout
    tables: Mapping[str, Ints] = field(converter=_tables)
    num_blocks: Mapping[str, int]
    lengths: Mapping[str, int]

    def __attrs_post_init__(self) -> None:
        for group in self.layout.groups:
            ids, pool = self.tables[group.name], self.num_blocks[group.name]
            if ids.ndim != 1 or (ids.size and not (ids.min() >= 0 and ids.max() < pool)):
                raise LayoutError(
                    f"group {group.name}: block ids {ids.tolist()[:8]} must be in [0, {pool})"
                )
            if len(np.unique(ids)) != len(ids):
                raise LayoutError(f"group {group.name}: a block id stands twice in one table")
            for name in group.components:
                need = num_entries(self.layout.placement, group.paging, self.lengths[name])
                if need > len(ids):
                    raise LayoutError(
                        f"{name}: {self.lengths[name]} tokens need {need} entries of "
                        f"{group.paging.block_size}, the table has {len(ids)}"
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
