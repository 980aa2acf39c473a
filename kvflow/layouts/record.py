"""Records: (token in page, field) -> bytes of a page.

A record is the bytes one token owns in one component, as typed fields. Its arrangement says how
the records of a page sit together: ``row`` keeps a token's fields adjacent, ``planar`` keeps a
field's tokens adjacent (all values of the page first, then all scales). Everything that moves
bytes asks the record for its `pieces`; nothing else knows an arrangement.
"""

from collections.abc import Iterable
from typing import Literal

from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.values import integer, positive, tuple_of

DTYPE_NBYTES = {
    "uint8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""Element sizes in bytes. fp8 is the OCP e4m3fn variant: no infinity, largest value 448."""

SCALE_GROUP = 128
"""Values that share one float32 scale in an fp8 latent row (facts: ``fp8_ds_mla``)."""

Arrangement = Literal["row", "planar"]
KVDType = Literal["fp8", "bfloat16", "float32", "float64"]


@frozen
class Field:
    """`num_elements` values of `dtype`, contiguous, belonging to one token."""

    name: str
    dtype: str
    num_elements: int = field(converter=integer, validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise LayoutError(
                f"field {self.name!r} has dtype {self.dtype!r}, must be one of {list(DTYPE_NBYTES)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of this field of one token."""
        return DTYPE_NBYTES[self.dtype] * self.num_elements


@frozen
class Piece:
    """Bytes of a page that move together: token i of the page owns
    ``[offset + i*stride, offset + i*stride + nbytes)``; `record_offset` is where they lie in a
    packed row."""

    offset: int
    stride: int
    nbytes: int
    record_offset: int


def _fields(fields: Iterable[Field]) -> tuple[Field, ...]:
    return tuple_of(Field, fields)


@frozen
class Record:
    """One token's bytes in one component.

    >>> latent_record("fp8", latent_rank=512, rope_dim=64).nbytes
    656
    >>> index_record("fp8", index_dim=128).page_nbytes(64)
    8448
    """

    fields: tuple[Field, ...] = field(converter=_fields)
    arrangement: Arrangement = "row"

    def __attrs_post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if not names or len(set(names)) != len(names):
            raise LayoutError(f"a record needs one or more fields with distinct names, got {names}")
        if self.arrangement not in ("row", "planar"):
            raise LayoutError(f"arrangement {self.arrangement!r}, must be 'row' or 'planar'")

    @property
    def nbytes(self) -> int:
        """Bytes per token, padding fields included."""
        return sum(f.nbytes for f in self.fields)

    def page_nbytes(self, block_size: int) -> int:
        """Bytes of one page of `block_size` tokens."""
        return self.nbytes * block_size

    def field_offset(self, name: str) -> int:
        """Byte offset of a field in a packed row. Raises `LayoutError` for an unknown name."""
        offset = 0
        for f in self.fields:
            if f.name == name:
                return offset
            offset += f.nbytes
        raise LayoutError(f"no field {name!r} in a record of {[f.name for f in self.fields]}")

    def pieces(self, block_size: int) -> tuple[Piece, ...]:
        """The pieces of a page of `block_size` tokens: one for rows, one per field for planes."""
        if self.arrangement == "row":
            return (Piece(0, self.nbytes, self.nbytes, 0),)
        pieces, offset = [], 0
        for f in self.fields:
            pieces.append(Piece(offset * block_size, f.nbytes, f.nbytes, offset))
            offset += f.nbytes
        return tuple(pieces)

    def field_pieces(self, block_size: int) -> tuple[Piece, ...]:
        """The same bytes cut field by field, whatever the arrangement: the common refinement of
        any two records with equal fields."""
        pieces, offset = [], 0
        for f in self.fields:
            if self.arrangement == "row":
                pieces.append(Piece(offset, self.nbytes, f.nbytes, offset))
            else:
                pieces.append(Piece(offset * block_size, f.nbytes, f.nbytes, offset))
            offset += f.nbytes
        return tuple(pieces)

    def __str__(self) -> str:
        parts = ",".join(f"{f.name}:{f.dtype}x{f.num_elements}" for f in self.fields)
        return f"{self.arrangement}({parts})"


def latent_record(kv_dtype: KVDType, *, latent_rank: int, rope_dim: int) -> Record:
    """The MLA latent row.

    ``fp8`` is R e4m3 values, ceil(R/128) float32 scales, rope as bf16, padded up to 4 bytes:
    R + 4*ceil(R/128) + 2*dr (656 for GLM-5.3). Other dtypes store R latent and dr rope values.
    """
    if kv_dtype == "fp8":
        scales = -(-integer(latent_rank, "latent_rank") // SCALE_GROUP)
        fields = [
            Field("latent", "float8_e4m3fn", latent_rank),
            Field("scale", "float32", scales),
            Field("rope", "bfloat16", rope_dim),
        ]
        padding = -sum(f.nbytes for f in fields) % 4
        if padding:
            fields.append(Field("padding", "uint8", padding))
        return Record(tuple(fields))
    return Record((Field("latent", kv_dtype, latent_rank), Field("rope", kv_dtype, rope_dim)))


def index_record(
    kv_dtype: KVDType, *, index_dim: int, arrangement: Arrangement = "planar"
) -> Record:
    """The DSA indexer key: ``fp8`` is di e4m3 values and one power-of-two float32 scale
    (di + 4 bytes, 132 for GLM-5.3), by default in planar pages; other dtypes store di values."""
    if kv_dtype == "fp8":
        values, scale = Field("key", "float8_e4m3fn", index_dim), Field("scale", "float32", 1)
        return Record((values, scale), arrangement)
    return Record((Field("key", kv_dtype, index_dim),), "row")
