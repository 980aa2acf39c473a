"""Layouts as texts: the same value comes back, common ones are short, errors point at a word."""

import re
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Dense, Paged, Pool
from kvflow.layouts.record import DTYPE_NBYTES, Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, Component, KVCacheSpec
from kvflow.layouts.text import (
    MODELS,
    RECORDS,
    TextError,
    format_layout,
    format_paging,
    format_placement,
    format_record,
    parse_layout,
)
from kvflow.testing import layouts, placements, shardings, specs, token_ranges

ODD = 'a1.-/ "\\\n[](){},|:=@*é\ud800'
"""What quoting has to keep apart."""

TINY = KVCacheSpec.from_config(MODELS["tiny"])


def same(text: str) -> KVLayout:
    """The layout of a text, after its canonical text gave the same one and itself."""
    layout = parse_layout(text)
    canonical = format_layout(layout)
    assert parse_layout(canonical) == layout
    assert format_layout(parse_layout(canonical)) == canonical
    return layout


# --- every value comes back -----------------------------------------------------------------------


@st.composite
def split_layouts(draw: st.DrawFn) -> KVLayout:
    """Any layout (heads, layers and hosts are dealt by the strategy), its groups cut anywhere."""
    tokens, spec = draw(token_ranges()), draw(st.one_of(specs(), headed_specs()))
    layout = draw(layouts(spec, tokens))
    if draw(st.booleans()):
        return layout
    names = draw(st.permutations(spec.names))
    cut = draw(st.integers(0, len(names)))
    titles = draw(st.lists(group_names(), min_size=2, max_size=2, unique=True))
    members = (names[:cut], names[cut:])
    groups = tuple(CacheGroup(t, m, Pool(4)) for t, m in zip(titles, members, strict=True))
    return evolve(layout, groups=groups)


def group_names() -> st.SearchStrategy[str]:
    usual = st.sampled_from(["kv", "latent", "indexer", "bf16", "a-b"])
    return st.one_of(usual, st.text(ODD, max_size=6))


@st.composite
def records(draw: st.DrawFn, heads: int | None = None) -> Record:
    """Records of one to three fields, any number of heads, in rows, planes and tiles."""
    names = ["key", "value", "scale"][: draw(st.integers(1, 3))]
    heads = heads or draw(st.sampled_from([1, 2, 4]))
    kinds = st.sampled_from(sorted(DTYPE_NBYTES))
    fields = tuple(Field(n, draw(kinds), draw(st.sampled_from([4, 8])), heads) for n in names)
    orders = ["row", "planar", "t h e", "h t e", "h e t", "h t e t2 e2", "t _3 h f e", "h t f e"]
    record = Record(fields, draw(st.sampled_from(orders)))
    return Record(fields, evolve(record.arrangement, page_multiple=draw(st.sampled_from([1, 576]))))


@st.composite
def headed_specs(draw: st.DrawFn) -> KVCacheSpec:
    """Components of any kind and record, layers in any order, content of any text."""
    ids = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    named = st.sampled_from(sorted(RECORDS)).map(RECORDS.__getitem__)
    record = st.one_of(records(draw(st.sampled_from([1, 2, 4]))), named)
    kinds = st.sampled_from(["latent", "indexer", "key", "value"])
    parts = st.sampled_from(["main", "mtp"])
    components = tuple(Component(draw(kinds), i, draw(record), draw(parts)) for i in ids)
    words = st.text(ODD, max_size=5)
    content = {draw(words): draw(words) for _ in range(draw(st.integers(0, 2)))}
    return KVCacheSpec(components, tuple(content.items()))


@given(split_layouts())
def test_every_layout_comes_back(layout: KVLayout) -> None:
    text = format_layout(layout)
    assert parse_layout(text) == layout
    assert format_layout(parse_layout(text)) == text


@given(layouts(TINY, (0, 40)))
def test_what_is_held_may_be_said_elsewhere(layout: KVLayout) -> None:
    text = format_layout(layout, TINY)
    assert ("tiny" not in text and "{" not in text) == (layout.spec == TINY)
    assert parse_layout(text, TINY) == layout


@given(token_ranges(), st.data())
def test_placements_print_the_same_language(tokens: tuple[int, int], data: st.DataObject) -> None:
    placement = data.draw(placements(tokens))
    for text in (str(placement), format_placement(placement)):
        assert parse_layout(f"{text} paged(4) tiny").placement == placement
    sharding = data.draw(shardings(tokens))
    layout = parse_layout(f"{sharding} {Pool(3)} tiny")
    assert layout.placement == Placement.simple(sharding)


@given(records())
def test_every_record_comes_back(record: Record) -> None:
    spec = parse_layout(f"replicated paged(4) {{latent.3:{format_record(record)}}}").spec
    assert spec.components == (Component("latent", 3, record),)


# --- the common ones are short --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "dcp8(i=1) paged(64) fp8_ds_mla",
        "pcp4*dcp2@pcp(i=16) paged(16) glm-5.3/fp8",
        "dcp4(i=1)*tp2 paged(4) glm-5.3/bfloat16",
        "replicated(4) pool(64) tiny/fp8",
        "replicated dense(4096) tiny/fp8/row",
        "balanced(8,512:1000) latent:pool(64) indexer:paged(16) glm-5.3/fp8",
        "dcp2(i=1) on 0,3-5|1 kv[latent]:paged(4) x[indexer.2,indexer.0]:paged(8) tiny/fp8",
        "replicated(4) paged(4) bf16[t _78 f e %576] content(model=x)",
        "dcp2(i=1) paged(64) nvfp4_ds_mla",
        "dcp2(i=1) paged(64) dsv4",
        "pcp4*dcp2@pcp(i=1) paged(16) gqa(4,8,128)/bfloat16 heads(0,1|2,3)",
        "replicated(2) paged(32) gqa(2,4,8)/float16[h t e t16 e2] heads(0|1)",
        "dcp2(i=1)*tp2 paged(4) {key.0-3:(key:bfloat16x8x4h)[h t e]} heads(0,2|1,3) hosts(0-3)",
        "replicated(4) paged(4) tiny/fp8 stages(all.0 on 0,1|all.1-2 on 2,3)",
        "replicated paged(4) fp8_ds_mla heads(0|) stages(all on 0| on ) hosts(|0)",
        "replicated paged(4) {latent.0-2:bf16,indexer.0-8/4:fp8_index[row],latent.3@mtp:bf16}",
    ],
)
def test_canonical_texts(text: str) -> None:
    assert format_layout(same(text)) == text


def test_meshes_say_which_axis_deals_and_which_replicates() -> None:
    def placed(text: str) -> Placement:
        return same(f"{text} paged(4) tiny").placement

    assert placed("dcp8") == Placement.simple(RoundRobin(8, 1))
    assert placed("pcp4") == placed("replicated(4)") == Placement(Replicated(), ((0, 1, 2, 3),))
    assert placed("pcp4*dcp2@pcp(i=16)").ranks == ((0, 2), (1, 3))
    assert placed("pcp2*dcp2(i=4)").ranks == ((0, 2), (1, 3))
    assert placed("dcp2(i=4)*pcp2").ranks == ((0, 1), (2, 3))
    together = placed("(pcp2*dcp2)(i=4)")  # fault A08: the stride is the product of the axes
    assert together == Placement.simple(RoundRobin(4, 4))
    assert [int(r) for r in together.sharding.owner(range(0, 32, 4))] == [0, 1, 2, 3, 0, 1, 2, 3]
    mesh = Mesh((Axis("tp", 2), Axis("pcp", 2), Axis("dcp", 2, over=("pcp", "tp"))))
    assert placed("tp2*pcp2*dcp2@pcp+tp(i=3)") == mesh.place(RoundRobin(2, 3), "dcp")
    assert placed("pcp2*dcp2(i=4)*tp2").ranks == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert placed("pcp8(i=2)") == Placement.simple(RoundRobin(8, 2))


def test_golden_values() -> None:
    layout = same("balanced(4,3:40,ceil,rotate=2) latent:pool(64) indexer:dense(99) glm-5.2/fp8")
    spec = KVCacheSpec.from_config(GLM_5_3)
    assert layout.spec == spec
    assert layout.placement == Placement.simple(BalancedChunks(4, 3, 40, "ceil", 2))
    assert layout.groups == (
        CacheGroup("latent", spec.select(kind="latent"), Pool(64)),
        CacheGroup("indexer", spec.select(kind="indexer"), Dense(99)),
    )
    one = same("contiguous(2,0:9) paged(1) fp8_ds_mla[t h e]").spec.components
    assert one == (Component("latent", 0, Record(RECORDS["fp8_ds_mla"].fields, "t h e")),)
    nbytes = {name: record.nbytes for name, record in RECORDS.items()}
    assert nbytes == {
        "fp8_ds_mla": 656, "bf16": 1152, "fp8_index": 132, "bf16_index": 256,
        "nvfp4_ds_mla": 352, "dsv4": 584, "dsv41": 528,
    }  # fmt: skip
    assert RECORDS["fp8_index"].page_nbytes(64) == 8448
    assert RECORDS["dsv4"].page_pitch(64) % 576 == 0
    gqa = same("replicated paged(4) gqa(4,8,128)[h t e]").spec
    assert gqa == KVCacheSpec.of_attention(
        4, num_heads=8, head_dim=128, key_order="h t e", value_order="h t e"
    )
    assert same("contiguous(2,0:9) paged(1) tiny").placement.sharding == Contiguous(2, 0, 9)
    content = same("dcp2 paged(1) tiny content(model=x)").spec
    assert content == KVCacheSpec.from_config(MODELS["tiny"], content={"model": "x"})


# --- errors point at a word -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word", "column", "expected"),
    [
        ("dcp8 pagd(64) tiny", "pagd(64)", 6, "a paging: paged(B)"),
        ("dpc paged(64) tiny", "dpc", 1, "a placement: dcp8(i=1)"),
        ("dcp8(i=0) paged(64) tiny", "0", 8, "the interleave, a whole number of at least 1"),
        ("dcp8(i=1 paged(64) tiny", "(i=1 paged(64) tiny", 5, "a closing ')'"),
        ("dcp8) paged(64) tiny", ") paged(64) tiny", 5, "no ')' here"),
        ("dcp8 paged(0) tiny", "0", 12, "tokens of a page, a whole number of at least 1"),
        ("dcp8 paged(1,2) tiny", "paged(1,2)", 6, "one number in paged(...)"),
        ("dcp8 paged(4) tiny/fp9", "fp9", 20, "one of fp8, bfloat16"),
        ("dcp8 paged(4) tony", "tony", 15, "a model (glm-5.3"),
        ("dcp8 paged(4) tiny tiny", "tiny", 20, "one spec"),
        ("dcp8 paged(4)", "paged(4)", 6, "to be followed by a model"),
        ("dcp8 tiny", "tiny", 6, "to be followed by a paging"),
        ("pcp4*dcp3@pcp paged(4) tiny", "pcp4*dcp3@pcp", 1, "size 3 must divide the 4 ranks"),
        ("pcp4*(i=3) paged(4) tiny", "", 6, "a placement"),
        ("pcp4(i=1)*dcp2(i=1) paged(4) tiny", "dcp2(i=1)", 11, "one dealing axis"),
        ("replicated(2,0:5,1) paged(4) tiny", "replicated(2,0:5,1)", 1, "replicated(N,A:B)"),
        ("replicated(2,0-5) paged(4) tiny", "0-5", 14, "positions as A:B or A:"),
        ("balanced(2,0:) paged(4) tiny", "0:", 12, "positions as A:B"),
        ("balanced(2,0:9,odd) paged(4) tiny", "odd", 16, "even, ceil or rotate=R"),
        ("balanced(2) paged(4) tiny", "balanced(2)", 1, "balanced(N,A:B)"),
        ("contiguous(2) paged(4) tiny", "contiguous(2)", 1, "contiguous(N,A:B)"),
        ("round_robin() paged(4) tiny", "round_robin()", 1, "round_robin(N,i=I)"),
        ("round_robin(2,3) paged(4) tiny", "3", 15, "i=I"),
        ("dcp2 on 0|0 paged(4) tiny", "dcp2", 1, "a rank holds one shard"),
        ("dcp2 on 0|x paged(4) tiny", "x", 11, "a rank"),
        ("dcp2 on 3-1|0 paged(4) tiny", "3-1", 9, "a range of ranks"),
        ("dcp8 a[foo]:paged(4) tiny", "foo", 8, "one of latent, indexer"),
        ("dcp8 a[latent.9]:paged(4) tiny", "latent.9", 8, "components that the cache holds"),
        ("dcp8 a[latent.3-1]:paged(4) tiny", "3-1", 15, "layers that ascend"),
        ("dcp8 a[latent.x]:paged(4) tiny", "x", 15, "layers as 3, 0-77"),
        ("dcp8 a[latent]:paged(4) tiny", "dcp8", 1, "groups must place every"),
        ("dcp8 paged(4) tiny content(a)", "a", 28, "key=value"),
        ('dcp8 paged(4) tiny content(a="\\x")', '"\\x"', 30, "a text in quotes"),
        ('dcp8 paged(4) tiny content(a="x)', '"x)', 30, "a closing quote"),
        ("dcp8 paged(4) tiny content(a=b) content(c=d)", "content(c=d)", 33, "content(...) once"),
        (
            "dcp8 paged(4) tiny content(a=b,a=c)",
            "content(a=b,a=c)",
            20,
            "a lawful content, but content fields named twice: ['a']",
        ),
        (
            "dcp8 paged(4) tiny content(e4m3=x,a=b)",
            "content(e4m3=x,a=b)",
            20,
            "a lawful content, but content fields named twice: ['e4m3']",
        ),
        ("dcp4 paged(4) tiny stages(all on)", "all on", 27, "components on ranks"),
        ("dcp4 paged(4) tiny heads(0|1)", "dcp4", 1, "head_ranks must place every rank once"),
        ("dcp4 paged(4) {latent.0}", "latent.0", 16, "components as kind.layers:record"),
        ("dcp4 paged(4) {latent.0:bf16}x", "x", 30, "{component:record,...}"),
        ("dcp4 paged(4) {tensor.0:bf16}", "{tensor.0:bf16}", 15, "must be one of"),
        ("dcp4 paged(4) {latent.0:bf17}", "bf17", 25, "a record: fp8_ds_mla"),
        ("dcp4 paged(4) (a:b)[row]", "a:b", 16, "a field as name:dtypexN"),
        ("dcp4 paged(4) (a:uint9x4)", "(a:uint9x4)", 15, "has dtype 'uint9'"),
        ("dcp4 paged(4) gqa(4,8)", "gqa(4,8)", 15, "gqa(LAYERS,HEADS,DIM)"),
        ("dcp4 paged(4) gqa(4,8,8)/int3", "gqa(4,8,8)/int3", 15, "has dtype 'int3'"),
        ("dcp4 paged(4) bf16[t x]", "bf16[t x]", 15, "'x' in order"),
        ("dcp4 paged(4) bf16[t f e %0]", "0", 27, "a page multiple"),
        ('dcp4 "a\\x":paged(4) bf16', '"a\\x"', 6, "a text in quotes as in JSON"),
        ("dcp4 paged(4) {latent.0-65536:bf16}", "0-65536", 23, "at most 65536 layers"),
        ("dcp4 a[latent.7+0-65535]:paged(4) tiny", "0-65535", 17, "these are 65537"),
        ("dcp4 paged(4) gqa(65537,1,1)", "gqa(65537,1,1)", 15, "at most 65536 layers"),
        (f"dcp{10**19} paged(4) tiny", f"{10**19}", 4, "at most 19 digits, got 20"),
        (f"dcp4 paged(4) {{latent.{10**19}:bf16}}", f"{10**19}", 23, "at most 19 digits"),
        (f"dcp4 paged(4) gqa({10**19},1,1)", f"{10**19}", 19, "at most 19 digits"),
        (f"dcp4 paged(4) (a:uint8x{10**19})", f"{10**19}", 24, "at most 19 digits"),
        (f"replicated({10**19}:) paged(4) tiny", f"{10**19}", 12, "at most 19 digits"),
        (f"balanced(2,0:9,rotate=-{10**19}) paged(4) tiny", f"{10**19}", 24, "at most 19 digits"),
    ],
)
def test_errors_point_at_the_word(text: str, word: str, column: int, expected: str) -> None:
    begin = re.escape(f"{word!r} at column {column} of {text!r}: expected ")
    with pytest.raises(TextError, match=f"^{begin}.*{re.escape(expected)}"):
        parse_layout(text)


@pytest.mark.parametrize("text", ["", "   ", 3, None])
def test_no_text_is_refused(text: Any) -> None:
    with pytest.raises(TextError, match=r"says nothing|expected a text"):
        parse_layout(text)


@given(st.text('dcp8(i=1)[]{}|*@:,. "xpagedlatent/', max_size=40))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        layout = parse_layout(text, TINY)
    except LayoutError:
        return
    assert parse_layout(format_layout(layout)) == layout


class Spiral(RoundRobin):
    """A sharding that the language does not know."""


def test_values_without_a_text_are_refused() -> None:
    with pytest.raises(LayoutError, match="has no text form"):
        format_placement(Placement.simple(Spiral(2)))

    class Strange(Paged):
        pass

    with pytest.raises(LayoutError, match="has no text form"):
        format_paging(Strange(3))
