"""Records: (token in page, field) -> bytes of a page.

A record is the bytes one token owns in one component, as typed fields with heads. Its arrangement
says how the records of a page sit together. Everything that moves bytes asks the record for its
`pieces`; nothing else knows an arrangement.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from attrs import evolve, field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import (
    Arrangement,
    Extent,
    FieldPlace,
    as_arrangement,
    place_fields,
    resolved,
)
from kvflow.layouts.pieces import Heads, Piece, pieces_of
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

KVDType = Literal["fp8", "bfloat16", "float16", "float32", "float64"]

CACHED_PAGES = 4096
"""How many (record, page size) pairs are remembered; pages of one request's size come and go."""


@frozen
class Field:
    """`num_elements` values of `dtype` for each of `num_heads` heads, belonging to one token."""

    name: str
    dtype: str
    num_elements: int = field(converter=integer, validator=positive)
    num_heads: int = field(default=1, converter=integer, validator=positive)

    def __attrs_post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.name):
            raise LayoutError(f"field {self.name!r}: a name is letters, digits and underscores")
        if self.dtype not in DTYPE_NBYTES:
            raise LayoutError(
                f"field {self.name!r} has dtype {self.dtype!r}, must be one of {list(DTYPE_NBYTES)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of this field of one token, all heads."""
        return DTYPE_NBYTES[self.dtype] * self.num_elements * self.num_heads


def _fields(fields: Iterable[Field]) -> tuple[Field, ...]:
    return tuple_of(Field, fields)


@frozen(cache_hash=True)
class Record:
    """One token's bytes in one component.

    >>> latent_record("fp8", latent_rank=512, rope_dim=64).nbytes
    656
    >>> index_record("fp8", index_dim=128).page_nbytes(64)
    8448
    """

    fields: tuple[Field, ...] = field(converter=_fields)
    arrangement: Arrangement = field(default=as_arrangement("row"), converter=as_arrangement)

    def __attrs_post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if not names or len(set(names)) != len(names):
            raise LayoutError(f"a record needs one or more fields with distinct names, got {names}")
        if len({f.num_heads for f in self.fields}) > 1:
            raise LayoutError(f"the fields of a record have one number of heads: got {self}")
        heads = {f.name: f.num_heads for f in self.fields}
        object.__setattr__(self, "arrangement", resolved(self.arrangement, heads))

    @property
    def num_heads(self) -> int:
        return self.fields[0].num_heads

    @property
    def nbytes(self) -> int:
        """Bytes per token, padding fields included."""
        return sum(f.nbytes for f in self.fields)

    def row_nbytes(self, heads: Heads | None = None) -> int:
        """Bytes of a packed row of some heads (default: all)."""
        first, stop = self._heads(heads)
        return self.nbytes // self.num_heads * (stop - first)

    def with_heads(self, num_heads: int) -> "Record":
        """The same record with another number of heads: what a head-sharded rank stores."""
        if num_heads == self.num_heads:
            return self
        fields = tuple(evolve(f, num_heads=num_heads) for f in self.fields)
        return Record(fields, self.arrangement)

    def page_nbytes(self, block_size: int) -> int:
        """Bytes that the tokens of one page own."""
        return self.nbytes * block_size

    def page_extent(self, block_size: int) -> int:
        """Bytes from the first byte of a page to the last one that a token owns, holes included."""
        return _extent(self, block_size)

    def page_pitch(self, block_size: int) -> int:
        """Bytes from one page to the next where pages stand behind each other: holes included,
        rounded up to the arrangement's page multiple."""
        span, multiple = _page(self, block_size)[1], self.arrangement.page_multiple
        return -(-span // multiple) * multiple

    def is_solid(self, block_size: int) -> bool:
        """Whether a page has no holes, so that it can move in one piece."""
        return self.page_extent(block_size) == self.page_nbytes(block_size)

    def field_offset(self, name: str) -> int:
        """Byte offset of a field in a packed row. Raises `LayoutError` for an unknown name."""
        offset = 0
        for f in self.fields:
            if f.name == name:
                return offset
            offset += f.nbytes
        raise LayoutError(f"no field {name!r} in a record of {[f.name for f in self.fields]}")

    def places(self, block_size: int) -> tuple[FieldPlace, ...]:
        """Where each field of a page of `block_size` tokens lies, in the order of the fields."""
        return _page(self, block_size)[0]

    def pieces(self, block_size: int, heads: Heads | None = None) -> tuple[Piece, ...]:
        """The fewest pieces that hold a token's bytes in some of its heads (default: all), in the
        order of the packed row: field, head, element."""
        return _pieces(self, block_size, self._heads(heads))

    def _heads(self, heads: Heads | None) -> Heads:
        first, stop = (0, self.num_heads) if heads is None else heads
        if not 0 <= first < stop <= self.num_heads:
            raise LayoutError(f"heads [{first}, {stop}) of a record of {self.num_heads} heads")
        return first, stop

    def __str__(self) -> str:
        parts = ",".join(
            f"{f.name}:{f.dtype}x{f.num_elements}" + (f"x{f.num_heads}h" if f.num_heads > 1 else "")
            for f in self.fields
        )
        return f"{parts} {self.arrangement}"


@lru_cache(CACHED_PAGES)
def _page(record: Record, block_size: int) -> tuple[tuple[FieldPlace, ...], int]:
    """The places of all fields, and the bytes that a page spans."""
    if block_size < 1:
        raise LayoutError(f"a page of {block_size} tokens, must be at least 1")
    known = {f.name: f for f in record.fields}
    places: dict[str, FieldPlace] = {}
    base = 0
    for plane in record.arrangement.planes:
        extents = [
            Extent(
                name,
                DTYPE_NBYTES[known[name].dtype],
                (("t", block_size), ("h", record.num_heads), ("e", known[name].num_elements)),
            )
            for name in plane.fields
        ]
        placed, base = place_fields(plane, extents, base)
        places.update((place.name, place) for place in placed)
    return tuple(places[name] for name in known), base


@lru_cache(CACHED_PAGES)
def _extent(record: Record, block_size: int) -> int:
    ends = []
    for f, place in zip(record.fields, record.places(block_size), strict=True):
        last = place.offset + sum((d.size - 1) * d.stride for d in place.digits)
        ends.append(last + DTYPE_NBYTES[f.dtype])
    return max(ends)


@lru_cache(CACHED_PAGES)
def _pieces(record: Record, block_size: int, heads: Heads) -> tuple[Piece, ...]:
    sizes = [(DTYPE_NBYTES[f.dtype], f.num_elements) for f in record.fields]
    return pieces_of(sizes, record.places(block_size), heads)


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
    kv_dtype: KVDType, *, index_dim: int, arrangement: Arrangement | str = "planar"
) -> Record:
    """The DSA indexer key: ``fp8`` is di e4m3 values and one power-of-two float32 scale
    (di + 4 bytes, 132 for GLM-5.3), by default in planar pages; other dtypes store di values."""
    if kv_dtype == "fp8":
        values, scale = Field("key", "float8_e4m3fn", index_dim), Field("scale", "float32", 1)
        return Record((values, scale), arrangement)
    return Record((Field("key", kv_dtype, index_dim),), "row")
