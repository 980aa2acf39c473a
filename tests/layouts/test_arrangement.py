"""Arrangements: orders read and said, places counted by hand, and what no page can be."""

import re

import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import (
    ANY_FIELDS,
    WORDS,
    Arrangement,
    Digit,
    Extent,
    FieldPlace,
    Plane,
    as_arrangement,
    place_fields,
    resolved,
)
from kvflow.layouts.record import Field, Record
from kvflow.testing import page_cells


def page(order: str, *fields: Field, block_size: int = 2) -> str:
    """A page as a text of its bytes, one letter a field; each item says token, head, element."""
    record = Record(fields, order)
    cells = page_cells(record, block_size)
    told = {}
    for place in record.places(block_size):
        (f,) = (f for f in fields if f.name == place.name)
        for (token, name, head), at in cells.items():
            if name != f.name:
                continue
            each = len(at) // f.num_elements
            for element in range(f.num_elements):
                begin = at[element * each]
                assert begin == place.offset + sum(
                    digit_of(place, axis, value)
                    for axis, value in (("t", token), ("h", head), ("e", element))
                )
                told[begin] = f"{name}{token}{head}{element}"
    last = max(told)
    return " ".join(told.get(i, "-") for i in range(last + 1))


def digit_of(place: FieldPlace, axis: str, index: int) -> int:
    """The bytes that an index along an axis steps, digit by digit."""
    total = 0
    for digit in reversed(place.along(axis)):
        total += index % digit.size * digit.stride
        index //= digit.size
    assert index == 0
    return total


A, B = Field("a", "uint8", 2), Field("b", "uint8", 1)
K, V = Field("k", "uint8", 2, 2), Field("v", "uint8", 1, 2)


@pytest.mark.parametrize(
    ("order", "fields", "told"),
    [
        ("row", (A, B), "a000 a001 b000 a100 a101 b100"),
        ("planar", (A, B), "a000 a001 a100 a101 b000 b100"),
        ("t h e", (K,), "k000 k001 k010 k011 k100 k101 k110 k111"),
        ("h t e", (K,), "k000 k001 k100 k101 k010 k011 k110 k111"),
        ("h e t", (K,), "k000 k100 k001 k101 k010 k110 k011 k111"),
        ("t e h", (K,), "k000 k010 k001 k011 k100 k110 k101 k111"),
        ("e t h", (K,), "k000 k010 k100 k110 k001 k011 k101 k111"),
        ("t h f e", (K, V), "k000 k001 v000 k010 k011 v010 k100 k101 v100 k110 k111 v110"),
        ("t f h e", (K, V), "k000 k001 k010 k011 v000 v010 k100 k101 k110 k111 v100 v110"),
        ("f t h e", (A, B), "a000 a001 a100 a101 b000 b100"),
        ("h f e t", (A, B), "a000 a100 a001 a101 b000 b100"),
        ("t _2 e", (A,), "a000 a001 - - a100 a101"),
        ("_3 t e", (A,), "a000 a001 a100 a101"),
        ("t f _2 e", (A, B), "a000 a001 - - b000 - a100 a101 - - b100"),
        ("t h e e2", (K,), "k000 k001 k010 k011 k100 k101 k110 k111"),
        ("t e h e1", (K,), "k000 k010 k001 k011 k100 k110 k101 k111"),
        ("[b: t e | a: e t]", (A, B), "b000 b100 a000 a100 a001 a101"),
        ("[b,a: t f e] %16", (A, B), "b000 a000 a001 b100 a100 a101"),
    ],
)
def test_orders_say_where_every_byte_lies(order: str, fields: tuple[Field, ...], told: str) -> None:
    assert page(order, *fields) == told


def test_tiles_lie_together() -> None:
    four = Field("k", "uint8", 4)
    assert page("e t e2", four) == "k000 k001 k100 k101 k002 k003 k102 k103"
    assert page("t e t2 e2", four, block_size=4) == (
        "k000 k001 k100 k101 k002 k003 k102 k103 k200 k201 k300 k301 k202 k203 k302 k303"
    )
    assert page("h t e t2 e2", four, block_size=4) == page("t e t2 e2", four, block_size=4)
    deep = Field("k", "uint8", 1)
    assert page("t e t2 e1 t2", deep, block_size=8) == " ".join(f"k{i}00" for i in range(8))
    assert page("t t2 e t2", Field("k", "uint8", 2), block_size=4) == (
        "k000 k100 k001 k101 k200 k300 k201 k301"
    )


def test_wider_items_step_by_their_bytes() -> None:
    fields = (Field("a", "float32", 1), Field("b", "bfloat16", 2))
    assert [(p.name, p.offset, p.along("t")) for p in Record(fields, "t f e").places(3)] == [
        ("a", 0, (Digit("t", 3, 8),)),
        ("b", 4, (Digit("t", 3, 8),)),
    ]
    assert [p.offset for p in Record(fields, "planar").places(3)] == [0, 12]


def test_places_of_one_plane_end_where_the_next_begins() -> None:
    plane = Plane(("a", "b"), "t f e")
    extents = [Extent("a", 2, (("t", 3), ("e", 4))), Extent("b", 1, (("t", 3), ("e", 2)))]
    places, end = place_fields(plane, extents, 100)
    assert end == 100 + 3 * 10
    assert places == [
        FieldPlace("a", 100, (Digit("t", 3, 10), Digit("e", 4, 2))),
        FieldPlace("b", 108, (Digit("t", 3, 10), Digit("e", 2, 1))),
    ]
    places, end = place_fields(Plane(("a",), "_2 e t"), extents[:1], 1)
    assert (places, end) == (
        [FieldPlace("a", 1, (Digit("e", 4, 6), Digit("t", 3, 2)))], 1 + 2 * 24,
    )  # fmt: skip
    assert places[0].along("h") == ()
    places, end = place_fields(Plane(("a",), "t h e"), extents[:1], 0)
    assert (places[0].along("h"), end) == ((Digit("h", 1, 8),), 24), "an axis not told has a step"


def test_pages_are_rounded_up_to_the_multiple() -> None:
    for multiple, pitch in ((1, 6), (4, 8), (6, 6), (7, 7), (576, 576)):
        record = Record((A, B), Arrangement((Plane(ANY_FIELDS, "t f e"),), multiple))
        assert record.page_pitch(2) == pitch
        assert (record.page_nbytes(2), record.page_extent(2)) == (6, 6)
    holes = Record((A,), "t _78 e")
    assert (holes.page_nbytes(2), holes.page_extent(2), holes.page_pitch(2)) == (4, 158, 312)
    assert not holes.is_solid(2)
    assert not holes.is_solid(1) or holes.page_pitch(1) == 156
    ahead = Record((A,), "_3 t e")
    assert (ahead.page_extent(2), ahead.page_pitch(2)) == (4, 12)
    assert ahead.is_solid(2)


def test_words_stand_for_orders() -> None:
    assert WORDS == {"row": "t h f e", "planar": "t h e"}
    for word, order in WORDS.items():
        assert Record((K, V), word) == Record((K, V), order)
    assert as_arrangement("h t e") == Arrangement((Plane(ANY_FIELDS, "h t e"),))
    assert as_arrangement("[a: t e] %4") == Arrangement((Plane(("a",), "t e"),), 4)
    plain = Arrangement((Plane(("a",), ("t", "e")),))
    assert as_arrangement(plain) is plain
    for bad in (None, 3, ("t", "e")):
        with pytest.raises(LayoutError, match="must be an Arrangement, a word or an order"):
            as_arrangement(bad)  # type: ignore[arg-type]


def test_texts_are_read_back() -> None:
    for text in (
        "[a: t e]", "[a,b: t f e] %576", "[a: h t e t16 e2 | b: t _2 e]", "[*: t h f e]",
        "[a: t e] %10", "[a: t e] %2",
    ):  # fmt: skip
        assert str(Arrangement.read(text)) == text
    assert Arrangement.read("[ a , b :  t f e|c:t e]") == Arrangement(
        (Plane(("a", "b"), "t f e"), Plane(("c",), "t e"))
    )
    assert str(Arrangement((Plane(("a",), "t e"),), 1)) == "[a: t e]"
    for text in ("a: t e", "[a: t e", "[a: t e]%4", "[a: t e] %0", "[a: t e] %04", "[[a: t e]]",
                 "[a: t e] %4 "):  # fmt: skip
        with pytest.raises(LayoutError, match=re.escape(f"arrangement {text!r}, must be like")):
            Arrangement.read(text)
    with pytest.raises(LayoutError):
        Arrangement.read("[a]")


def test_equal_pages_are_equal_values() -> None:
    """Digits with a single step are dropped, and the placeholder becomes the fields."""
    assert Record((A,), "t h f e") == Record((A,), "t e") == Record((A,), "[a: t e]")
    assert str(Record((A, B), "row").arrangement) == "[a,b: t f e]"
    assert str(Record((A, B), "planar").arrangement) == "[a: t e | b: t e]"
    assert str(Record((K,), "h t f e").arrangement) == "[k: h t e]"
    assert Record((K,), "h t e") != Record((K,), "t h e")
    given = Arrangement((Plane(ANY_FIELDS, "t h f e"),), 8)
    assert resolved(given, {"k": 2, "v": 2}) == Arrangement((Plane(("k", "v"), "t h f e"),), 8)
    assert resolved(given, {"k": 1}).planes == (Plane(("k",), "t e"),)
    mixed = Arrangement((Plane(("k",), "h t e"), Plane(("v",), "t h e")))
    assert resolved(mixed, {"k": 1, "v": 2}).planes == (
        Plane(("k",), "t e"), Plane(("v",), "t h e"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "order", "rule"),
    [
        ((), "t e", "a plane of order 't e' holds 0 fields, must be at least 1"),
        (("a",), "e", "order 'e' lacks 't'"),
        (("a",), "t", "order 't' lacks 'e'"),
        (("a",), "t h", "order 't h' lacks 'e'"),
        (("a", "b"), "t h e", "order 't h e' lacks 'f' for the fields ['a', 'b']"),
        (("a",), "t e x", "'x' in order 't e x' is no digit: t, h, f, e, t16 or _2"),
        (("a",), "t e t", "order 't e t': 't' must stand once, before its tiles"),
        (("a",), "t16 t e", "order 't16 t e': 't' must stand once, before its tiles"),
        (("a",), "t h2 e", "order 't h2 e': 'h' must stand once, before its tiles"),
        (("a",), "t f f e", "order 't f f e': 'f' must stand once, before its tiles"),
        (("a",), "t e e2 e", "order 't e e2 e': 'e' must stand once, before its tiles"),
        *(
            (("a",), f"t e {word}", f"{word!r} in order")
            for word in ("_", "_0", "_02", "e0", "f2", "t-1", "tt", "16", "E")
        ),
    ],
)
def test_orders_that_mean_no_page_are_refused(
    fields: tuple[str, ...], order: str, rule: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(rule)):
        Plane(fields, order)
    with pytest.raises(LayoutError, match=re.escape(rule)):
        Plane(fields, tuple(order.split()))


def test_planes_place_every_field_of_a_record_once() -> None:
    one = Plane(("a",), "t e")
    for planes, placed in (((), []), ((one, one), ["a", "a"])):
        with pytest.raises(LayoutError, match=re.escape(f"once each, got {placed}")):
            Arrangement(planes)
    with pytest.raises(LayoutError, match=r"once each, got \['a', 'a'\]"):
        Arrangement((Plane(("a", "a"), "t f e"),))
    for planes, placed in (((one,), ["a"]), ((one, Plane(("c",), "t e")), ["a", "c"])):
        with pytest.raises(LayoutError, match=re.escape(f"the planes place {placed}, the record")):
            Record((A, B), Arrangement(planes))
    assert Record((A, B), Arrangement((Plane(("b",), "t e"), one))).nbytes == 3
    for bad in (0, -4, 1.5):
        with pytest.raises(LayoutError, match=r"page_multiple|must be an integer"):
            Arrangement((one,), bad)  # type: ignore[arg-type]


def test_heads_need_a_digit() -> None:
    with pytest.raises(LayoutError, match=re.escape("plane k: t e: lacks 'h' for the heads {'k'")):
        Record((K,), "t e")
    with pytest.raises(LayoutError, match=re.escape("lacks 'h' for the heads {'k': 2, 'v': 2}")):
        Record((K, V), "t f e")


def test_tiles_must_divide() -> None:
    with pytest.raises(LayoutError, match="tiles of 3 do not divide the 2 steps of 'e'"):
        Record((A,), "t e e3").pieces(1)
    with pytest.raises(LayoutError, match="order 't e t2 t4': tiles of 8 do not divide the 12"):
        Record((A,), "t e t2 t4").pieces(12)
    assert Record((A,), "t e t2 t4").page_nbytes(16) == 32
    with pytest.raises(LayoutError, match=r"plane k,v: t h e f: v and k need different steps left"):
        Record((K, V), "t h e f").pieces(1)
    same = Field("w", "float32", 2, 2)
    assert len(Record((K, same), "t h e f").pieces(1)) == 8
    with pytest.raises(LayoutError, match="a page of 0 tokens, must be at least 1"):
        Record((A,)).pieces(0)
