"""BlockPool: who holds which block ids of one group, and the law that none is ever lost."""

from collections.abc import Iterable
from typing import Literal

from attrs import define, field

from kvflow.errors import CapacityError, KvflowError

Holding = Literal["used", "pinned", "quarantined"]


@define(eq=False)
class BlockPool:
    """`num_blocks` ids. An id is free, or held once: ``used`` by a request, ``pinned`` for
    readers, or ``quarantined`` because a write may still arrive.

    free + used + pinned + quarantined = all; `audit` asserts it.
    """

    num_blocks: int
    _free: list[int] = field(init=False)
    _held: dict[int, Holding] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, holding: Holding) -> int:
        return sum(1 for h in self._held.values() if h == holding)

    def allocate(self, n: int) -> list[int]:
        """`n` ids, now used. Raises `CapacityError` and takes nothing if fewer are free."""
        if n > len(self._free):
            raise CapacityError(f"{n} blocks needed, {len(self._free)} of {self.num_blocks} free")
        ids = [self._free.pop() for _ in range(n)]
        self._held.update(dict.fromkeys(ids, "used"))
        return ids

    def hold(self, ids: Iterable[int], holding: Holding) -> None:
        """Changes how held ids are held. Raises `KvflowError`, and changes nothing, if an id is
        free."""
        self._held.update(dict.fromkeys(self._all_held(ids), holding))

    def free(self, ids: Iterable[int]) -> None:
        """Gives held ids back. Raises `KvflowError`, and frees nothing, if an id is free already
        or stands twice."""
        for block_id in self._all_held(ids):
            del self._held[block_id]
            self._free.append(block_id)

    def _all_held(self, ids: Iterable[int]) -> list[int]:
        listed = list(ids)
        for block_id in listed:
            if block_id not in self._held:
                raise KvflowError(f"block {block_id} is not held (pool of {self.num_blocks})")
        if len(set(listed)) != len(listed):
            raise KvflowError(f"blocks {listed}: an id stands twice")
        return listed

    def audit(self) -> None:
        """Raises `KvflowError` if an id is lost or held twice."""
        free = set(self._free)
        if len(free) != len(self._free) or free & set(self._held):
            raise KvflowError("a block id is free twice, or free and held at once")
        if len(free) + len(self._held) != self.num_blocks:
            raise KvflowError(
                f"{len(free)} free + {len(self._held)} held ids, the pool has {self.num_blocks}"
            )
