"""Tiers: what a prefill engine finds in its tiers, and what it stores there."""

from collections.abc import Mapping

from attrs import define

from kvflow.engine.messages import AttachTier, UnitRows
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.hashes import Chain
from kvflow.engine.tiers.host import HostTier, Place
from kvflow.engine.tiers.memory import UnitMemory
from kvflow.layouts.layout import KVLayout


@define(eq=False)
class Tiers:
    """The tiers of one engine. Everything is decided here, in the front; ranks move the rows."""

    host: HostTier

    @classmethod
    def create(cls, config: PrefixConfig, layout: KVLayout) -> "Tiers | None":
        """The tiers that a configuration asks for, None if it is none. Raises `CapacityError` for a
        size that holds no unit."""
        if not config.host_nbytes:
            return None
        unit_size = config.unit_size(layout)
        return cls(HostTier(UnitMemory.create(layout.spec, unit_size, config.host_nbytes)))

    def units(self) -> dict[str, dict[str, int]]:
        """Units by tier and state."""
        return {"host": self.host.counts()}

    def events(self) -> dict[str, dict[str, int]]:
        """What ever happened, by tier and kind."""
        host = self.host
        return {
            "host": {
                "stored": host.num_stored,
                "evicted": host.num_evicted,
                "store_refused": host.num_refused,
            }
        }

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
        for k in sorted(stores, reverse=True):
            try:
                following = chain.following(k, sampled)
            except LookupError:
                self.host.discard(stores[k])
                continue
            place = Place(chain.hashes[k], following)
            self.host.publish(stores[k], place, chain.block(k), chain.label(k, following))

    def drop_stores(self, stores: Mapping[int, int]) -> None:
        """What was written is worth nothing."""
        for unit in stores.values():
            self.host.discard(unit)

    def clear(self) -> dict[str, int]:
        """Forgets everything; returns how many units each tier forgot."""
        return {"host": self.host.clear()}

    def close(self) -> None:
        """Nothing may be under way."""
        self.host.memory.close()
