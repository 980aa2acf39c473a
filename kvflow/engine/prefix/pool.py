"""SharedBlockPool: block ids that several requests may hold at once, and ids kept for reuse."""

from collections.abc import Callable, Iterable
from typing import Literal

from attrs import define, field

from kvflow.errors import CapacityError, KvflowError

Holding = Literal["used", "pinned", "quarantined"]
State = Holding | Literal["cached"]
_STRONGEST: tuple[Holding, ...] = ("quarantined", "used", "pinned")


def _nobody(block_id: int) -> None:
    raise KvflowError(f"block {block_id} is cached, but no index is asked to forget it")


@define(eq=False)
class SharedBlockPool:
    """`num_blocks` ids. Every hold counts one reader or writer: ``used`` by a request, ``pinned``
    for readers, ``quarantined`` because a write may still arrive. An id that nobody holds is free,
    or ``cached`` if an index says what lies in it; cached ids are given away again, the one left
    alone the longest first, after `on_evict` has made every index forget it.

    free + used + pinned + quarantined + cached = all; `audit` asserts it. An id that is held in
    several ways counts as quarantined before used before pinned.
    """

    num_blocks: int
    on_evict: Callable[[int], None] = _nobody
    num_evicted: int = field(init=False, default=0)
    _free: list[int] = field(init=False)
    _holds: dict[int, dict[Holding, int]] = field(init=False, factory=dict)
    _cached: dict[int, None] = field(init=False, factory=dict)
    _indexed: set[int] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Ids that `allocate` can give away: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def indexed(self) -> frozenset[int]:
        """Ids of which an index says what lies in them."""
        return frozenset(self._indexed)

    def count(self, state: State) -> int:
        """How many ids are in a state."""
        if state == "cached":
            return len(self._cached)
        return sum(1 for holds in self._holds.values() if _state(holds) == state)

    def allocate(self, n: int) -> list[int]:
        """`n` ids, now used once. Raises `CapacityError` and takes nothing if fewer are
        available."""
        if n > self.num_available:
            raise CapacityError(
                f"{n} blocks needed, {self.num_free} free and {len(self._cached)} cached of "
                f"{self.num_blocks}"
            )
        while len(self._free) < n:
            victim = next(iter(self._cached))
            self.on_evict(victim)
            if victim in self._cached:
                raise KvflowError(f"block {victim} is still indexed after its eviction")
            self.num_evicted += 1
        ids = [self._free.pop() for _ in range(n)]
        for block_id in ids:
            self._holds[block_id] = {"used": 1}
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more user of ids that are held or cached. Raises `KvflowError`, and changes nothing,
        for a free id."""
        listed = list(ids)
        for block_id in listed:
            if block_id not in self._holds and block_id not in self._cached:
                raise KvflowError(f"block {block_id} is free, nothing in it can be shared")
        for block_id in listed:
            self._cached.pop(block_id, None)
            _add(self._holds.setdefault(block_id, {}), "used", 1)

    def hold(self, ids: Iterable[int], before: Holding, after: Holding) -> None:
        """One hold of each id changes its kind. Raises `KvflowError`, and changes nothing, if an
        id is not held so."""
        for block_id in self._all_held(ids, before):
            _add(self._holds[block_id], before, -1)
            _add(self._holds[block_id], after, 1)

    def free(self, ids: Iterable[int], holding: Holding = "used") -> None:
        """Ends one hold of each id; the first of them is kept the longest. Raises `KvflowError`,
        and frees nothing, if an id is not held so or stands twice."""
        for block_id in reversed(self._all_held(ids, holding)):
            holds = self._holds[block_id]
            _add(holds, holding, -1)
            if not holds:
                del self._holds[block_id]
                if block_id in self._indexed:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def mark(self, block_id: int) -> None:
        """An index knows what lies in an id that somebody holds, or that is cached."""
        if block_id not in self._holds and block_id not in self._cached:
            raise KvflowError(f"block {block_id} is free, nothing in it can be indexed")
        self._indexed.add(block_id)

    def forget(self, block_id: int) -> None:
        """No index speaks of the id any more."""
        self._indexed.discard(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def _all_held(self, ids: Iterable[int], holding: Holding) -> list[int]:
        listed = list(ids)
        for block_id in listed:
            if not self._holds.get(block_id, {}).get(holding):
                raise KvflowError(
                    f"block {block_id} is not held as {holding} (pool of {self.num_blocks})"
                )
        if len(set(listed)) != len(listed):
            raise KvflowError(f"blocks {listed}: an id stands twice")
        return listed

    def audit(self) -> None:
        """Raises `KvflowError` if an id is lost, or in two states at once."""
        free, cached, held = set(self._free), set(self._cached), set(self._holds)
        if len(free) != len(self._free) or free & held or free & cached or cached & held:
            raise KvflowError("a block id is free twice, or in two states at once")
        if any(min(holds.values(), default=0) < 1 for holds in self._holds.values()):
            raise KvflowError("a block id is held by nobody")
        if cached - self._indexed or self._indexed & free:
            raise KvflowError("a cached block that no index knows, or an index of a free one")
        if len(free) + len(cached) + len(held) != self.num_blocks:
            raise KvflowError(
                f"{len(free)} free + {len(cached)} cached + {len(held)} held ids, the pool has "
                f"{self.num_blocks}"
            )


def _state(holds: dict[Holding, int]) -> Holding:
    return next(one for one in _STRONGEST if one in holds)


def _add(holds: dict[Holding, int], holding: Holding, n: int) -> None:
    left = holds.get(holding, 0) + n
    if left:
        holds[holding] = left
    else:
        holds.pop(holding, None)
