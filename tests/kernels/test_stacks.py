"""Stacks of pieces: as high as they come, and the same pairs when unrolled."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.kernels.stacks import packed, stacked
from kvflow.layouts.pieces import Piece, refine
from kvflow.layouts.record import Field, Record, index_record, latent_record

KV = (Field("key", "bfloat16", 6, 4), Field("value", "bfloat16", 6, 4))
ORDERS = (
    "t h e",
    "h t e",
    "h e t",
    "h e t t4 e2",
    "[key,value: t f h e]",
    "[value: t h e | key: t h e]",
)
RECORDS = [Record(KV, order) for order in ORDERS]


def unrolled(stack):
    for k in range(stack.count):
        yield tuple(
            (p.offset + k * step, p.nbytes, p.stride, p.tiles)
            for p, step in ((stack.src, stack.src_step), (stack.dst, stack.dst_step))
        )


def places(pairs):
    return [tuple((p.offset, p.nbytes, p.stride, p.tiles) for p in pair) for pair in pairs]


@given(
    st.sampled_from(RECORDS),
    st.sampled_from([None, (0, 1), (1, 3)]),
    st.sampled_from([*RECORDS, None]),
)
def test_unrolled_stacks_are_the_pairs(record, heads, other):
    pieces = record.pieces(8, heads)
    pairs = packed(pieces) if other is None else refine(pieces, other.pieces(16, heads))
    stacks = stacked(pairs)
    assert [place for stack in stacks for place in unrolled(stack)] == places(pairs)
    assert all(stack.src_step >= 0 and stack.dst_step >= 0 for stack in stacks)


def test_heights_of_real_pages():
    def heights(record, heads=None):
        return [stack.count for stack in stacked(packed(record.pieces(64, heads)))]

    assert heights(latent_record("fp8", latent_rank=512, rope_dim=64)) == [1]
    assert heights(index_record("fp8", index_dim=128)) == [1, 1]
    assert heights(Record(KV, "t h e")) == [2]
    assert heights(Record(KV, "h t e"), (1, 3)) == [2, 2]
    assert heights(Record(KV[:1], "h e t")) == [4 * 6]
    assert heights(Record(KV[:1], "h e t t16 e2")) == [4 * 3]


def test_a_step_back_or_aside_begins_another_stack():
    a = Piece(100, 2, 4, 0)
    back, aside = evolve(a, offset=50), evolve(a, offset=110, stride=4)
    row = [Piece(4 * i, 0, 4, 4 * i) for i in range(3)]
    assert [s.count for s in stacked(zip([a, back], row[:2], strict=True))] == [1, 1]
    assert [s.count for s in stacked(zip([a, aside], row[:2], strict=True))] == [1, 1]
    uneven = [a, evolve(a, offset=104), evolve(a, offset=112)]
    assert [s.count for s in stacked(zip(uneven, row, strict=True))] == [2, 1]
    assert stacked([]) == ()
