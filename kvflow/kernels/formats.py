"""What a packed row holds, read off its record's fields; no layout is known by name."""

from functools import cached_property, lru_cache

import torch
from attrs import frozen

from kvflow.errors import LayoutError
from kvflow.layouts.record import SCALE_GROUP, Record

FP8 = torch.float8_e4m3fn

FLOATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@frozen
class Span:
    """`size` values of `dtype` at byte `offset` of a packed row."""

    offset: int
    size: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.offset + self.size * self.dtype.itemsize


@frozen
class RowFormat:
    """Spans of a packed row: a value vector (scaled when fp8), a plain vector, padding."""

    nbytes: int
    values: Span
    scale: Span | None
    plain: Span | None
    padding: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Values of one decoded row."""
        return self.values.size + (self.plain.size if self.plain else 0)

    @property
    def group(self) -> int:
        """Values under one scale."""
        single = self.scale is None or self.scale.size == 1
        return self.values.size if single else SCALE_GROUP

    @cached_property
    def bare(self) -> torch.dtype | None:
        """The dtype of a row that is its decoded values and no other byte; None for others."""
        spans = [self.values] + ([self.plain] if self.plain else [])
        behind = all(
            span.offset == at for span, at in zip(spans, (0, self.values.end), strict=False)
        )
        one = all(span.dtype == self.values.dtype for span in spans)
        whole = self.scale is None and self.nbytes == spans[-1].end
        return self.values.dtype if behind and one and whole else None


@lru_cache(maxsize=256)
def row_format(record: Record, values: str, plain: str | None, group: int | None) -> RowFormat:
    """Read a record's fields: vector `values`, scaled per `group` values (None: one scale) when
    its dtype is fp8, and vector `plain`. Raises `LayoutError` for any other set of fields."""
    by_name = {f.name: f for f in record.fields}
    if values not in by_name or (plain is not None and plain not in by_name):
        raise LayoutError(f"{record} needs the fields {[n for n in (values, plain) if n]}")
    known = {values, plain, "scale", "padding"}
    if unknown := [n for n in by_name if n not in known]:
        raise LayoutError(f"{record} has fields {unknown}, no codec writes them")

    def span(name: str, allowed: dict[str, torch.dtype]) -> Span:
        f = by_name[name]
        if f.dtype not in allowed:
            raise LayoutError(f"field {name} of {record} is {f.dtype}, must be in {list(allowed)}")
        return Span(record.field_offset(name), f.num_elements, allowed[f.dtype])

    vector = span(values, {**FLOATS, "float8_e4m3fn": FP8})
    num_scales = by_name["scale"].num_elements if "scale" in by_name else 0
    expected = 0 if vector.dtype != FP8 else 1 if group is None else -(-vector.size // group)
    if num_scales != expected:
        raise LayoutError(f"{record} has {num_scales} scales, {vector.size} values need {expected}")
    return RowFormat(
        nbytes=record.nbytes,
        values=vector,
        scale=span("scale", {"float32": torch.float32}) if expected else None,
        plain=span(plain, FLOATS) if plain else None,
        padding=(span("padding", {"uint8": torch.uint8}),) if "padding" in by_name else (),
    )
