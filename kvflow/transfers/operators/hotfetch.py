"""HotFetch: rows of a host pool, named by position, into slots of a device's hot buffer.

Two pools, two kinds of ids: a `HostSlots` never stands where a `DeviceSlots` is asked for.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import field, frozen

from kvflow.errors import LayoutError, PlanError
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.paging import PADDING_SLOT, kernel_slots
from kvflow.layouts.sharding import Ints, IntsLike, frozen_ints
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.values import names
from kvflow.transfers.executors.base import RankCache, check_form
from kvflow.transfers.operators.difference import first_difference
from kvflow.transfers.operators.protocol import check_sides

NO_POSITION = -1
"""A lane of a top-k that holds nothing."""


@frozen(eq=False)
class HostSlots:
    """Slots of a host pool; int64 [n], read-only."""

    ids: Ints = field(converter=frozen_ints)


@frozen(eq=False)
class DeviceSlots:
    """Slots of a hot buffer on a device; int64 [n], read-only."""

    ids: Ints = field(converter=frozen_ints)


@frozen(eq=False)
class Misses:
    """Rows that one request needs: ``positions[i]`` is to land in hot slot ``slots.ids[i]``.

    positions: int64 [n], `NO_POSITION` in lanes that name nothing; what `slots` has there is not
    looked at. request: its place in the host pool. Raises `LayoutError` for slots of another pool,
    lengths that differ, a position below -1, a slot below 0, or a request that is no binding."""

    request: Binding
    positions: Ints = field(converter=frozen_ints)
    slots: DeviceSlots

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.request, Binding):
            raise LayoutError(f"the request is a {type(self.request).__name__}, must be a Binding")
        if not isinstance(self.slots, DeviceSlots):
            raise LayoutError(f"hot rows land in DeviceSlots, got {type(self.slots).__name__}")
        if self.positions.ndim != 1 or self.positions.shape != self.slots.ids.shape:
            raise LayoutError(
                f"{list(self.positions.shape)} positions for {list(self.slots.ids.shape)} slots"
            )
        if (low := self.positions[self.positions < NO_POSITION]).size:
            raise LayoutError(f"position {int(low[0])} must be at least {NO_POSITION}")
        if (low := self.slots.ids[self.lanes & (self.slots.ids < 0)]).size:
            raise LayoutError(f"hot slot {int(low[0])} of a position must be at least 0")

    @property
    def lanes(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Which lanes name a position."""
        named: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.positions != NO_POSITION
        return named


@frozen
class FetchReport:
    """Rows and bytes that one fetch moved; a row of two components counts twice."""

    num_rows: int
    nbytes: int


@frozen(eq=False)
class HotFetch:
    """From a host pool to a hot buffer, row by row, for all layers that share a top-k at once.

    `components` are those layers (see `index_groups`): slots are worked out once for all of them.
    Law: read(target, slot_i) == read(source, position_i) for every lane that names a position its
    rank owns, every claimed component and field, and no other byte of the hot buffer changes.
    Raises at construction `LayoutError` unless both sides have the components, one or more and each
    once, and deal tokens alike to the same ranks, and what planning raises for content that
    differs."""

    source: KVLayout
    target: KVLayout
    components: tuple[str, ...] = field(converter=names)

    @components.default
    def _all(self) -> tuple[str, ...]:
        return self.target.spec.names

    def __attrs_post_init__(self) -> None:
        self._check_components()
        for name in self.components:
            here, there = (side.head_shards(name) for side in (self.source, self.target))
            if difference := first_difference(here, there):
                raise LayoutError(
                    f"{name}: the hot buffer [{self.target}] is not dealt as the host pool "
                    f"[{self.source}]: {difference}"
                )
        for side, layout in (("host pool", self.source), ("hot buffer", self.target)):
            groups = {layout.group_of(name).name for name in self.components}
            if len(groups) > 1:
                raise LayoutError(
                    f"components of one fetch share slots, the {side} has them in {sorted(groups)}"
                )
        check_sides(self.source, self.target, self.components)

    def _check_components(self) -> None:
        each = set(self.components)
        if not each or len(each) != len(self.components):
            raise LayoutError(
                f"components {list(self.components)} of a fetch, must be one or more, each once"
            )
        for side, layout in (("host pool", self.source), ("hot buffer", self.target)):
            if missing := sorted(each - set(layout.spec.names)):
                raise LayoutError(f"the {side} has no {missing}, it has {list(layout.spec.names)}")

    def execute(
        self, misses: Sequence[Misses], source: RankCache, target: RankCache
    ) -> FetchReport:
        """Fetches for several requests in one go. `source` and `target` are one rank's; lanes of
        positions that another rank owns are left to it. Raises before a byte moves: `PlanError`
        for caches of two ranks, without a component or of other pages than the layout's, a request
        of another layout or positions it does not hold, `LayoutError` for a slot outside the buffer
        or one that two lanes name."""
        host, device = self._checked(misses, source, target)
        _check_once("hot", device.ids)
        return self._copy(host, device, source, target, back=False)

    def mirror(self, rows: Sequence[Misses], source: RankCache, target: RankCache) -> FetchReport:
        """The way back: rows that lie in slots of the hot buffer, into their places in the host
        pool. Law: read(source, position_i) == read(target, slot_i) afterwards, for the same lanes,
        and no other byte of the host pool changes. Raises as `execute` does, and `LayoutError` for
        a host slot that two lanes name in place of a hot one."""
        host, device = self._checked(rows, source, target)
        _check_once("host", host.ids)
        return self._copy(host, device, source, target, back=True)

    def _checked(
        self, misses: Sequence[Misses], source: RankCache, target: RankCache
    ) -> tuple[HostSlots, DeviceSlots]:
        if source.rank != target.rank:
            raise PlanError(f"host cache of rank {source.rank}, hot buffer of {target.rank}")
        for side, layout, cache in (
            ("host cache", self.source, source),
            ("hot buffer", self.target, target),
        ):
            if missing := sorted(set(self.components) - set(cache.pages)):
                raise PlanError(f"the {side} of rank {cache.rank} has no pages of {missing}")
            for name in self.components:
                check_form(cache.pages[name], layout, name, f"the {side}", cache.rank)
        host, device = self._slots(misses, source.rank)
        if device.ids.size:
            last = int(device.ids.max())
            for name in self.components:
                if last >= (size := target.pages[name].num_slots):
                    raise LayoutError(f"{name}: hot slot {last}, the buffer has {size}")
        return host, device

    def _copy(
        self,
        host: HostSlots,
        device: DeviceSlots,
        source: RankCache,
        target: RankCache,
        *,
        back: bool,
    ) -> FetchReport:
        here, there = (torch.from_numpy(slots.ids.copy()) for slots in (host, device))
        for name in self.components:
            sides = [(source.pages[name], here), (target.pages[name], there)]
            (read, at), (write, to) = reversed(sides) if back else sides
            rows = gather_rows(read, at.to(read.memory.device))
            device_of = write.memory.device
            scatter_rows(write, to.to(device_of), rows.to(device_of), check_unique=False)
        row = sum(source.pages[c].record.nbytes for c in self.components)
        return FetchReport(len(host.ids) * len(self.components), len(host.ids) * row)

    def _slots(self, misses: Sequence[Misses], rank: int) -> tuple[HostSlots, DeviceSlots]:
        host, device = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for miss in misses:
            positions, slots = miss.positions[miss.lanes], miss.slots.ids[miss.lanes]
            found = self._host_slots(miss.request, positions, rank)
            mine = found != PADDING_SLOT
            host.append(found[mine])
            device.append(slots[mine])
        return HostSlots(np.concatenate(host)), DeviceSlots(np.concatenate(device))

    def _host_slots(self, request: Binding, positions: IntsLike, rank: int) -> Ints:
        if difference := first_difference(self.source, request.layout):
            raise PlanError(f"the request lies in another host pool: {difference}")
        group = self.source.group_of(self.components[0])
        held = min(request.lengths[c] for c in self.components)
        asked = np.asarray(positions)
        if asked.size and int(asked.max()) >= held:
            raise PlanError(f"position {int(asked.max())} is asked for, the request holds {held}")
        placement, table = self.source.placement, request.tables[group.name]
        return kernel_slots(placement, group.paging, table, asked, rank)


def _check_once(pool: str, slots: Ints) -> None:
    ids, times = np.unique(slots, return_counts=True)
    if (times > 1).any():
        raise LayoutError(f"{pool} slot {int(ids[times > 1][0])} is named by two lanes")


def index_groups(spec: KVCacheSpec) -> tuple[tuple[str, ...], ...]:
    """The latent components that share a top-k: those of a layer with an indexer and of the layers
    behind it without one, in layer order. Raises `LayoutError` if the first has none.

    >>> from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
    >>> index_groups(KVCacheSpec.from_config(GLM_5_3))[2]
    ('latent.2', 'latent.3', 'latent.4', 'latent.5')
    """
    groups: list[list[str]] = []
    for component in spec.components:
        if component.kind != "latent":
            continue
        if f"indexer.{component.layer_id}" in spec.names:
            groups.append([])
        elif not groups:
            raise LayoutError(f"{component.name} has no layer with an indexer at or before it")
        groups[-1].append(component.name)
    return tuple(map(tuple, groups))
