"""Pieces: the bytes of a page that move together, cut as coarsely as its arrangement allows."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from kvflow.layouts.arrangement import Digit, FieldPlace

Heads = tuple[int, int]
"""A half-open range of heads."""


@frozen
class Piece:
    """Bytes of a page that move together. Token i of the page owns `nbytes` from
    ``offset + step(i)``; `record_offset` is where they lie in a packed row.

    step(i) is ``i * stride``; with `tiles`, (size, stride) digits of i from the slowest to the
    fastest, ``stride`` steps by what the tiles leave of i."""

    offset: int
    stride: int
    nbytes: int
    record_offset: int
    tiles: tuple[tuple[int, int], ...] = ()

    def cut(self, start: int, stop: int) -> "Piece":
        """The bytes ``[start, stop)`` of the packed row, which this piece must hold."""
        ahead = start - self.record_offset
        return evolve(self, offset=self.offset + ahead, nbytes=stop - start, record_offset=start)


def pieces_of(
    items: Iterable[tuple[int, int]], places: Iterable[FieldPlace], heads: Heads
) -> tuple[Piece, ...]:
    """One token's bytes in the order of the packed row (field, head, element), neighbours that
    stay together in every token merged. `items` are each field's item size in bytes and number of
    elements."""
    merged: list[Piece] = []
    record_offset = 0
    for (item_nbytes, num_elements), place in zip(items, places, strict=True):
        (_, stride), *tiles = _joined(place.along("t"))
        head = _steps(place.along("h"), np.arange(*heads))
        element = _steps(place.along("e"), np.arange(num_elements))
        at = (place.offset + head[:, None] + element).ravel()
        first = np.flatnonzero(np.append(True, np.diff(at) != item_nbytes))
        nbytes = np.diff(np.append(first, len(at))) * item_nbytes
        for begin, size in zip(at[first].tolist(), nbytes.tolist(), strict=True):
            piece = Piece(begin, stride, size, record_offset, tuple(tiles))
            if merged and glued(merged[-1], piece):
                merged[-1] = evolve(merged[-1], nbytes=merged[-1].nbytes + size)
            else:
                merged.append(piece)
            record_offset += size
    return tuple(merged)


def glued(a: Piece, b: Piece) -> bool:
    """Whether the second follows the first in every token."""
    return a.offset + a.nbytes == b.offset and (a.stride, a.tiles) == (b.stride, b.tiles)


def _joined(digits: tuple[Digit, ...]) -> list[tuple[int, int]]:
    """(size, stride) of an axis, slowest first; digits that step on evenly are one."""
    joined: list[tuple[int, int]] = []
    for d in digits:
        if joined and joined[-1][1] == d.size * d.stride:
            joined[-1] = (joined[-1][0] * d.size, d.stride)
        else:
            joined.append((d.size, d.stride))
    return joined


def _steps(digits: tuple[Digit, ...], index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that each index along an axis steps from the first item."""
    steps = np.zeros_like(index)
    for d in reversed(digits):
        steps, index = steps + index % d.size * d.stride, index // d.size
    return steps


def refine(a: Sequence[Piece], b: Sequence[Piece]) -> list[tuple[Piece, Piece]]:
    """Two ways to hold the same packed row, both cut wherever either is."""
    ends = {p.record_offset + p.nbytes for p in (*a, *b)}
    pairs, i, j = [], 0, 0
    for start, stop in pairwise(sorted({0} | ends)):
        i += a[i].record_offset + a[i].nbytes <= start
        j += b[j].record_offset + b[j].nbytes <= start
        pairs.append((a[i].cut(start, stop), b[j].cut(start, stop)))
    return pairs
