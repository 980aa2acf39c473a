"""HostTier: which unit of the host memory holds which block of which chain, and who needs it."""

from collections.abc import Iterable
from typing import NamedTuple

from attrs import define, field, frozen

from kvflow.engine.prefix.hashes import Chain
from kvflow.engine.tiers.memory import UnitMemory
from kvflow.errors import KvflowError
from kvflow.router.events import EventBuffer


class Place(NamedTuple):
    """A block of a chain, and the token that its last row was made with (None where rows do not
    depend on it)."""

    hash: bytes
    following: int | None


@frozen(eq=False)
class Entry:
    """What a published unit holds. `tokens` and `label` prove a hit; `parent` is the hash of the
    block before, None for the first."""

    place: Place
    tokens: bytes
    label: bytes
    parent: bytes | None


@define(eq=False)
class HostTier:
    """A unit is free, being written, or published; a published one that nobody has pinned may be
    given away, the one left alone the longest first. Written and pinned ones never are: if there
    are no others, a store is refused, and counted."""

    memory: UnitMemory
    num_stored: int = field(init=False, default=0)
    num_evicted: int = field(init=False, default=0)
    num_refused: int = field(init=False, default=0)
    events: EventBuffer = field(init=False)
    _free: list[int] = field(init=False)
    _written: dict[int, Place | None] = field(init=False, factory=dict)
    _entries: dict[int, Entry] = field(init=False, factory=dict)
    _units: dict[bytes, dict[int | None, int]] = field(init=False, factory=dict)
    _pins: dict[int, int] = field(init=False, factory=dict)
    _idle: dict[int, None] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.memory.num_units - 1, -1, -1))
        self.events = EventBuffer("host", self.memory.unit_size)

    # --- reading

    def find(self, chain: Chain, k: int, following: int | None) -> int | None:
        """The unit that holds block k of a chain, proven by its tokens and label."""
        unit = self._units.get(chain.hashes[k], {}).get(following)
        if unit is None or self._entries[unit].tokens != chain.block(k):
            return None
        return unit if self._entries[unit].label == chain.label(k, following) else None

    def variant(self, chain: Chain, k: int) -> tuple[int, int | None] | None:
        """Any unit of block k, and the token its last row was made with."""
        for following in self._units.get(chain.hashes[k], {}):
            if (unit := self.find(chain, k, following)) is not None:
                return unit, following
        return None

    def pin(self, units: Iterable[int]) -> None:
        """Published units are not given away until each pin is ended."""
        for unit in units:
            if unit not in self._entries:
                raise KvflowError(f"unit {unit} is not published, it cannot be pinned")
            self._pins[unit] = self._pins.get(unit, 0) + 1
            self._idle.pop(unit, None)

    def unpin(self, units: Iterable[int]) -> None:
        """Ends one pin of each unit; the first of them is kept the longest."""
        for unit in reversed(list(units)):
            if unit not in self._pins:
                raise KvflowError(f"unit {unit} is not pinned")
            self._pins[unit] -= 1
            if not self._pins[unit]:
                del self._pins[unit]
                if unit in self._entries:
                    self._idle[unit] = None
                else:
                    self._free.append(unit)

    # --- writing

    def begin(self, place: Place | None) -> int | None:
        """A unit to be written with a block, None for one whose place is known only later. None
        is returned if the block is here (which counts as a use of it) or being written already,
        or if no unit can be had."""
        if place is not None and self.has(place):
            unit = self._units[place.hash][place.following]
            if unit in self._idle:
                self._idle[unit] = self._idle.pop(unit)
            return None
        if place is not None and place in self._written.values():
            return None
        if not self._free and not self._evict():
            self.num_refused += 1
            return None
        unit = self._free.pop()
        self._written[unit] = place
        self.memory.set_label(unit, None)
        return unit

    def has(self, place: Place) -> bool:
        return place.following in self._units.get(place.hash, {})

    def publish(
        self, unit: int, place: Place, tokens: bytes, label: bytes, parent: bytes | None = None
    ) -> bool:
        """Every row of a unit is written: from now on it is found, and `parent` is the hash of the
        block before it. False, and the unit is free, if the block has come from elsewhere in the
        meantime."""
        self._take_written(unit)
        if self.has(place):
            self._free.append(unit)
            return False
        self.memory.set_label(unit, label)
        self._entries[unit] = Entry(place, tokens, label, parent)
        self._units.setdefault(place.hash, {})[place.following] = unit
        self.events.stored(place.hash, parent)
        self._idle[unit] = None
        self.num_stored += 1
        return True

    def discard(self, unit: int) -> None:
        """A unit that was begun holds nothing provable."""
        self._take_written(unit)
        self._free.append(unit)

    def _take_written(self, unit: int) -> None:
        if unit not in self._written:
            raise KvflowError(f"unit {unit} is not being written")
        del self._written[unit]

    # --- giving away

    def _evict(self) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self.forget([oldest])
        self.num_evicted += 1
        return True

    def forget(self, units: Iterable[int]) -> None:
        """Published units are found no more, and are free once nobody has them pinned."""
        for unit in units:
            entry = self._entries.pop(unit, None)
            if entry is None:
                continue
            place = entry.place
            del self._units[place.hash][place.following]
            if not self._units[place.hash]:
                del self._units[place.hash]
                self.events.removed(place.hash)
            self.memory.set_label(unit, None)
            if unit in self._idle:
                del self._idle[unit]
                self._free.append(unit)

    def clear(self) -> int:
        """Forgets every published unit; returns how many there were."""
        units = list(self._entries)
        self.forget(units)
        return len(units)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, unit: int) -> Entry:
        """What a published unit holds."""
        return self._entries[unit]

    def counts(self) -> dict[str, int]:
        """Units by state; their sum is all units."""
        return {
            "free": len(self._free),
            "written": len(self._written),
            "pinned": len(self._pins),
            "published": len(self._idle),
        }

    def audit(self, *, idle: bool) -> None:
        """Raises `KvflowError` if a unit is lost, in two states at once, indexed wrongly, or still
        held although nobody is there (`idle`)."""
        counts = self.counts()
        if sum(counts.values()) != self.memory.num_units:
            raise KvflowError(f"units {counts}, there are {self.memory.num_units}")
        states = [*self._free, *self._written, *self._pins, *self._idle]
        if len(set(states)) != len(states):
            raise KvflowError("a unit of the host tier is in two states at once")
        if idle and (counts["written"] or counts["pinned"]):
            raise KvflowError(f"idle, but units are held: {counts}")
        found = {unit for each in self._units.values() for unit in each.values()}
        if found != set(self._entries):
            raise KvflowError("the host tier finds other units than are published")
        for unit, entry in self._entries.items():
            if self.memory.label(unit) != entry.label:
                raise KvflowError(f"unit {unit} is labelled otherwise than it is indexed")
