"""Records against pages filled byte by byte, and the byte counts of the real formats."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import Arrangement, Plane
from kvflow.layouts.paging import bytes_of_slots
from kvflow.layouts.pieces import Piece, refine
from kvflow.layouts.record import DTYPE_NBYTES, Field, Record, index_record, latent_record
from kvflow.testing import arrangements, page_cells


@st.composite
def records(draw: st.DrawFn) -> tuple[Record, int]:
    """A record in some arrangement, and a page size that its tiles divide."""
    kinds = draw(st.lists(st.sampled_from(sorted(DTYPE_NBYTES)), min_size=1, max_size=4))
    heads = draw(st.integers(1, 3))
    fields = [Field(f"f{i}", d, draw(st.integers(1, 5)), heads) for i, d in enumerate(kinds)]
    block_size = draw(st.integers(1, 8))
    return Record(fields, draw(arrangements(Record(fields), block_size))), block_size


@given(records(), st.data())
def test_pieces_are_the_bytes_of_the_page(case: tuple[Record, int], data: st.DataObject) -> None:
    record, block_size = case
    cells = page_cells(record, block_size)
    assert record.page_nbytes(block_size) == sum(map(len, cells.values()))
    assert record.page_extent(block_size) == max(at for cell in cells.values() for at in cell) + 1
    assert record.is_solid(block_size) == (
        {at for cell in cells.values() for at in cell} == set(range(record.page_nbytes(block_size)))
    )
    first = data.draw(st.integers(0, record.num_heads - 1))
    heads = (first, data.draw(st.integers(first + 1, record.num_heads)))
    wanted = {
        i: [at for f in record.fields for h in range(*heads) for at in cells[i, f.name, h]]
        for i in range(block_size)
    }
    pieces = record.pieces(block_size, heads)
    for i in range(block_size):
        told = []
        for p in pieces:
            assert p.record_offset == len(told)
            begin = int(bytes_of_slots(np.array(i), block_size, 0, p))
            told += range(begin, begin + p.nbytes)
        assert told == wanted[i]
        assert len(told) == record.row_nbytes(heads)
    for a, b in pairwise(pieces):  # the fewest: two neighbours part somewhere
        start = a.record_offset + a.nbytes
        assert any(row[start - 1] + 1 != row[start] for row in wanted.values()) or (
            (a.stride, a.tiles) != (b.stride, b.tiles)
        )


@given(records(), st.data())
def test_two_arrangements_are_cut_alike(case: tuple[Record, int], data: st.DataObject) -> None:
    one, block_size = case
    two = Record(one.fields, data.draw(arrangements(one, block_size)))
    sides = [page_cells(r, block_size) for r in (one, two)]
    names = [(f.name, h) for f in one.fields for h in range(one.num_heads)]
    pairs = refine(one.pieces(block_size), two.pieces(block_size))
    for i in range(block_size):
        told: tuple[list[int], list[int]] = ([], [])
        for pair in pairs:
            assert pair[0].nbytes == pair[1].nbytes
            for piece, side in zip(pair, told, strict=True):
                begin = int(bytes_of_slots(np.array(i), block_size, 0, piece))
                side.extend(range(begin, begin + piece.nbytes))
        for side, cells in zip(told, sides, strict=True):
            assert side == [at for name, h in names for at in cells[i, name, h]]


@given(records())
def test_text_of_an_arrangement_reads_back(case: tuple[Record, int]) -> None:
    record, _ = case
    assert Record(record.fields, str(record.arrangement)) == record
    assert Arrangement.read(str(record.arrangement)) == record.arrangement


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        ("h e", "lacks 't'"),
        ("t h", "lacks 'e'"),
        ("t e x", "'x' in order 't e x' is no digit"),
        ("t16 e", "'t' must stand once, before its tiles"),
        ("t t e", "'t' must stand once"),
        ("t16 t e", "'t' must stand once, before its tiles"),
        ("t e_2", "'e_2' in order"),
        ("t e t0", "'t0' in order"),
    ],
)
def test_unlawful_orders_are_refused(order: str, rule: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(rule)):
        Plane(("a",), order)


def test_unlawful_arrangements_are_refused() -> None:
    a, b = Field("a", "uint8", 4, 2), Field("b", "uint8", 6, 2)
    with pytest.raises(LayoutError, match="lacks 'h' for the heads"):
        Record((a,), "t e")
    with pytest.raises(LayoutError, match="lacks 'f' for the fields"):
        Plane(("a", "b"), "t h e")
    with pytest.raises(LayoutError, match=r"the planes place \['a'\], the record has .*'a', 'b'"):
        Record((a, b), Arrangement((Plane(("a",), "t h e"),)))
    with pytest.raises(LayoutError, match="tiles of 3 do not divide the 4 steps of 'e'"):
        Record((a,), "t h e e3").pieces(1)
    with pytest.raises(LayoutError, match="tiles of 4 do not divide the 6 steps of 't'"):
        Record((a,), "t h e t4").pieces(6)
    with pytest.raises(LayoutError, match="b and a need different steps left of 'f'"):
        Record((a, b), "t h e f").pieces(1)
    with pytest.raises(LayoutError, match="one number of heads"):
        Record((a, Field("c", "uint8", 4, 3)))
    with pytest.raises(LayoutError, match=r"heads \[1, 3\) of a record of 2 heads"):
        Record((a,), "t h e").pieces(1, (1, 3))
    for text in ("[a: t e", "[a: t e] %0", "a: t e", "[]"):
        with pytest.raises(LayoutError):
            Arrangement.read(text)


def test_golden_latent_rows() -> None:
    fp8 = latent_record("fp8", latent_rank=512, rope_dim=64)
    assert [(f.name, f.dtype, f.num_elements) for f in fp8.fields] == [
        ("latent", "float8_e4m3fn", 512),
        ("scale", "float32", 4),
        ("rope", "bfloat16", 64),
    ]
    assert [fp8.field_offset(n) for n in ("latent", "scale", "rope")] == [0, 512, 528]
    assert (fp8.nbytes, fp8.page_nbytes(64)) == (656, 41_984)
    assert fp8.pieces(64) == (Piece(0, 656, 656, 0),)
    bf16 = latent_record("bfloat16", latent_rank=512, rope_dim=64)
    assert (bf16.nbytes, bf16.field_offset("rope"), bf16.page_nbytes(64)) == (1152, 1024, 73_728)
    assert latent_record("float32", latent_rank=512, rope_dim=64).nbytes == 2304
    assert latent_record("float64", latent_rank=4, rope_dim=2).nbytes == 48


def test_golden_index_key_pages() -> None:
    planar = index_record("fp8", index_dim=128)
    assert (planar.nbytes, planar.page_nbytes(64)) == (132, 8_448)
    assert planar.pieces(64) == (Piece(0, 128, 128, 0), Piece(8192, 4, 4, 128))
    rows = index_record("fp8", index_dim=128, arrangement="row")
    assert rows.pieces(64) == (Piece(0, 132, 132, 0),)
    assert refine(rows.pieces(64), planar.pieces(64)) == [
        (Piece(0, 132, 128, 0), Piece(0, 128, 128, 0)),
        (Piece(128, 132, 4, 128), Piece(8192, 4, 4, 128)),
    ]
    plain = index_record("bfloat16", index_dim=128)
    assert (plain.nbytes, str(plain.arrangement), len(plain.fields)) == (256, "[key: t e]", 1)


@given(st.integers(1, 700), st.integers(1, 80))
def test_general_fp8_latent_is_padded_to_four_bytes(rank: int, rope: int) -> None:
    record = latent_record("fp8", latent_rank=rank, rope_dim=rope)
    bare = rank + 4 * -(-rank // 128) + 2 * rope
    assert record.nbytes % 4 == 0
    assert bare <= record.nbytes < bare + 4
    assert ("padding" in [f.name for f in record.fields]) == (bare % 4 != 0)


def test_fault_f05_an_opaque_row_has_typed_parts() -> None:
    """656 bytes are 512 fp8 values, 4 group scales and 64 bf16 values, in the cells of any page."""
    row = latent_record("fp8", latent_rank=512, rope_dim=64)
    at = {name: cell for (i, name, _), cell in page_cells(row, 3).items() if i == 1}
    assert at["latent"] == tuple(range(656, 656 + 512))
    assert at["scale"] == tuple(range(656 + 512, 656 + 528))
    assert at["rope"] == tuple(range(656 + 528, 656 + 656))
    assert [f.nbytes // f.num_elements for f in row.fields] == [1, 4, 2]


def test_a_scale_serves_128_values() -> None:
    scales = [
        latent_record("fp8", latent_rank=n, rope_dim=2).fields[1].num_elements
        for n in (1, 128, 129, 256, 257)
    ]
    assert scales == [1, 1, 2, 2, 3]


def test_golden_fixture_rows() -> None:
    assert latent_record("fp8", latent_rank=32, rope_dim=16).nbytes == 68
    assert index_record("fp8", index_dim=32).nbytes == 36


def test_element_sizes() -> None:
    assert DTYPE_NBYTES == {
        "uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    }  # fmt: skip


def test_records_refuse_what_is_not_lawful() -> None:
    one = Field("a", "uint8", 1)
    with pytest.raises(LayoutError, match=r"distinct names, got \['a', 'a'\]"):
        Record((one, one))
    with pytest.raises(LayoutError, match=r"one or more fields .* got \[\]"):
        Record(())
    with pytest.raises(LayoutError, match="'tiled' in order 'tiled' is no digit"):
        Record((one,), "tiled")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="dtype 'int4', must be one of"):
        Field("a", "int4", 1)
    with pytest.raises(LayoutError, match=r"Field\.num_elements = 0, must be at least 1"):
        Field("a", "uint8", 0)
    with pytest.raises(LayoutError, match=r"no field 'b' in a record of \['a'\]"):
        Record((one,)).field_offset("b")


def test_text_form() -> None:
    text = "key:float8_e4m3fnx4,scale:float32x1 [key: t e | scale: t e]"
    assert str(index_record("fp8", index_dim=4)) == text
    assert str(Record((Field("a", "uint8", 1, 2),))) == "a:uint8x1x2h [a: t h e]"


def test_fault_f01_planar_and_interleaved_pages_differ_and_are_different_types() -> None:
    """Block 4, 8 value bytes and a 4-byte scale: value(1), scale(1) at 8, 36 or at 12, 20."""
    fields = (Field("value", "uint8", 8), Field("scale", "float32", 1))
    planar, row = Record(fields, "planar"), Record(fields, "row")
    places = [
        [planar_piece.offset + planar_piece.stride, row_piece.offset + row_piece.stride]
        for planar_piece, row_piece in refine(planar.pieces(4), row.pieces(4))
    ]
    assert places == [[8, 12], [36, 20]]
    assert planar != row
    assert str(planar) != str(row)


def test_the_same_record_with_fewer_heads() -> None:
    record = Record(
        (Field("a", "uint8", 4, 3), Field("b", "float32", 1, 3)), "[a: h t e | b: t h e]"
    )
    one = record.with_heads(1)
    assert [(f.name, f.num_elements, f.num_heads) for f in one.fields] == [("a", 4, 1), ("b", 1, 1)]
    assert str(one.arrangement) == "[a: t e | b: t e]"
    assert (record.with_heads(2).num_heads, record.with_heads(2).nbytes) == (2, 16)
    assert record.with_heads(3) == record


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a,b", "x|y", "*"])
def test_field_names_are_words(name: str) -> None:
    with pytest.raises(LayoutError, match="a name is letters, digits and underscores"):
        Field(name, "uint8", 1)
