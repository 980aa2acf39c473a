"""Tiers of a simulated engine: which blocks they hold, the least recently used goes first."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from attrs import define, field

from kvflow.router.events import KVEvents, Stored

Chain = Sequence[bytes]


@define(eq=False)
class Tier:
    """Up to `capacity` blocks. What it stores and removes is said to `tell` as KV events. A block
    is never used later than the block before it, so a chain loses its last blocks first, and what
    is held of it can be found by bisection."""

    name: str
    capacity: int
    tell: Callable[[KVEvents], None]
    block_size: int
    _blocks: OrderedDict[bytes, None] = field(factory=OrderedDict)

    def num_held(self, chain: Chain) -> int:
        """Blocks of a chain's longest unbroken prefix."""
        return bisect_left(chain, True, key=lambda block: block not in self._blocks)

    def put(self, chain: Chain) -> None:
        """Holds a chain, its first block as the most recently used. Where it does not fit, its
        end is left out."""
        chain = chain[: self.capacity]
        held, blocks = self.num_held(chain), self._blocks
        blocks.update(dict.fromkeys(reversed(chain[held:])))
        deque(map(blocks.move_to_end, reversed(chain[:held])), maxlen=0)
        removed = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.capacity)]
        if removed or held < len(chain):
            self.tell(KVEvents(self.name, self._stored(chain, held), tuple(removed)))

    def _stored(self, chain: Chain, start: int) -> tuple[Stored, ...]:
        """The blocks of a chain from number `start` on."""
        if start == len(chain):
            return ()
        parent = chain[start - 1] if start else None
        return (Stored(tuple(chain[start:]), parent, (len(chain) - start) * self.block_size),)


@define(eq=False)
class Tiers:
    """The tiers of one engine, fastest first."""

    tiers: Sequence[Tier]

    def held(self, chain: Chain) -> dict[str, int]:
        """Blocks of the longest unbroken prefix, by the fastest tier that has each."""
        found, done = {}, 0
        for tier in self.tiers:
            held = tier.num_held(chain)
            found[tier.name] = max(0, held - done)
            done = max(done, held)
        return found

    def put(self, chain: Chain) -> None:
        for tier in self.tiers:
            tier.put(chain)

    def touch(self, chain: Chain) -> None:
        """Uses what is held of a chain."""
        for tier in self.tiers:
            tier.put(chain[: tier.num_held(chain)])
