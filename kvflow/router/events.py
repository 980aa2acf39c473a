"""KV events: what a tier of an engine says it stored and removed, and the buffer it says it with.

A block is named by its chain hash, which covers every token up to the block's end, salt and adapter
included; the parent of block k is block k-1. Events are engine-agnostic, msgspec structs: msgpack
and JSON on any wire.
"""

from collections.abc import Iterable, Sequence

from attrs import define, field
from msgspec import Struct


class Stored(Struct, frozen=True):
    """Consecutive blocks of one chain that a tier holds now. `parent` is the block before the
    first (None: the first is block 0); `num_tokens` are the tokens of all of them together."""

    hashes: Sequence[bytes]
    parent: bytes | None
    num_tokens: int


class KVEvents(Struct, frozen=True):
    """Changes of one tier, taken in this order: `cleared` (it holds nothing), then `removed`, then
    `stored`. `seq` numbers the batches of an engine, all tiers together, 0, 1, 2, ...; with it,
    late and repeated batches are put right and lost ones are noticed. None: as they come."""

    tier: str
    stored: Sequence[Stored] = ()
    removed: Sequence[bytes] = ()
    cleared: bool = False
    seq: int | None = None


@define(eq=False)
class EventBuffer:
    """Gathers what happens in one tier between two `drain` calls. Only the last thing that
    happened to a block is said: a block stored and removed again is removed."""

    tier: str
    block_size: int
    _cleared: bool = False
    _removed: dict[bytes, None] = field(factory=dict)
    _stored: dict[bytes, bytes | None] = field(factory=dict)

    def stored(self, block: bytes, parent: bytes | None) -> None:
        self._stored.pop(block, None)
        self._stored[block] = parent

    def removed(self, block: bytes) -> None:
        self._stored.pop(block, None)
        self._removed[block] = None

    def cleared(self) -> None:
        self._cleared = True
        self._removed.clear()
        self._stored.clear()

    def drain(self) -> KVEvents | None:
        """What happened since the last call, None if nothing did."""
        if not (self._cleared or self._removed or self._stored):
            return None
        removed = tuple(block for block in self._removed if block not in self._stored)
        stored = stored_runs(self._stored.items(), self.block_size)
        events = KVEvents(self.tier, stored, removed, self._cleared)
        self._cleared = False
        self._removed.clear()
        self._stored.clear()
        return events


def stored_runs(
    blocks: Iterable[tuple[bytes, bytes | None]], block_size: int
) -> tuple[Stored, ...]:
    """(block, parent) pairs as `Stored`, one for every run in which each block's parent is the
    block before it."""
    runs: list[tuple[bytes | None, list[bytes]]] = []
    for block, parent in blocks:
        if runs and parent is not None and parent == runs[-1][1][-1]:
            runs[-1][1].append(block)
        else:
            runs.append((parent, [block]))
    return tuple(Stored(tuple(run), parent, len(run) * block_size) for parent, run in runs)
