"""What simpler formulas misplace, counted again by dealing tokens and laying out pages by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.explain.naive import naive_formulas, num_misplaced
from kvflow.layouts import Contiguous, KVLayout, Placement, Replicated, RoundRobin, Sharding
from kvflow.layouts.text import parse_layout
from kvflow.testing import deal, page_cells, shardings

WIDTHS = st.integers(1, 5)
INTERLEAVES = st.sampled_from([1, 2, 3, 4, 8])


@pytest.mark.parametrize(("interleave", "wrong"), [(32, 1776), (8, 1752), (1, 1969), (64, 0)])
def test_golden_silent_errors(interleave: int, wrong: int) -> None:
    """Facts 7, row 1: the receiver takes the interleave to be the page size of 64."""
    tokens = (0, 2000)
    assert num_misplaced(RoundRobin(8, interleave), RoundRobin(8, 64), tokens) == wrong
    src = parse_layout(f"dcp8(i={interleave}) paged(64) glm-5.3/fp8")
    dst = parse_layout("replicated paged(64) glm-5.3/fp8")
    by_page = next(n for n in naive_formulas(src, dst, tokens) if n.name == "page")
    assert (by_page.num_wrong, by_page.num_tokens) == (wrong, 2000)
    assert by_page.says == "source: page j of 64 tokens is on shard j mod 8"


@settings(max_examples=40)
@given(st.data(), WIDTHS, INTERLEAVES, st.integers(0, 30), st.integers(0, 40))
def test_owner_formulas_are_counted_token_by_token(
    data: st.DataObject, width: int, interleave: int, start: int, num: int
) -> None:
    tokens = (start, start + num)
    true = data.draw(shardings(tokens))
    hands = deal(true, tokens[1])
    wrong = 0
    for t in range(*tokens):
        turn, rest = divmod(t, width * interleave)
        shard, local = rest // interleave, turn * interleave + rest % interleave
        hand = hands[shard] if shard < len(hands) else []
        wrong += not (local < len(hand) and hand[local] == t)
    if width <= true.num_shards:
        assert num_misplaced(true, RoundRobin(width, interleave), tokens) == wrong


def streamed(layout: KVLayout, component: str, stop: int) -> list[tuple[int, str, int] | None]:
    """For every byte of the pages of all shards, entry by entry: (token, field, byte)."""
    hands = deal(layout.placement.sharding, stop)
    size = layout.group_of(component).paging.block_size
    cells = page_cells(layout.spec[component].record, size)
    page_nbytes = 1 + max(at for places in cells.values() for at in places)
    stream: list[tuple[int, str, int] | None] = []
    for entry in range(-(-max(map(len, hands)) // size)):
        for hand in hands:
            page: list[tuple[int, str, int] | None] = [None] * page_nbytes
            for (i, field, *_), places in cells.items():
                if entry * size + i < len(hand):
                    for n, at in enumerate(places):
                        page[at] = (hand[entry * size + i], field, n)
            stream += page
    return stream


@settings(max_examples=30)
@given(
    st.tuples(WIDTHS, INTERLEAVES, st.sampled_from([2, 3, 4, 8])),
    st.tuples(WIDTHS, INTERLEAVES, st.sampled_from([2, 3, 4, 8])),
    st.integers(0, 9),
    st.integers(0, 24),
)
def test_page_formulas_are_counted_byte_by_byte(
    src: tuple[int, int, int], dst: tuple[int, int, int], start: int, num: int
) -> None:
    tokens = (start, start + num)
    here, there = (parse_layout(f"dcp{w}(i={i}) paged({b}) tiny/fp8") for w, i, b in (src, dst))
    counted = {n.name: n.num_wrong for n in naive_formulas(here, there, tokens)}
    wrong: dict[str, set[int]] = {"concatenation": set(), "suffix": set()}
    for component in ("latent.0", "indexer.0"):
        a, b = (streamed(side, component, tokens[1]) for side in (here, there))
        for name, shift in (("concatenation", 0), ("suffix", len(a) - len(b))):
            for at, byte in enumerate(b):
                if byte is not None and byte[0] >= start:
                    read = a[at + shift] if 0 <= at + shift < len(a) else None
                    if read != byte:
                        wrong[name].add(byte[0])
    assert {name: len(tokens) for name, tokens in wrong.items()} == {
        name: counted[name] for name in wrong
    }


def formulas(src: str, dst: str, tokens: tuple[int, int] = (0, 640)) -> dict[str, int]:
    sides = (parse_layout(f"{side} tiny/fp8") for side in (src, dst))
    return {n.says: n.num_wrong for n in naive_formulas(*sides, tokens)}


def test_which_formulas_apply() -> None:
    found = formulas("dcp4(i=16) paged(16)", "replicated latent:paged(16) indexer:paged(64)")
    assert list(found) == [
        "source: page j of 16 tokens is on shard j mod 4",
        "source: token t is on shard t mod 4",
        "source: the stride is that of one axis of 2, not of all 4",
        "pages put one behind the other make the target's pages",
        "the last page is the last page: align from the end",
    ]
    assert next(iter(found.values())) == 0  # at I = B the page formula is right
    assert all(list(found.values())[1:])
    prime = formulas("replicated paged(4)", "dcp3(i=1) paged(4)")
    assert [says.split(":")[0] for says in prime][:2] == ["target", "target"]
    assert not any("one axis" in says for says in prime)
    two = formulas("replicated paged(4)", "dcp2(i=1) latent:paged(4) indexer:paged(8)")
    assert sum("page j of" in says for says in two) == 2


def test_rows_regroup_but_planar_pages_do_not() -> None:
    """Facts 5: a 16-token page merged into a 64-token page is not concatenation."""
    rows = "{latent.0:bf16}"
    planar = "{indexer.0:fp8_index}"
    for spec, wrong in ((rows, 0), (planar, 640)):
        sides = (parse_layout(f"replicated paged({b}) {spec}") for b in (16, 64))
        found = {n.name: n.num_wrong for n in naive_formulas(*sides, (0, 640))}
        assert found["concatenation"] == wrong


@pytest.mark.parametrize("sharding", [Replicated(), Contiguous(3, 0, 40), RoundRobin(3, 4)])
def test_the_right_formula_misplaces_nothing(sharding: Sharding) -> None:
    assert num_misplaced(sharding, sharding, (3, 40)) == 0
    assert num_misplaced(sharding, sharding, (3, 3)) == 0
    layout = parse_layout(f"{Placement.simple(sharding)} paged(4) tiny/fp8")
    found = {n.name: n.num_wrong for n in naive_formulas(layout, layout, (3, 40))}
    assert found["concatenation"] == found["suffix"] == 0
