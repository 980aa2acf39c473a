"""Axes: the order of a cache in memory, from which pages and their places follow.

A text such as ``L B h v t e`` lists axes slowest first. Upper case and ``v``, ``w`` say which page:

====  ========================================================================================
axis  counts
====  ========================================================================================
L     layers that hold the component
B     blocks
v     key (0) and value (1)
w     workers that share a row of host memory
====  ========================================================================================

The others are digits of the page's order (`kvflow.layouts.arrangement`): ``t`` tokens, ``h``
heads, ``f`` fields, ``e`` elements, with their tiles; ``page`` is a page in an arrangement of its
own. What stands left of a bar has a region each: ``L | v B t h e`` is a tensor for each layer.
An axis of the first kind right of a digit becomes a hole of the page.
"""

from collections.abc import Mapping
from math import prod

from attrs import frozen

from kvflow.errors import LayoutError

WHICH = "LBvw"
"""The axes that say which page."""


@frozen
class Placed:
    """What axes say at given sizes: the page's order, what each axis steps in bytes, the axes that
    have a region each, and the bytes of a region."""

    order: str
    strides: Mapping[str, int]
    regions: str
    nbytes: int

    def base(self, at: Mapping[str, int]) -> int:
        """Where the pages of (layer, key or value, worker) begin in their region."""
        return sum(self.strides.get(axis, 0) * index for axis, index in at.items())


def place_axes(text: str, sizes: Mapping[str, int], unit: int, multiple: int) -> Placed:
    """`sizes` are the steps of each axis, `unit` the bytes of the last one's item; the slowest
    axis right of the bar steps by a multiple of `multiple`. Raises `LayoutError` for an axis
    without a size or tiles that do not divide it."""
    left, _, right = text.rpartition("|")
    order: list[str] = []
    strides: dict[str, int] = {}
    pitch = unit
    words = right.split()
    for place, word in reversed(list(enumerate(words))):
        if place == 0:
            pitch = -(-pitch // multiple) * multiple
        if word in WHICH:
            strides[word] = pitch
            order.append(f"_{sizes[word]}")
        elif word != "page":
            order.append(word)
        pitch *= _size(word, words, sizes)
    order.reverse()
    while order and order[0].startswith("_"):
        order.pop(0)
    return Placed(" ".join(w for w in order if w != "_1"), strides, left.strip(), pitch)


def _size(word: str, words: list[str], sizes: Mapping[str, int]) -> int:
    if word == "page":
        return 1
    if len(word) > 1:
        return int(word[1:])
    tiles = prod(int(w[1:]) for w in words if w[0] == word and len(w) > 1 and w != "page")
    if word not in sizes or sizes[word] % tiles:
        raise LayoutError(f"axes {words}: {sizes.get(word)} steps of {word!r} in tiles of {tiles}")
    return sizes[word] // tiles
