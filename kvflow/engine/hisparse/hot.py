"""HotRows: the rows of one request that lie on the device for one index group, oldest out first."""

import numpy as np
from attrs import define, field, frozen

from kvflow.errors import CapacityError
from kvflow.layouts.sharding import Ints

NOWHERE = -1
"""A slot without a row, or a row without a slot."""


@frozen(eq=False)
class Placed:
    """slots: int64, where each row lies from now on; missing: which of them must be fetched."""

    slots: Ints
    missing: "np.ndarray[tuple[int], np.dtype[np.bool_]]"


@define(eq=False)
class HotRows:
    """`capacity` slots of the device's pool from `first_slot` on.

    Rows are local indices of a rank. The rows asked for together all have a slot afterwards; what
    makes room is what was asked for the longest ago, of equals the lowest row."""

    first_slot: int
    capacity: int
    evictions: int = field(init=False, default=0)
    _row: Ints = field(init=False)
    _used: Ints = field(init=False)
    _place: Ints = field(init=False)
    _now: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._row = np.full(self.capacity, NOWHERE, np.int64)
        self._used = np.zeros(self.capacity, np.int64)
        self._place = np.full(0, NOWHERE, np.int64)

    def __len__(self) -> int:
        return int((self._row != NOWHERE).sum())

    def resolve(self, rows: Ints) -> Placed:
        """Slots for rows int64 [n], each once. Raises `CapacityError`, and changes nothing, if
        there are more than slots."""
        if len(rows) > self.capacity:
            raise CapacityError(
                f"{len(rows)} rows are wanted together, there are {self.capacity} hot rows"
            )
        self._reach(int(rows.max()) + 1 if len(rows) else 0)
        self._now += 1
        place = self._place[rows]
        missing = place == NOWHERE
        self._used[place[~missing]] = self._now
        if missing.any():
            place[missing] = self._room(int(missing.sum()))
            self._row[place[missing]] = rows[missing]
            self._used[place[missing]] = self._now
            self._place[rows[missing]] = place[missing]
        return Placed(place + self.first_slot, missing)

    def _room(self, n: int) -> Ints:
        """`n` places for new rows, emptied."""
        free = np.flatnonzero(self._row == NOWHERE)[:n]
        if len(free) == n:
            return free
        old = np.flatnonzero(self._row != NOWHERE)
        order = np.lexsort((self._row[old], self._used[old]))  # what is wanted now comes last
        victims = old[order[: n - len(free)]]
        self._place[self._row[victims]] = NOWHERE
        self.evictions += len(victims)
        return np.concatenate([free, victims])

    def _reach(self, stop: int) -> None:
        if stop > len(self._place):
            grown = np.full(max(stop, 2 * len(self._place)), NOWHERE, np.int64)
            grown[: len(self._place)] = self._place
            self._place = grown

    def forget(self, first_row: int) -> None:
        """Rows from `first_row` on are no longer here: they change, or lie elsewhere."""
        gone = self._row >= max(first_row, 0)
        self._place[self._row[gone]] = NOWHERE
        self._row[gone] = NOWHERE
