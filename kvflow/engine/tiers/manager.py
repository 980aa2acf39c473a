"""Tiers: what a prefill engine finds in its tiers, and what it stores there."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from attrs import define, field

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
from kvflow.router.events import EventBuffer


@define(eq=False)
class Tiers:
    """The tiers of one engine. Everything is decided here, in the front; ranks move the rows."""

    host: HostTier
    traffic: DiskTraffic | None = None
    _lent: dict[str, list[int]] = field(init=False, factory=dict)

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
        """Units on their way to or from files, and to readers elsewhere."""
        lent = sum(map(len, self._lent.values()))
        return lent + (self.traffic.num_under_way if self.traffic is not None else 0)

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
    def buffers(self) -> list[EventBuffer]:
        """What came to each tier and went."""
        disk = [self.traffic.disk.events] if self.traffic is not None else []
        return [self.host.events, *disk]

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls `on_change` when what a tier holds has changed beside a step."""
        if self.traffic is not None:
            self.traffic.on_change = on_change

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
        known = self._known(chain, first, most)
        held = {k: self.host.find(chain, k, chain.following(k)) for k in known}
        here = {k: unit for k, unit in held.items() if unit is not None}
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

    def num_known(self, chain: Chain, first: int, most: int) -> int:
        """How many of the blocks from `first` on, below position `most`, lie in units or files as
        they are, without a gap."""
        return len(self._known(chain, first, most))

    def _known(self, chain: Chain, first: int, most: int) -> list[int]:
        known = []
        for k in range(first, min(len(chain), most // chain.block_size)):
            here = self.host.find(chain, k, chain.following(k)) is not None
            if not here and not (self.traffic is not None and self.traffic.knows(chain, k)):
                break
            known.append(k)
        return known

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

    async def lend(
        self, loan_id: str, chain: Chain, start: int, most: int
    ) -> tuple[UnitRows, int] | None:
        """The rows of the positions from `start` on, below `most`, in units that are kept for a
        reader until `end_loan`, and how many of them came from files; None if there are none."""
        first = start // chain.block_size
        fetched, fresh = await self.fetch(chain, first, most)
        rows = self.match(chain, first, most)
        if rows is not None and (rows := rows_from(rows, start)) is not None:
            self.host.pin(rows.units)
            self._lent[loan_id] = rows.units
        self.host.unpin(fetched)
        return (rows, num_in(rows, chain.block_size, fresh)) if rows is not None else None

    def end_loan(self, loan_id: str) -> None:
        """The reader has read the units. Unknown and ended ones are ignored."""
        self.host.unpin(self._lent.pop(loan_id, ()))

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
        if self.traffic is not None:
            self.traffic.forget(chain)

    def clear(self) -> dict[str, int]:
        """Forgets everything; returns how many units each tier forgot."""
        disk = {"disk": self.traffic.clear()} if self.traffic is not None else {}
        return {"host": self.host.clear(), **disk}

    async def close(self) -> None:
        """Waits for what is on its way to or from files."""
        if self.traffic is not None:
            await self.traffic.close()
        self.host.memory.close()


def rows_from(rows: UnitRows, start: int) -> UnitRows | None:
    """Those of the rows at position `start`, in the first unit, and behind; None if there are
    none."""
    if rows.stop <= start:
        return None
    return msgspec.structs.replace(rows, start=start, skipped=start - rows.start)


def num_in(rows: UnitRows, unit_size: int, units: Collection[int]) -> int:
    """How many of the positions lie in some of the units."""
    first, count = rows.start - rows.skipped, 0
    for i, unit in enumerate(rows.units):
        begin = first + i * unit_size
        if unit in units:
            count += min(begin + unit_size, rows.stop) - max(begin, rows.start)
    return count
