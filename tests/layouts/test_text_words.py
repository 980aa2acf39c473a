"""Words of layout texts one by one: what each reads as, is written as, or why it is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.mesh import MAX_RANKS, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.layouts.text import (
    RECORDS,
    TextError,
    format_layout,
    format_members,
    format_placement,
    format_record,
    parse_layout,
    parse_members,
    parse_spec,
)
from kvflow.layouts.text.placement import format_ranks, read_paging, read_placement, read_ranks
from kvflow.layouts.text.records import read_record
from kvflow.layouts.text.scan import Word, words_of
from kvflow.layouts.text.specs import format_layers, format_spec, read_layers


def word(text: str) -> Word:
    return Word.alone(text)


def placed(text: str) -> Placement:
    return read_placement(word(text))


# --- scanning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"abc', "'\"abc' at column 1 of '\"abc': expected a closing quote"),
        ("a ([", "'[' at column 4 of 'a ([': expected a closing ']'"),
        ("a ([]", "'([]' at column 3 of 'a ([]': expected a closing ')'"),
        ("(]", "']' at column 2 of '(]': expected no ']' here"),
    ],
)
def test_what_is_not_closed_is_pointed_at(text: str, said: str) -> None:
    with pytest.raises(TextError, match=f"^{re.escape(said)}"):
        words_of(text)


def test_words_stand_between_spaces_outside_brackets_and_quotes() -> None:
    found = words_of(r'a  (b c)[ d ] {e "}" f} "g \" h" i"j k"')
    assert [(w.text, w.column) for w in found] == [
        ("a", 0), ("(b c)[ d ]", 3), ('{e "}" f}', 14), (r'"g \" h"', 24), ('i"j k"', 33),
    ]  # fmt: skip


def test_numbers_have_a_least_one() -> None:
    assert [word("0").number("n"), word("007").number("n", 7), word("1").number("n", 1)] == [
        0,
        7,
        1,
    ]
    assert word("9" * 19).number("n") == 10**19 - 1
    for text, low in (("-1", 0), ("x", 0), ("", 0), ("1.0", 0), ("²", 0), ("6", 7)):
        with pytest.raises(TextError, match=f"expected n, a whole number of at least {low}$"):
            word(text).number("n", low)
    with pytest.raises(TextError, match=r"at least 0$"):
        word("x").number("n")


# --- placements and pagings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("round_robin(3)", Placement.simple(RoundRobin(3, 1))),
        ("round_robin(1,i=2)", Placement.simple(RoundRobin(1, 2))),
        ("replicated(1)", Placement(Replicated(), ((0,),))),
        ("replicated(5:9)", Placement(Replicated(5, 9), ((0,),))),
        ("replicated(3,5:)", Placement(Replicated(5), ((0, 1, 2),))),
        ("balanced(1,0:9)", Placement.simple(BalancedChunks(1, 0, 9))),
        ("balanced(2,1:9,rotate=-1,ceil)", Placement.simple(BalancedChunks(2, 1, 9, "ceil", -1))),
        ("contiguous(1,4:9)", Placement.simple(Contiguous(1, 4, 9))),
        ("(pcp2*dcp2)", Placement.simple(RoundRobin(4, 1))),
        ("(p2*q3)(i=5)", Placement.simple(RoundRobin(6, 5))),
        ("tp2*(p2*q2)", Placement(RoundRobin(4), ((0, 4), (1, 5), (2, 6), (3, 7)))),
    ],
)
def test_placements_read(text: str, placement: Placement) -> None:
    assert placed(text) == placement


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("round_robin(0)", "0", "ranks, a whole number of at least 1"),
        ("round_robin(2,i=0)", "0", "the interleave, a whole number of at least 1"),
        ("round_robin(2,i=3,4)", None, "round_robin(N,i=I)"),
        ("replicated(0)", "0", "ranks, a whole number of at least 1"),
        ("replicated(1:2,3:4)", None, "replicated(N), replicated(A:B) or replicated(N,A:B)"),
        (f"replicated({MAX_RANKS + 1})", None, f"a lawful placement, but {MAX_RANKS + 1} ranks"),
        ("balanced(0,0:9)", "0", "ranks, a whole number of at least 1"),
        ("contiguous(0,0:9)", "0", "ranks, a whole number of at least 1"),
        ("contiguous(2,3:)", "3:", "positions as A:B"),
        ("contiguous(2,3:4,5)", None, "contiguous(N,A:B)"),
        ("dcp2(3)", None, "a placement: dcp8(i=1)"),
        ("(dcp2)x", None, "a placement: dcp8(i=1)"),
        ("(dcp2)(i=1)*(tp2)", "(tp2)", "one dealing axis, another one was named before"),
    ],
)
def test_placements_that_are_none(text: str, at: str | None, said: str) -> None:
    begin = f"{at or text!r} at column {text.index(at) + 1 if at else 1} of {text!r}: expected "
    with pytest.raises(TextError, match=f"^{re.escape(begin + said)}"):
        placed(text)


def test_ranks_and_ranges_of_them() -> None:
    assert read_ranks(word("0,4|1-3")) == [[0, 4], [1, 2, 3]]
    assert read_ranks(word("7-7|")) == [[7], []]
    low, high = 10**9, 10**9 + MAX_RANKS
    assert read_ranks(word(f"{low}-{high - 1}")) == [list(range(low, high))]
    with pytest.raises(LayoutError, match=f"^{MAX_RANKS + 1} ranks, at most {MAX_RANKS} can"):
        read_ranks(word(f"{low}-{high}"))
    for bad in ("1-2-3", "3-2"):
        with pytest.raises(TextError, match="a range of ranks as A-B"):
            read_ranks(word(bad))


@pytest.mark.parametrize(
    "text", ["0", "0-2", "0,1", "5,0,1", "5,0-2", "2,1,0", "0-2,4-6,8,9", "1|", "|3-5,0|1"]
)
def test_ranks_are_written_as_they_are_read(text: str) -> None:
    assert format_ranks(read_ranks(word(text))) == text


@pytest.mark.parametrize("text", ["pages(4)", "paged", "paged(4)x", "(4)", ""])
def test_pagings_that_are_none(text: str) -> None:
    with pytest.raises(TextError, match="expected a paging: paged"):
        read_paging(word(text))
    assert read_paging(word("paged(4)")) == Paged(4)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement(RoundRobin(2), ((0, 2, 4, 6), (1, 3, 5, 7))), "pcp8*dcp2@pcp(i=1)"),
        (Placement(RoundRobin(2), ((0, 1), (2, 3))), "dcp2(i=1)*tp2"),
        (Placement(RoundRobin(2, 3), ((0, 1, 4, 5), (2, 3, 6, 7))), "pcp2*dcp2(i=3)*tp2"),
        (Placement(RoundRobin(2), ((0, 1, 2), (3, 4, 5))), "dcp2(i=1)*tp3"),
        (Placement(RoundRobin(2), ((1, 0), (2, 3))), "dcp2(i=1) on 1,0|2,3"),
        (Placement(RoundRobin(2), ((0, 1), (2,))), "dcp2(i=1) on 0,1|2"),
        (Placement(Replicated(), ((0, 1, 3),)), "replicated on 0,1,3"),
        (Placement(Replicated(0, 9), ((0, 1, 2),)), "replicated(3,0:9)"),
        (Placement(Contiguous(2, 0, 9), ((1,), (0,))), "contiguous(2,0:9) on 1|0"),
    ],
)
def test_placements_are_written_short(placement: Placement, text: str) -> None:
    assert format_placement(placement) == text


# --- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("(a:uint8x4)[row]", Record((Field("a", "uint8", 4),))),
        ("(a:uint8x4)[row %2]", None),
        ("(a:uint8x4x2h)[h t e]", Record((Field("a", "uint8", 4, 2),), "h t e")),
        ("(a:uint8x4x2h)[row]", Record((Field("a", "uint8", 4, 2),), "t h e")),
        ("(a:uint8x4,b:uint8x2)[planar %12]", None),
        ("(a:uint8x4,b:uint8x2)[b: t e | a: e t]", None),
        ("bf16[t _2 f e]", None),
    ],
)
def test_records_are_written_as_they_are_read(text: str, record: Record | None) -> None:
    found = read_record(word(text))
    assert format_record(found) == text
    assert record is None or found == record


def fields_of(record: Record) -> str:
    return " ".join(f"{f.name}:{f.dtype}x{f.num_elements}" for f in record.fields)


def test_the_fields_of_named_records_and_of_the_small_model() -> None:
    assert {name: fields_of(record) for name, record in RECORDS.items()} == {
        "fp8_ds_mla": "latent:float8_e4m3fnx512 scale:float32x4 rope:bfloat16x64",
        "bf16": "latent:bfloat16x512 rope:bfloat16x64",
        "fp8_index": "key:float8_e4m3fnx128 scale:float32x1",
        "bf16_index": "key:bfloat16x128",
        "nvfp4_ds_mla": "latent:uint8x256 rope:float8_e4m3fnx64 scale:float8_e4m3fnx32",
        "dsv4": "latent:float8_e4m3fnx448 rope:bfloat16x64 scale:uint8x8",
        "dsv41": "latent:float8_e4m3fnx512 scale:uint8x16",
    }
    assert {c.name: fields_of(c.record) for c in parse_spec("tiny/bfloat16").components} == {
        "latent.0": "latent:bfloat16x8 rope:bfloat16x4",
        "indexer.0": "key:bfloat16x8",
        "latent.1": "latent:bfloat16x8 rope:bfloat16x4",
        "latent.2": "latent:bfloat16x8 rope:bfloat16x4",
        "indexer.2": "key:bfloat16x8",
    }


def test_a_page_may_be_rounded_up_to_one_byte() -> None:
    assert read_record(word("bf16[row %1]")) == read_record(word("bf16"))
    with pytest.raises(TextError, match="a page multiple, a whole number of at least 1"):
        read_record(word("bf16[row %0]"))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("(latent:uint8x4)[row]", "latent"),
        ("(foo:uint8x4)[row]", "indexer"),
        ("(foo:uint8x4x2h)[t h e]", "latent"),
        ("(key:uint8x4x2h)[h t e]", "key"),
        ("(value:uint8x4x2h)[h t e]", "value"),
        ("(value:uint8x4)[row]", "indexer"),
    ],
)
def test_the_kind_that_a_record_suggests(text: str, kind: Any) -> None:
    component = Component(kind, 0, read_record(word(text)))
    assert parse_spec(text) == KVCacheSpec((component,))


# --- whole texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "at", "column", "said"),
    [
        ("dcp2 on", "on", 6, "a model (glm-5.3"),
        ("dcp2 on 1|0", "1|0", 9, "to be followed by a paging: paged(B)"),
        ("dcp2 tiny tiny/fp8", "tiny/fp8", 11, "to be followed by a paging: paged(B)"),
        ("dcp2 a:paged(4) b:paged(4)", "b:paged(4)", 17, "to be followed by a model (glm-5.3"),
        ("dcp2 tiny paged(4) heads(0|1) heads(0|1)", "heads(0|1)", 31, "heads(...) once"),
        ("dcp2 tiny paged(4) header(0|1)", "header(0|1)", 20, "a paging: paged(B), pool(B)"),
        ("dcp2 tiny paged(4) stages", "stages", 20, "a model (glm-5.3"),
    ],
)
def test_texts_that_are_not_whole(text: str, at: str, column: int, said: str) -> None:
    begin = f"{at!r} at column {column} of {text!r}: expected {said}"
    with pytest.raises(TextError, match=f"^{re.escape(begin)}"):
        parse_layout(text)


def test_a_group_alone_holds_everything_whatever_its_name() -> None:
    text = "dcp2(i=1) latent:paged(4) tiny/fp8"
    layout = parse_layout(text)
    assert layout.groups[0].components == layout.spec.names
    assert format_layout(layout) == text
    two = parse_layout("dcp2 latent:paged(4) a[indexer]:paged(4) tiny")
    assert [g.components for g in two.groups] == [
        two.spec.select(kind="latent"),
        *[two.spec.select(kind="indexer")],
    ]
    with pytest.raises(TextError, match="groups must place every component once"):
        parse_layout("dcp2 latent:paged(4) a:paged(4) tiny")


def test_members_of_a_spec_by_item() -> None:
    spec = parse_spec("tiny")
    for text, names in (
        ("", ()),
        ("latent", ("latent.0", "latent.1", "latent.2")),
        ("indexer.2,latent.0-1", ("indexer.2", "latent.0", "latent.1")),
        ("all.2", ("latent.2", "indexer.2")),
        ("all", spec.names),
    ):
        assert parse_members(text, spec) == names
        assert format_members(spec, names) == text


def test_content_keeps_its_order_unless_a_model_says_some_too() -> None:
    alone = parse_spec("{latent.0:bf16} content(b=x,a=y)")
    assert alone.content == (("b", "x"), ("a", "y"))
    assert format_spec(alone) == ["bf16", "content(b=x,a=y)"]
    both = parse_spec("tiny content(weights=w) content(model=m)").content
    assert list(both) == sorted((*parse_spec("tiny").content, ("weights", "w"), ("model", "m")))


# --- components and content -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", [3]), ("3-5", [3, 4, 5]), ("3-3", [3]), ("0-8/4", [0, 4, 8]), ("0-9/4", [0, 4, 8]),
        ("0-2+6-14/4+78", [0, 1, 2, 6, 10, 14, 78]), ("7+3", [7, 3]),
    ],
)  # fmt: skip
def test_layers_read(text: str, layers: list[int]) -> None:
    assert read_layers(word(text)) == layers


def test_as_many_layers_as_may_be_are_read() -> None:
    assert len(read_layers(word("0-65534+70000"))) == 65536


@pytest.mark.parametrize("text", ["3-2", "0-4/0"])
def test_layers_ascend(text: str) -> None:
    with pytest.raises(TextError, match="expected layers that ascend"):
        read_layers(word(text))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], ""), ([5], "5"), ([5, 6], "5-6"), ([5, 7], "5+7"), ([0, 2, 4], "0-4/2"),
        ([0, 1, 2, 6, 10, 14, 78], "0-2+6-14/4+78"), ([0, 4, 5], "0+4-5"),
        ([1, 3, 4, 5, 9], "1+3-5+9"),
    ],
)  # fmt: skip
def test_layers_are_written_short(layers: list[int], text: str) -> None:
    assert format_layers(layers) == text


@pytest.mark.parametrize(
    "text",
    [
        "tiny/fp8", "tiny/fp8/row", "glm-5.3/bfloat16", "gqa(4,8,128)/bfloat16",
        "gqa(1,2,2)/float32[h t e]", "(key:uint8x4x2h)[h t e]",
        "fp8_index", "{latent.1:bf16}", "{indexer.0:bf16}",
        "{latent.0@mtp:bf16}", "{latent.3:bf16}{latent.0-1:bf16}",
        "{latent.3:bf16}{indexer.0:fp8_index}", "{key.0:bf16}",
        "{latent.0-1:bf16,indexer.0-1:fp8_index[row]}",
    ],
)  # fmt: skip
def test_specs_are_written_as_they_are_read(text: str) -> None:
    assert format_spec(parse_spec(text))[0] == text


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (parse_spec, "tony", "a model (glm-5.3"),
        (parse_spec, "tiny/fp8/rows", "one of fp8, bfloat16"),
        (parse_spec, "{latent.0:bf16} contents(a=b)", "content(key=value,...)"),
        (parse_spec, "{latent.0:bf16} content", "content(key=value,...)"),
        (parse_spec, "tiny content(a=b=c)", "key=value"),
        (parse_spec, "tiny content(a=b) content(a=c)", "a lawful content, but content fields"),
        (parse_spec, "{}", "components as kind.layers:record"),
    ],
)
def test_specs_that_are_none(read: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(TextError, match=re.escape(f"expected {said}")):
        read(text)
