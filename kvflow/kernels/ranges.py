"""Copying many byte ranges from one memory to another on a CPU.

A long range is a slice, copied with one memcpy. Short ranges of one length are opaque items of an
array, which numpy indexes a cache's worth at a time: the copy in between never leaves the cache,
and its pages are not touched for the first time again and again.
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
CHUNK_NBYTES = 1 << 18
"""Bytes that numpy gathers before it places them."""

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
        step = max(CHUNK_NBYTES // self.nbytes, 1)
        for i in range(0, len(self.src.index), step):
            there[self.dst.index[i : i + step]] = here[self.src.index[i : i + step]]
            yield


@frozen(eq=False)
class RangeCopy:
    """Ranges prepared once, copied between any memories that look alike: the bytes `src_reach` of
    the source are read, `dst_reach` of the target written."""

    slices: tuple[tuple[slice, slice], ...]
    items: tuple[_Items, ...]
    src_reach: tuple[int, int]
    dst_reach: tuple[int, int]

    @classmethod
    def of(cls, ranges: Descriptors) -> "RangeCopy":
        """`ranges` as (source, target, length), in bytes from the first of each memory."""
        src, dst, nbytes = ranges.src, ranges.dst, ranges.nbytes
        long = nbytes >= LONG_NBYTES
        columns = ((begin[long], begin[long] + nbytes[long]) for begin in (src, dst))
        here, there = (map(slice, low.tolist(), high.tolist()) for low, high in columns)
        items = []
        for n in np.unique(nbytes[~long]):
            mine = nbytes == n
            items.append(_Items(int(n), _Side.at(src[mine]), _Side.at(dst[mine])))
        reach = (_reach(begin, nbytes) for begin in (src, dst))
        return cls(tuple(zip(here, there, strict=True)), tuple(items), *reach)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Between uint8 vectors in host memory that share no byte. Touches nothing else of `dst`.
        Raises `LayoutError` before a byte moves for a range that leaves either."""
        for _ in self.chunks(src, dst):
            pass

    def chunks(self, src: Tensor, dst: Tensor) -> Iterator[None]:
        """`copy` in steps of a cache's worth of bytes each: whoever moves from several sources to
        neighbouring places takes turns between them, while those places are in the cache."""
        for side, memory, (first, end) in (
            ("source", src, self.src_reach),
            ("target", dst, self.dst_reach),
        ):
            if first < 0 or end > memory.numel():
                raise LayoutError(
                    f"ranges reach bytes [{first}, {end}) of a {side} of {memory.numel()} bytes"
                )
        source, target = src.numpy(), dst.numpy()
        here, there = memoryview(source), memoryview(target)  # type: ignore[arg-type]
        for a, b in self.slices:
            there[b] = here[a]
        for items in self.items:
            yield from items.chunks(source, target)


def _reach(begin: Ints, nbytes: Ints) -> tuple[int, int]:
    """The first byte of any range, and the byte behind the last."""
    return (int(begin.min()), int((begin + nbytes).max())) if len(begin) else (0, 0)
