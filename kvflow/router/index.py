"""ResidencyIndex: which tier of which engine holds which chain block, as KV events tell it."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from attrs import define, field, frozen

from kvflow.router.config import RouterError
from kvflow.router.events import KVEvents, Stored

Reader = TypeVar("Reader", bound=Hashable)


@frozen
class Hit:
    """The longest unbroken prefix of a chain that an engine holds, in blocks. `tiers` splits them
    by the fastest tier that holds each, so no block is counted twice."""

    num_blocks: int
    tiers: Mapping[str, int]


@define(eq=False)
class ResidencyIndex:
    """`tiers` are names, fastest first. `counts` says how often events were ignored, and why:
    "unknown engine", "partial blocks" (hashes and tokens disagree: an event about one component
    says nothing about the prefix) and "other parent" (a chain hashed in another way)."""

    block_size: int
    tiers: tuple[str, ...]
    counts: Counter[str] = field(factory=Counter)
    _bits: dict[str, dict[str, int]] = field(factory=dict)
    _holders: dict[bytes, int] = field(factory=dict)  # block -> one bit a holder
    _parents: dict[bytes, bytes | None] = field(factory=dict)
    _held: dict[int, set[bytes]] = field(factory=dict)  # holder -> its blocks
    _free_bits: list[int] = field(factory=list)
    _restores_from: dict[str, tuple[str, ...]] = field(factory=dict)  # of those that do

    def add_engine(self, name: str, restores_from: Sequence[str] = ()) -> None:
        """An engine that holds nothing yet, and reaches the slower tiers of others. Raises
        `RouterError` if it is known."""
        if name in self._bits:
            raise RouterError(f"engine {name!r} is indexed already")
        self._bits[name] = {tier: self._new_bit() for tier in self.tiers}
        if restores_from:
            self._restores_from[name] = tuple(restores_from)

    def _new_bit(self) -> int:
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._held)
        self._held[bit] = set()
        return bit

    def remove_engine(self, name: str) -> None:
        """Forgets the engine and what it held. Unknown engines are none already."""
        self._restores_from.pop(name, None)
        for bit in self._bits.pop(name, {}).values():
            self._clear(bit)
            self._free_bits.append(bit)

    def __contains__(self, name: object) -> bool:
        return name in self._bits

    def num_blocks(self, name: str, tier: str) -> int:
        return len(self._held[self._bits[name][tier]])

    def parent(self, block: bytes) -> bytes | None:
        """The block before one that some tier holds. Raises `LookupError` if none does."""
        return self._parents[block]

    # --- events

    def apply(self, name: str, events: KVEvents) -> None:
        """Takes over what a tier says. Raises `RouterError` for a tier that the index was not made
        with; events of engines that are not, or no more, there are ignored and counted."""
        if events.tier not in self.tiers:
            raise RouterError(f"{name!r} speaks of tier {events.tier!r}, must be of {self.tiers}")
        if name not in self._bits:
            self.counts["unknown engine"] += 1
            return
        bit = self._bits[name][events.tier]
        if events.cleared:
            self._clear(bit)
        for block in events.removed:
            self._remove(block, bit)
        for stored in events.stored:
            self._store(stored, bit)

    def _store(self, stored: Stored, bit: int) -> None:
        if stored.num_tokens != len(stored.hashes) * self.block_size:
            self.counts["partial blocks"] += 1
            return
        parent = stored.parent
        for block in stored.hashes:
            if self._parents.setdefault(block, parent) != parent:
                self.counts["other parent"] += 1
                return
            self._holders[block] = self._holders.get(block, 0) | bit
            self._held[bit].add(block)
            parent = block

    def _remove(self, block: bytes, bit: int) -> None:
        if block not in self._held[bit]:
            return
        self._held[bit].remove(block)
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block], self._parents[block]

    def _clear(self, bit: int) -> None:
        for block in tuple(self._held[bit]):
            self._remove(block, bit)

    # --- questions

    def hits(self, hashes: Sequence[bytes]) -> dict[str, Hit]:
        """By engine, what it holds of a chain from its first block on; engines without the first
        block are left out."""
        return self._hits(hashes, self._bits)

    def reach(self, hashes: Sequence[bytes]) -> dict[str, Hit]:
        """As `hits`, of the engines that restore from others, with what one of these holds in
        slower tiers: the one that makes most of it, as units come from one engine."""
        pairs = {
            (name, other): self._reached(name, other)
            for name, others in self._restores_from.items()
            for other in (name, *others)
            if other in self._bits
        }
        best: dict[str, Hit] = {}
        for (name, _), hit in self._hits(hashes, pairs).items():
            if name not in best or hit.num_blocks > best[name].num_blocks:
                best[name] = hit
        return best

    def _reached(self, name: str, other: str) -> dict[str, int]:
        """The holders that an engine reaches by way of another, by tier."""
        slower = self._bits[other]
        return {
            tier: bit | (slower[tier] if tier != self.tiers[0] else 0)
            for tier, bit in self._bits[name].items()
        }

    def _hits(
        self, hashes: Sequence[bytes], readers: Mapping[Reader, Mapping[str, int]]
    ) -> dict[Reader, Hit]:
        held = {name: dict.fromkeys(self.tiers, 0) for name in readers}
        alive = dict(readers)
        for holders, run in groupby(map(self._holders.get, hashes)):
            n = len(list(run))
            for name, bits in tuple(alive.items()):
                tier = next((t for t, bit in bits.items() if (holders or 0) & bit), None)
                if tier is None:
                    del alive[name]
                else:
                    held[name][tier] += n
            if not alive:
                break
        return {
            name: Hit(total, {tier: n for tier, n in tiers.items() if n})
            for name, tiers in held.items()
            if (total := sum(tiers.values()))
        }
