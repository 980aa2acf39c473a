"""Arrangements: how the records of a page sit together, as mixed-radix orders.

A page is one or more planes, one behind the other. A plane holds some fields of the record in one
order of digits, slowest first: ``t`` token in page, ``h`` head, ``f`` the fields of the plane one
behind the other, ``e`` element. A number makes a tile: in ``h t e t16 e2`` 16 tokens by 2 elements
lie together, and the first digit of an axis is what its tiles leave. ``_2`` is a hole: what stands
right of it takes one of two equal places, and the other belongs to somebody else.

==========================  ================================================
order                       page
==========================  ================================================
``t f e``                   rows: a token's fields adjacent (MLA latent)
``t e`` in several planes   planar: all values, then all scales (indexer)
``t h e``, ``h t e``        NHD, HND
``h e t``                   transposed within each head
``h t e t16 e2``            VNNI tiles
``t _78 e``                 one of 78 layers packed behind each other per token
==========================  ================================================
"""

import re
from collections.abc import Iterable
from math import prod

from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.values import integer, names, positive, tuple_of

Word = str
"""A digit of an order: an axis, perhaps with the size of a tile, or a hole."""

_TEXT = re.compile(r"\[(?P<planes>[^\[\]]*)\](?: %(?P<multiple>[1-9]\d*))?")
_DIGIT = re.compile(r"f|_[1-9]\d*|[the]([1-9]\d*)?")


def _order(order: str | Iterable[str]) -> tuple[Word, ...]:
    return names(order.split()) if isinstance(order, str) else names(order)


@frozen
class Digit:
    """One digit of a mixed-radix place: `size` steps of `stride` bytes along `axis`."""

    axis: str
    size: int
    stride: int


@frozen
class Plane:
    """`fields` of a record in one `order` of digits, slowest first (words or one text)."""

    fields: tuple[str, ...] = field(converter=names)
    order: tuple[Word, ...] = field(converter=_order)

    def __attrs_post_init__(self) -> None:
        text = " ".join(self.order)
        if not self.fields:
            raise LayoutError(f"a plane of order {text!r} holds 0 fields, must be at least 1")
        for word in self.order:
            if not _DIGIT.fullmatch(word):
                raise LayoutError(f"{word!r} in order {text!r} is no digit: t, h, f, e, t16 or _2")
        for axis in "thef":
            mine = [w for w in self.order if w[0] == axis]
            if axis in "te" and not mine:
                raise LayoutError(f"order {text!r} lacks {axis!r}")
            if mine and (mine[0] != axis or mine.count(axis) > 1):
                raise LayoutError(f"order {text!r}: {axis!r} must stand once, before its tiles")
        if len(self.fields) > 1 and "f" not in self.order:
            raise LayoutError(f"order {text!r} lacks 'f' for the fields {list(self.fields)}")

    def without(self, axis: str) -> "Plane":
        """The same plane where `axis` has a single step."""
        return Plane(self.fields, tuple(w for w in self.order if w != axis))

    def __str__(self) -> str:
        return f"{','.join(self.fields)}: {' '.join(self.order)}"


def _planes(planes: Iterable[Plane]) -> tuple[Plane, ...]:
    return tuple_of(Plane, planes)


@frozen
class Arrangement:
    """The planes of a page, one behind the other; a page takes a multiple of `page_multiple`
    bytes."""

    planes: tuple[Plane, ...] = field(converter=_planes)
    page_multiple: int = field(default=1, converter=integer, validator=positive)

    def __attrs_post_init__(self) -> None:
        placed = [name for plane in self.planes for name in plane.fields]
        if not placed or len(set(placed)) != len(placed):
            raise LayoutError(f"planes must place one or more fields once each, got {placed}")

    @classmethod
    def read(cls, text: str) -> "Arrangement":
        """The inverse of `str`. Raises `LayoutError` for another text."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise LayoutError(f"arrangement {text!r}, must be like '[a,b: t f e | c: t e] %576'")
        planes = []
        for plane in match["planes"].split("|"):
            fields, _, order = plane.partition(":")
            planes.append(Plane(tuple(name.strip() for name in fields.split(",")), order))
        return cls(tuple(planes), int(match["multiple"] or 1))

    def __str__(self) -> str:
        rounded = f" %{self.page_multiple}" if self.page_multiple > 1 else ""
        return f"[{' | '.join(map(str, self.planes))}]{rounded}"


ANY_FIELDS = ("*",)
"""Stands for the fields of whatever record an order is given to."""

WORDS = {"row": "t h f e", "planar": "t h e"}
"""Short names of the two common orders."""


def as_arrangement(value: Arrangement | str) -> Arrangement:
    """An arrangement, its text, an order for all fields of a record, or the word for one. An order
    with ``f`` is one plane; without, each field has its own."""
    if isinstance(value, str):
        if value.startswith("["):
            return Arrangement.read(value)
        return Arrangement((Plane(ANY_FIELDS, WORDS.get(value, value)),))
    if not isinstance(value, Arrangement):
        raise LayoutError(f"arrangement {value!r}, must be an Arrangement, a word or an order")
    return value


def resolved(arrangement: Arrangement, heads: dict[str, int]) -> Arrangement:
    """For the fields of a record, by their numbers of heads: the placeholder becomes those fields,
    and digits with a single step are dropped, so that equal pages are equal."""
    planes = [one for plane in arrangement.planes for one in _for_fields(plane, tuple(heads))]
    placed = [name for plane in planes for name in plane.fields]
    if sorted(placed) != sorted(heads):
        raise LayoutError(f"the planes place {placed}, the record has the fields {list(heads)}")
    for i, plane in enumerate(planes):
        several = {name: heads[name] for name in plane.fields if heads[name] > 1}
        if several and "h" not in plane.order:
            raise LayoutError(f"plane {plane}: lacks 'h' for the heads {several}")
        planes[i] = plane if several else plane.without("h")
        if len(plane.fields) == 1:
            planes[i] = planes[i].without("f")
    return Arrangement(tuple(planes), arrangement.page_multiple)


def _for_fields(plane: Plane, fields: tuple[str, ...]) -> list[Plane]:
    if plane.fields != ANY_FIELDS:
        return [plane]
    if "f" in plane.order:
        return [Plane(fields, plane.order)]
    return [Plane((name,), plane.order) for name in fields]


@frozen
class FieldPlace:
    """Where one field of a page lies: item (token, head, element) begins at `offset` plus the sum
    of its digits' steps, in bytes from the first byte of the page."""

    name: str
    offset: int
    digits: tuple[Digit, ...]

    def along(self, axis: str) -> tuple[Digit, ...]:
        """The digits of one axis, most significant first."""
        return tuple(d for d in self.digits if d.axis == axis)


@frozen
class Extent:
    """What a plane places per field: its item size in bytes, and the steps of each axis."""

    name: str
    item_nbytes: int
    steps: tuple[tuple[str, int], ...]


def place_fields(plane: Plane, fields: Iterable[Extent], base: int) -> tuple[list[FieldPlace], int]:
    """The places of a plane's fields from byte `base` of the page on, and the byte behind the
    plane. Raises `LayoutError` for tiles that do not divide, or fields that need different numbers
    of steps left of ``f``."""
    order = plane.order
    cut = order.index("f") if "f" in order else -1
    outer, inner = order[: max(cut, 0)], order[cut + 1 :]
    fields = list(fields)
    sizes = {f.name: _sizes(order, dict(f.steps)) for f in fields}
    insides = [_digits(inner, sizes[f.name][cut + 1 :], f.item_nbytes) for f in fields]
    pitch = sum(span for _, span in insides)
    places, span, before = [], pitch, base
    for f, (within, inside) in zip(fields, insides, strict=True):
        if sizes[f.name][: len(outer)] != sizes[fields[0].name][: len(outer)]:
            raise LayoutError(
                f"plane {plane}: {f.name} and {fields[0].name} need different steps left of 'f'"
            )
        around, span = _digits(outer, sizes[f.name], pitch)
        places.append(FieldPlace(f.name, before, (*around, *within)))
        before += inside
    return places, base + span


def _sizes(order: tuple[Word, ...], steps: dict[str, int]) -> list[int]:
    """The size of each digit; the first of an axis is what its tiles leave."""
    sizes = []
    for word in order:
        tiles = prod(int(w[1:]) for w in order if w[0] == word and len(w) > 1)
        if len(word) == 1 and word in steps and steps[word] % tiles:
            raise LayoutError(
                f"order {' '.join(order)!r}: tiles of {tiles} do not divide the {steps[word]} "
                f"steps of {word!r}"
            )
        sizes.append(int(word[1:]) if len(word) > 1 else steps.get(word, 1) // tiles)
    return sizes


def _digits(order: tuple[Word, ...], sizes: list[int], pitch: int) -> tuple[list[Digit], int]:
    """The digits of a part of an order around something of `pitch` bytes, and the bytes spanned."""
    placed = []
    for word, size in zip(reversed(order), reversed(sizes[: len(order)]), strict=True):
        if word[0] != "_":
            placed.append(Digit(word[0], size, pitch))
        pitch *= size
    return placed[::-1], pitch
