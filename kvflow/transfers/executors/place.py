"""Placing pages that lie in staging: one index computation for all components that look alike."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from kvflow.errors import PlanError
from kvflow.layouts.pieces import Heads
from kvflow.layouts.sharding import Ints
from kvflow.transfers.lower import PageGeometry, paired_pieces
from kvflow.transfers.slot_cuts import grains_of

_NATIVE = (1, 2, 4, 8)
Bytes = npt.NDArray[np.uint8]


@frozen(eq=False)
class _Items:
    """Addresses of equal pieces, as indices of overlapping items `unit` bytes apart."""

    index: Ints | slice
    unit: int
    length: int
    dtype: str

    @classmethod
    def at(cls, address: Ints, nbytes: int) -> "_Items":
        unit = int(np.gcd.reduce(address)) or nbytes
        index = address // unit
        first, last = int(index[0]), int(index.max())
        even = np.array_equal(index, np.arange(first, first + len(index)))
        return cls(
            slice(first, first + len(index)) if even else index,
            unit,
            last + 1,
            f"u{nbytes}" if nbytes in _NATIVE else f"V{nbytes}",
        )

    def of(self, memory: Bytes) -> "np.ndarray[Any, Any]":
        return np.ndarray((self.length,), self.dtype, memory, strides=(self.unit,))


def _paired(src: Ints, dst: Ints, nbytes: int) -> Iterator[tuple[_Items, _Items]]:
    """``nbytes`` from ``src[i]`` to ``dst[i]``: neighbours that lie together on both sides in
    larger items, one pair for each size."""
    apart = (np.diff(src) != nbytes) | (np.diff(dst) != nbytes)
    counts = np.diff(np.flatnonzero(apart) + 1, prepend=0, append=len(src))
    grains = np.repeat(grains_of(counts), counts)
    for grain in np.unique(grains).tolist():
        first = np.flatnonzero(grains == grain)[::grain]
        yield _Items.at(src[first], grain * nbytes), _Items.at(dst[first], grain * nbytes)


@frozen(eq=False)
class Placing:
    """Copies the tokens at some slots of one cache to slots of another. The geometries are
    relative: base counts from the first byte of the memory that is given to `copy`."""

    pieces: tuple[tuple[_Items, _Items], ...]

    @classmethod
    def of(
        cls,
        src: PageGeometry,
        src_slots: Ints,
        dst: PageGeometry,
        dst_slots: Ints,
        src_heads: Heads | None = None,
        dst_heads: Heads | None = None,
    ) -> "Placing":
        """Token ``src_slots[i]`` goes to ``dst_slots[i]``, each another one, in some heads of what
        either side stores (default: all); both have at least one."""
        if len(src_slots) != len(dst_slots) or not len(src_slots):
            raise PlanError(f"{len(src_slots)} source slots for {len(dst_slots)} target slots")
        pairs = paired_pieces(src, dst, src_heads, dst_heads)
        return cls(
            tuple(
                items
                for a, b in pairs
                for items in _paired(src.address(src_slots, a), dst.address(dst_slots, b), a.nbytes)
            )
        )

    def copy(self, src: Bytes, dst: Bytes) -> None:
        """Touches no other byte of `dst`. numpy refuses memory that an address leaves."""
        for a, b in self.pieces:
            b.of(dst)[b.index] = a.of(src)[a.index]
