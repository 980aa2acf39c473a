"""Records against pages filled byte by byte, and the byte counts of the real formats."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.record import (
    DTYPE_NBYTES,
    Field,
    Piece,
    Record,
    index_record,
    latent_record,
)
from kvflow.testing import page_cells


@st.composite
def records(draw: st.DrawFn) -> Record:
    kinds = draw(st.lists(st.sampled_from(sorted(DTYPE_NBYTES)), min_size=1, max_size=4))
    fields = tuple(Field(f"f{i}", d, draw(st.integers(1, 5))) for i, d in enumerate(kinds))
    return Record(fields, draw(st.sampled_from(["row", "planar"])))


@given(records(), st.integers(1, 7))
def test_pieces_are_the_bytes_of_the_page(record: Record, block_size: int) -> None:
    cells = page_cells(record, block_size)
    packed = page_cells(evolve(record, arrangement="row"), 1)
    row = [byte for f in record.fields for byte in packed[0, f.name]]
    assert record.nbytes == len(row)
    assert record.page_nbytes(block_size) == sum(map(len, cells.values()))
    for pieces in (record.pieces(block_size), record.field_pieces(block_size)):
        for i in range(block_size):
            told = [0] * record.nbytes
            for p in pieces:
                for b in range(p.nbytes):
                    told[p.record_offset + b] = p.offset + i * p.stride + b
            assert told == [at for f in record.fields for at in cells[i, f.name]]
    assert len(record.pieces(block_size)) == (
        1 if record.arrangement == "row" else len(record.fields)
    )
    fields = record.field_pieces(block_size)
    assert [p.nbytes for p in fields] == [f.nbytes for f in record.fields]
    assert [p.record_offset for p in fields] == [record.field_offset(f.name) for f in record.fields]


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
    assert rows.field_pieces(64) == (Piece(0, 132, 128, 0), Piece(128, 132, 4, 128))
    plain = index_record("bfloat16", index_dim=128)
    assert (plain.nbytes, plain.arrangement, len(plain.fields)) == (256, "row", 1)


@given(st.integers(1, 700), st.integers(1, 80))
def test_general_fp8_latent_is_padded_to_four_bytes(rank: int, rope: int) -> None:
    record = latent_record("fp8", latent_rank=rank, rope_dim=rope)
    bare = rank + 4 * -(-rank // 128) + 2 * rope
    assert record.nbytes % 4 == 0
    assert bare <= record.nbytes < bare + 4
    assert ("padding" in [f.name for f in record.fields]) == (bare % 4 != 0)


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
    with pytest.raises(LayoutError, match="arrangement 'tiled', must be 'row' or 'planar'"):
        Record((one,), "tiled")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="dtype 'int4', must be one of"):
        Field("a", "int4", 1)
    with pytest.raises(LayoutError, match=r"Field\.num_elements = 0, must be at least 1"):
        Field("a", "uint8", 0)
    with pytest.raises(LayoutError, match=r"no field 'b' in a record of \['a'\]"):
        Record((one,)).field_offset("b")


def test_text_form() -> None:
    assert str(index_record("fp8", index_dim=4)) == "planar(key:float8_e4m3fnx4,scale:float32x1)"
    assert str(Record((Field("a", "uint8", 1),))) == "row(a:uint8x1)"


def test_fault_f01_planar_and_interleaved_pages_differ_and_are_different_types() -> None:
    """Block 4, 8 value bytes and a 4-byte scale: value(1), scale(1) at 8, 36 or at 12, 20."""
    fields = (Field("value", "uint8", 8), Field("scale", "float32", 1))
    planar, row = Record(fields, "planar"), Record(fields, "row")
    places = {
        record.arrangement: [p.offset + p.stride for p in record.field_pieces(4)]
        for record in (planar, row)
    }
    assert places == {"planar": [8, 36], "row": [12, 20]}
    assert planar != row
    assert str(planar) != str(row)
