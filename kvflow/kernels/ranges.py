"""Copying many byte ranges from one memory to another on a CPU.

A long range is a slice, copied with one memcpy; many that fill a side without a gap are one call of
numpy. Short ranges of one length are opaque items of an array, which numpy indexes a cache's worth
at a time: the copy in between never leaves the cache, and its pages are not touched for the first
time again and again.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.layouts.sharding import Ints
from kvflow.transfers.lower import Descriptors

LONG_NBYTES = 4096
"""From here on a slice of its own is cheaper than a place among indexed items."""
MANY = 8
"""Long ranges in a run, on average, from which on one call for the run is cheaper than slices."""
CHUNK_NBYTES = 1 << 18
"""Bytes that numpy gathers before it places them."""
CHUNK_ITEMS = 512
"""At least so many, if they are short: for fewer numpy keeps other threads waiting."""

_NATIVE = (1, 2, 4, 8)
_Bytes = npt.NDArray[np.uint8]


@frozen(eq=False)
class _Side:
    """Ranges of one length on one side, as indices of overlapping items `unit` bytes apart, the
    first at byte `first`."""

    first: int
    unit: int
    length: int
    index: Ints

    @classmethod
    def at(cls, address: Ints) -> "_Side":
        first = int(address.min())
        index = address - first
        unit = int(np.gcd.reduce(index)) or 1
        index //= unit
        return cls(first, unit, int(index.max()) + 1, index)

    def items(self, memory: _Bytes, dtype: str) -> "np.ndarray[Any, Any]":
        return np.ndarray((self.length,), dtype, memory, self.first, (self.unit,))


@frozen(eq=False)
class _Items:
    """Ranges of `nbytes` each."""

    nbytes: int
    src: _Side
    dst: _Side

    def chunks(self, src: _Bytes, dst: _Bytes) -> Iterator[None]:
        dtype = f"u{self.nbytes}" if self.nbytes in _NATIVE else f"V{self.nbytes}"
        here, there = self.src.items(src, dtype), self.dst.items(dst, dtype)
        step = max(CHUNK_NBYTES // self.nbytes, CHUNK_ITEMS if self.nbytes < 1024 else 1)
        for i in range(0, len(self.src.index), step):
            there[self.dst.index[i : i + step]] = here[self.src.index[i : i + step]]
            yield


@frozen(eq=False)
class _Filling:
    """Items of `nbytes` that fill one side from byte `begin` on, copied in one pass. `index`: where
    they lie on the other side, in items from byte `first` on."""

    nbytes: int
    begin: int
    first: int
    index: Ints
    fills_target: bool

    @classmethod
    def all_of(cls, src: Ints, dst: Ints, nbytes: int) -> "list[_Filling]":
        """One for each run of items without a gap; none if the runs are short on both sides, or
        the other side's items do not lie whole items apart."""
        for filled, other in ((dst, src), (src, dst)):
            order = np.argsort(filled)
            begin, first = filled[order], int(other.min())
            cuts = np.flatnonzero(np.diff(begin) != nbytes) + 1
            index, beside = np.divmod(other[order] - first, nbytes)
            if len(begin) >= MANY * (len(cuts) + 1) and not beside.any():
                begins = begin[np.append(0, cuts)].tolist()
                runs = zip(begins, np.split(index, cuts), strict=True)
                return [cls(nbytes, at, first, run, filled is dst) for at, run in runs]
        return []

    def copy(self, src: _Bytes, dst: _Bytes) -> None:
        filled, other = (dst, src) if self.fills_target else (src, dst)
        shape = (int(self.index.max()) + 1, self.nbytes)
        run = np.ndarray((len(self.index), self.nbytes), np.uint8, filled, self.begin)
        items = np.ndarray(shape, np.uint8, other, self.first)
        if self.fills_target:
            items.take(self.index, axis=0, out=run, mode="clip")  # other modes copy `run` first
        else:
            items[self.index] = run


@frozen(eq=False)
class RangeCopy:
    """Ranges prepared once, copied between any memories that look alike: the bytes `src_reach` of
    the source are read, `dst_reach` of the target written."""

    fillings: tuple[_Filling, ...]
    slices: tuple[tuple[slice, slice], ...]
    items: tuple[_Items, ...]
    src_reach: tuple[int, int]
    dst_reach: tuple[int, int]

    @classmethod
    def of(cls, ranges: Descriptors) -> "RangeCopy":
        """`ranges` as (source, target, length), in bytes from the first of each memory."""
        src, dst, nbytes = ranges.src, ranges.dst, ranges.nbytes
        items = []
        for n in np.unique(nbytes[nbytes < LONG_NBYTES]).tolist():
            mine = nbytes == n
            items.append(_Items(n, _Side.at(src[mine]), _Side.at(dst[mine])))
        fillings, sliced = _fillings(ranges)
        columns = ((begin[sliced], begin[sliced] + nbytes[sliced]) for begin in (src, dst))
        here, there = (map(slice, low.tolist(), high.tolist()) for low, high in columns)
        reach = (_reach(begin, nbytes) for begin in (src, dst))
        slices = tuple(zip(here, there, strict=True))
        return cls(fillings, slices, tuple(items), *reach)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Between uint8 vectors in host memory that share no byte. Touches nothing else of `dst`.
        Raises `LayoutError` before a byte moves for a range that leaves either."""
        for _ in self.chunks(src.numpy(), dst.numpy()):
            pass

    def chunks(self, src: _Bytes, dst: _Bytes) -> Iterator[None]:
        """`copy` in steps of a cache's worth of bytes each: whoever moves from several sources to
        neighbouring places takes turns between them, while those places are in the cache."""
        for side, memory, (first, end) in (
            ("source", src, self.src_reach),
            ("target", dst, self.dst_reach),
        ):
            if first < 0 or end > memory.size:
                raise LayoutError(
                    f"ranges reach bytes [{first}, {end}) of a {side} of {memory.size} bytes"
                )
        for filling in self.fillings:
            filling.copy(src, dst)
        if self.slices:
            here, there = memoryview(src), memoryview(dst)  # type: ignore[arg-type]
            for a, b in self.slices:
                there[b] = here[a]
        for items in self.items:
            yield from items.chunks(src, dst)


def _fillings(ranges: Descriptors) -> tuple[tuple[_Filling, ...], "npt.NDArray[np.bool_]"]:
    """Long ranges that are copied in runs, and which are not: those of the commonest length, and of
    its multiples, which are neighbours on both sides."""
    long = ranges.nbytes >= LONG_NBYTES
    lengths, counts = np.unique(ranges.nbytes[long], return_counts=True)
    if not len(lengths):
        return (), long
    n = int(lengths[counts.argmax()])
    mine = long & (ranges.nbytes % n == 0)
    number = ranges.nbytes[mine] // n
    nth = np.arange(number.sum()) - np.repeat(number.cumsum() - number, number)
    src, dst = (np.repeat(begin[mine], number) + nth * n for begin in (ranges.src, ranges.dst))
    fillings = _Filling.all_of(src, dst, n)
    return tuple(fillings), long & ~mine if fillings else long


def _reach(begin: Ints, nbytes: Ints) -> tuple[int, int]:
    """The first byte of any range, and the byte behind the last."""
    return (int(begin.min()), int((begin + nbytes).max())) if len(begin) else (0, 0)
