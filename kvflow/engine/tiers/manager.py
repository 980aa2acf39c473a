"""Tiers: what a prefill engine finds in its tiers, and what it stores there."""

import asyncio
from collections.abc import Mapping, Sequence

from attrs import define

from kvflow.engine.messages import AttachTier, UnitRows
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.hashes import Chain
from kvflow.engine.tiers.disk import DiskTier
from kvflow.engine.tiers.host import HostTier, Place
from kvflow.engine.tiers.memory import UnitMemory
from kvflow.engine.tiers.traffic import DiskTraffic
from kvflow.engine.tiers.unitfile import FileMover
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout


@define(eq=False)
class Tiers:
    """The tiers of one engine. Everything is decided here, in the front; ranks move the rows."""

    host: HostTier
    traffic: DiskTraffic | None = None

    @classmethod
    def create(
        cls, config: PrefixConfig, layout: KVLayout, files: FileMover | None
    ) -> "Tiers | None":
        """The tiers that a configuration asks for, None if it is none. Raises `CapacityError` for a
        size that holds no unit, and `KvflowError` for a directory of another disk tier or if
        nobody moves files."""
        if not config.host_nbytes:
            return None
        unit_size = config.unit_size(layout)
        disk = None
        if config.disk_directory is not None:
            if files is None:
                raise KvflowError(
                    f"a disk tier in {config.disk_directory}, but nothing moves files"
                )
            disk = DiskTier(config.disk_directory, config.disk_nbytes, unit_size, files)
        host = HostTier(UnitMemory.create(layout.spec, unit_size, config.host_nbytes))
        return cls(host, DiskTraffic(host, disk) if disk is not None else None)

    @property
    def num_under_way(self) -> int:
        """Units on their way to or from files."""
        return self.traffic.num_under_way if self.traffic is not None else 0

    def units(self) -> dict[str, dict[str, int]]:
        """Units by tier and state."""
        counts = {"host": self.host.counts()}
        if self.traffic is not None:
            counts["disk"] = {"published": len(self.traffic.disk)}
        return counts

    def events(self) -> dict[str, dict[str, int]]:
        """What ever happened, by tier and kind."""
        host = self.host
        events = {
            "host": {
                "stored": host.num_stored,
                "evicted": host.num_evicted,
                "store_refused": host.num_refused,
            }
        }
        if self.traffic is not None:
            disk = self.traffic.disk
            events["disk"] = {
                "stored": disk.num_stored,
                "evicted": disk.num_evicted,
                "store_refused": disk.num_store_refused,
                "file_refused": disk.num_refused,
            }
        return events

    @property
    def attachment(self) -> AttachTier:
        """What a rank needs to map the host tier."""
        memory = self.host.memory
        return AttachTier(memory.name, memory.unit_size, memory.num_units)

    # --- reading

    def match(self, chain: Chain, first: int, most: int) -> UnitRows | None:
        """The rows of the blocks from `first` on, below position `most`, that lie in units. The
        last row is left out if it was made with another token. None if there are none."""
        start, stop = first * chain.block_size, first * chain.block_size
        units, labels = [], []
        for k in range(first, min(len(chain), most // chain.block_size)):
            following = chain.following(k)
            unit = self.host.find(chain, k, following)
            if unit is None:
                if (other := self.host.variant(chain, k)) is not None:
                    unit, following = other
                    units.append(unit)
                    labels.append(chain.label(k, following))
                    stop = chain.stop(k) - 1
                break
            units.append(unit)
            labels.append(chain.label(k, following))
            stop = chain.stop(k)
        return UnitRows(start, stop, units, labels) if stop > start else None

    async def fetch(self, chain: Chain, first: int, most: int) -> tuple[list[int], set[int]]:
        """Brings the blocks from `first` on, below position `most`, from files into units as far as
        they are known. Returns the units of blocks that lie in the host tier now, pinned once for
        the caller, and which of them came from files."""
        if self.traffic is None:
            return [], set()
        wanted = range(first, min(len(chain), most // chain.block_size))
        held = {k: self.host.find(chain, k, chain.following(k)) for k in wanted}
        here = {k: unit for k, unit in held.items() if unit is not None}
        known = []
        for k in wanted:
            if k not in here and not self.traffic.knows(chain, k):
                break
            known.append(k)
        absent = [k for k in known if k not in here]
        self.host.pin(here.values())
        try:
            places = await asyncio.gather(*(self.traffic.fetch(chain, k) for k in absent))
            arrived = dict(zip(absent, places, strict=True))
            units = self._reached(chain, known, arrived)
            self.host.pin(units)
        finally:
            self.host.unpin(here.values())
        return units, set(units) - set(here.values())

    def _reached(
        self, chain: Chain, blocks: Sequence[int], arrived: Mapping[int, Place | None]
    ) -> list[int]:
        """The units of blocks that follow each other without a gap."""
        units: list[int] = []
        for k in blocks:
            place = arrived.get(k)
            following = chain.following(k) if place is None else place.following
            unit = self.host.find(chain, k, following)
            if unit is None:
                break
            units.append(unit)
        return units

    # --- writing

    def begin_stores(self, chain: Chain, first: int, stop: int) -> dict[int, int]:
        """Units for the blocks from `first` on that end at or below position `stop` and lie in no
        unit, by block. The first blocks of a chain are kept the longest."""
        stores = {}
        for k in reversed(range(first, min(len(chain), stop // chain.block_size))):
            try:
                place = Place(chain.hashes[k], chain.following(k))
            except LookupError:
                place = None
            if (unit := self.host.begin(place)) is not None:
                stores[k] = unit
        return stores

    def rows_of(self, chain: Chain, stores: Mapping[int, int]) -> list[UnitRows]:
        """What ranks are told of stores: one message for neighbouring blocks."""
        told: list[UnitRows] = []
        for k in sorted(stores):
            start, stop = chain.stop(k) - chain.block_size, chain.stop(k)
            if told and told[-1].stop == start:
                before = told.pop()
                told.append(UnitRows(before.start, stop, [*before.units, stores[k]]))
            else:
                told.append(UnitRows(start, stop, [stores[k]]))
        return told

    def end_stores(self, chain: Chain, stores: Mapping[int, int], sampled: int | None) -> None:
        """Every rank has written its rows: the units are found from now on. One whose last row was
        made with a token that nobody knows is discarded."""
        published = []
        for k in sorted(stores, reverse=True):
            try:
                following = chain.following(k, sampled)
            except LookupError:
                self.host.discard(stores[k])
                continue
            place, label = Place(chain.hashes[k], following), chain.label(k, following)
            if self.host.publish(stores[k], place, chain.block(k), label, chain.parent(k)):
                published.append((stores[k], chain.key(k, following)))
        if self.traffic is not None:
            for unit, key in reversed(published):
                self.traffic.spill(unit, key)

    def drop_stores(self, stores: Mapping[int, int]) -> None:
        """What was written is worth nothing."""
        for unit in stores.values():
            self.host.discard(unit)

    def forget(self, chain: Chain) -> None:
        """No block of a chain is found any more, whatever its last row was made with; units that
        somebody reads stay until then."""
        for k in range(len(chain)):
            while (found := self.host.variant(chain, k)) is not None:
                self.host.forget([found[0]])
            while self.traffic and (file := self.traffic.disk.variant(chain, k)) is not None:
                self.traffic.disk.refuse(file)

    def clear(self) -> dict[str, int]:
        """Forgets everything; returns how many units each tier forgot."""
        disk = {"disk": self.traffic.clear()} if self.traffic is not None else {}
        return {"host": self.host.clear(), **disk}

    async def close(self) -> None:
        """Waits for what is on its way to or from files."""
        if self.traffic is not None:
            await self.traffic.close()
        self.host.memory.close()
