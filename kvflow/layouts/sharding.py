"""Shardings of the token axis: position <-> (shard, local index).

Every sharding answers `owner`, `local`, `token`, `local_len` and `runs` for any token range,
vectorised, exact, in int64. These are the only owner and local-index functions of kvflow.

A sharding also says where it stops being regular: inside any stretch between two `borders` of a
stride, an arithmetic progression of positions with that stride stays on one shard and its local
indices form an arithmetic progression too. The planner needs nothing else about a sharding.
"""

from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.values import MOST, integer, positive

Ints = npt.NDArray[np.int64]
IntsLike = npt.ArrayLike

ANY_STOP = MOST
"""The end of an unbounded domain: far above any position, far below int64 overflow."""


@frozen(eq=False)
class Runs:
    """Arithmetic runs of positions: run i holds ``token[i] + k*stride[i]`` for k < ``count[i]``,
    all on ``shard[i]``, at local indices ``local[i] + k``. Five int64 arrays of equal length."""

    shard: Ints
    token: Ints
    stride: Ints
    local: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.token)


@runtime_checkable
class Sharding(Protocol):
    """Positions ``[start, stop)`` dealt to `num_shards` shards."""

    @property
    def num_shards(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def period(self) -> int:
        """Smallest stride at which nothing but the fixed borders interrupts regularity."""
        ...

    def owner(self, positions: IntsLike) -> Ints:
        """The shard of each position. Raises `LayoutError` outside the domain."""
        ...

    def local(self, positions: IntsLike) -> Ints:
        """The index of each position within its shard."""
        ...

    def token(self, shard: IntsLike, local: IntsLike) -> Ints:
        """The inverse: the position at a local index of a shard. Raises `LayoutError` for a
        shard or an index that does not exist."""
        ...

    def local_len(self, length: int, shard: IntsLike) -> Ints:
        """How many positions below `length` each shard holds."""
        ...

    def runs(self, start: int, stop: int) -> Runs:
        """The positions of ``[start, stop)`` as runs, ordered by shard, then local index."""
        ...

    def borders(self, start: int, stop: int, stride: int) -> Ints:
        """Sorted positions strictly inside ``(start, stop)`` at which a progression of `stride`
        may change shard or slope."""
        ...


def range_of(sharding: Sharding, start: SupportsIndex, stop: SupportsIndex) -> tuple[int, int]:
    start, stop = integer(start, "start"), integer(stop, "stop")
    if not sharding.start <= start <= stop <= sharding.stop:
        raise LayoutError(
            f"tokens [{start}, {stop}) are not a range inside "
            f"[{sharding.start}, {sharding.stop}) of {sharding}"
        )
    return start, stop


def positions_of(sharding: Sharding, positions: IntsLike) -> Ints:
    t = as_ints(positions)
    bad = (t < sharding.start) | (t >= sharding.stop)
    if bad.any():
        raise LayoutError(
            f"position {int(t[bad][0])} is outside [{sharding.start}, {sharding.stop}) "
            f"of {sharding}"
        )
    return t


def shards_of(sharding: Sharding, shard: IntsLike) -> Ints:
    s = as_ints(shard)
    bad = (s < 0) | (s >= sharding.num_shards)
    if bad.any():
        raise LayoutError(
            f"shard {int(s[bad][0])} does not exist, {sharding} has {sharding.num_shards}"
        )
    return s


def as_ints(values: IntsLike) -> Ints:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of unequal length
        raise LayoutError(f"expected integers, got {values!r}") from error
    if array.size and array.dtype.kind not in "iu":
        raise LayoutError(f"expected integers, got an array of {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise LayoutError(f"expected integers below 2**63, got {int(array.max())}")
    return array.astype(np.int64)


def frozen_ints(values: IntsLike) -> Ints:
    """A read-only copy. An int64 array that owns its memory and is read-only already is taken as
    it is."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        own: Ints = values
        if own.flags.owndata and not own.flags.writeable:
            return own
    array = as_ints(values)
    array.setflags(write=False)
    return array


def _no_borders() -> Ints:
    return np.empty(0, np.int64)


@frozen
class RoundRobin:
    """DCP: `interleave` consecutive positions to each of `num_shards` ranks in turn, anchored at
    position 0. owner(t) = floor(t/I) mod W; local(t) = floor(t/(W*I))*I + t mod I.

    >>> deal = RoundRobin(8, interleave=16)
    >>> int(deal.owner(200)), int(deal.local(200))
    (4, 24)
    """

    num_shards: int = field(converter=integer, validator=positive)
    interleave: int = field(default=1, converter=integer, validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.num_shards * self.interleave > ANY_STOP:
            raise LayoutError(f"{self} deals rounds of more than {ANY_STOP} positions")

    @property
    def start(self) -> int:
        return 0

    @property
    def stop(self) -> int:
        return ANY_STOP

    @property
    def period(self) -> int:
        return 1 if self.num_shards == 1 else self.num_shards * self.interleave

    def owner(self, positions: IntsLike) -> Ints:
        return positions_of(self, positions) // self.interleave % self.num_shards

    def local(self, positions: IntsLike) -> Ints:
        t, i = positions_of(self, positions), self.interleave
        return t // (self.num_shards * i) * i + t % i

    def token(self, shard: IntsLike, local: IntsLike) -> Ints:
        s, j = np.broadcast_arrays(shards_of(self, shard), as_ints(local))
        i = self.interleave
        if (j < 0).any():
            raise LayoutError(f"local index {int(j.min())} is below 0 in {self}")
        if (beyond := j >= self.local_len(ANY_STOP, s)).any():
            raise LayoutError(
                f"local index {int(j[beyond].max())} is a position of {ANY_STOP} or more in {self}"
            )
        t: Ints = (j // i * self.num_shards + s) * i + j % i
        return t

    def local_len(self, length: int, shard: IntsLike) -> Ints:
        _, length = range_of(self, 0, length)
        i = self.interleave
        rounds, rest = divmod(length, self.num_shards * i)
        return rounds * i + np.clip(rest - shards_of(self, shard) * i, 0, i)

    def runs(self, start: int, stop: int) -> Runs:
        """One strided run a shard at I = 1, else one run for each interleave unit touched."""
        start, stop = range_of(self, start, stop)
        if self.interleave == 1:
            stride = self.num_shards
            first = start + np.arange(min(stride, stop - start), dtype=np.int64)
            count = (stop - first + stride - 1) // stride
        else:
            stride = 1
            first = np.concatenate([[start], self.borders(start, stop, stride)])[: stop - start]
            count = np.diff(np.append(first, stop))
        shard, local = self.owner(first), self.local(first)
        order = np.lexsort((local, shard))
        strides = np.full(len(first), stride, np.int64)
        return Runs(shard[order], first[order], strides, local[order], count[order])

    def borders(self, start: int, stop: int, stride: int) -> Ints:
        start, stop = range_of(self, start, stop)
        if stride % self.period == 0:
            return _no_borders()
        i = self.interleave
        return np.arange((start // i + 1) * i, stop, i, dtype=np.int64)

    def __str__(self) -> str:
        return f"round_robin({self.num_shards},i={self.interleave})"


@frozen
class Replicated:
    """One shard that holds every position of ``[start, stop)``; each of its ranks has a copy."""

    start: int = field(default=0, converter=integer)
    stop: int = field(default=ANY_STOP, converter=integer)

    def __attrs_post_init__(self) -> None:
        check_interval(self, self.start, self.stop)

    @property
    def num_shards(self) -> int:
        return 1

    @property
    def period(self) -> int:
        return 1

    def owner(self, positions: IntsLike) -> Ints:
        return np.zeros_like(positions_of(self, positions))

    def local(self, positions: IntsLike) -> Ints:
        return positions_of(self, positions) - self.start

    def token(self, shard: IntsLike, local: IntsLike) -> Ints:
        s, j = np.broadcast_arrays(shards_of(self, shard), as_ints(local))
        bad = (j < 0) | (j >= self.stop - self.start)
        if bad.any():
            raise LayoutError(
                f"local index {int(j[bad][0])} is outside [0, {self.stop - self.start}) in {self}"
            )
        t: Ints = s + j + self.start
        return t

    def local_len(self, length: int, shard: IntsLike) -> Ints:
        _, length = range_of(self, self.start, length)
        return np.full_like(shards_of(self, shard), length - self.start)

    def runs(self, start: int, stop: int) -> Runs:
        start, stop = range_of(self, start, stop)
        columns = (0, start, 1, start - self.start, stop - start)
        return Runs(*(np.full(min(1, stop - start), value, np.int64) for value in columns))

    def borders(self, start: int, stop: int, stride: int) -> Ints:
        start, stop = range_of(self, start, stop)
        return _no_borders()

    def __str__(self) -> str:
        return f"replicated({interval_text(self.start, self.stop)})"


def check_interval(sharding: object, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= ANY_STOP:
        raise LayoutError(
            f"{type(sharding).__name__} over [{start}, {stop}): needs 0 <= start <= stop"
        )


def interval_text(start: int, stop: int) -> str:
    return f"{start}:" if stop == ANY_STOP else f"{start}:{stop}"
