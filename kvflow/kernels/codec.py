"""Codecs: float vectors <-> the packed bytes of one token, for latent rows and indexer keys.

What a row looks like is read off its `Record`'s fields; no layout is known by name. An fp8 field
``v`` of n values is stored as e4m3fn codes and float32 scales, ``value = code * scale``:

* latent rows (``fp8_ds_mla``): one scale per 128 values, ``max(amax, 1e-10) / 448``;
* indexer keys: one scale, the smallest power of two that is at least ``max(amax, 1e-10) / 448``.

Every operation is per value or an exact maximum, so a row's bytes do not depend on its batch.
NaN, infinity and rounding: docs/decisions/0003-fp8-rounding-and-nan.md.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.kernels.formats import FLOATS, FP8, RowFormat, Span, row_format
from kvflow.layouts.record import SCALE_GROUP, Record

FP8_MAX = 448.0
SCALE_FLOOR = 1e-10
"""Smallest amax a scale is made from: a row of zeros has a defined scale."""
CPU_CHUNK = 1 << 17
"""Values per pass on a CPU, so that the temporaries of a pass stay in its cache."""

_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()  # of every code; faster than casts

ScaleRule = Callable[[Tensor], Tensor]


def encode_latent(record: Record, latent: Tensor, rope: Tensor) -> Tensor:
    """Latent rows as bytes: `latent` [n, R] and `rope` [n, dr], any float dtype ->
    uint8 [n, record.nbytes]. Raises `LayoutError` for shapes or fields that do not fit."""
    fmt = row_format(record, "latent", "rope", SCALE_GROUP)
    return _encode(fmt, latent, rope, power_of_two=False)


def decode_latent(record: Record, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Latent rows as values: uint8 [..., record.nbytes] -> `dtype` [..., R + dr], latent first. A
    view of rows that hold nothing but values of `dtype`."""
    return _decode(row_format(record, "latent", "rope", SCALE_GROUP), rows, dtype)


def view_latent(record: Record, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    """As `decode_latent`, of rows that need no copy for it; otherwise None."""
    return _view(row_format(record, "latent", "rope", SCALE_GROUP), rows, dtype)


def latent_rank(record: Record) -> int:
    """R: how many values of a latent row are no rotated ones."""
    return row_format(record, "latent", "rope", SCALE_GROUP).values.size


def encode_index_key(record: Record, key: Tensor) -> Tensor:
    """Indexer keys as bytes: `key` [n, di], any float dtype -> uint8 [n, record.nbytes]. The rows
    are packed; a planar record's pages are written by `scatter_rows`."""
    return _encode(row_format(record, "key", None, None), key, None, power_of_two=True)


def decode_index_key(record: Record, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Indexer keys as values: uint8 [..., record.nbytes] -> `dtype` [..., di]. A view of rows that
    hold nothing but values of `dtype`."""
    return _decode(row_format(record, "key", None, None), rows, dtype)


def group_scale(amax: Tensor) -> Tensor:
    """float32 ``max(amax, 1e-10) / 448``, correctly rounded: by a tensor, because on a GPU torch
    divides by a number as a product with its reciprocal."""
    return amax.clamp_min(SCALE_FLOOR).div_(amax.new_full((1,), FP8_MAX))


def power_of_two_scale(amax: Tensor) -> Tensor:
    """Smallest float32 power of two at least ``max(amax, 1e-10) / 448``, exactly.

    448 is 1.75 * 2^8: subtract 8 from the exponent, and round it up when the mantissa of amax is
    above 1.75 (a carry out of the mantissa bits), without a logarithm.
    """
    bits = amax.clamp_min(SCALE_FLOOR).view(torch.int32)
    return (((bits + 0x1FFFFF) >> 23) - 8 << 23).view(torch.float32)


@torch.no_grad()
def _encode(fmt: RowFormat, values: Tensor, plain: Tensor | None, *, power_of_two: bool) -> Tensor:
    _check_vector("values", values, fmt.values.size)
    n = len(values)
    if plain is not None and fmt.plain is not None:
        _check_vector("rope", plain, fmt.plain.size)
        if len(plain) != n or plain.device != values.device:
            raise LayoutError(
                f"{n} latent rows on {values.device}, {len(plain)} rope rows on {plain.device}"
            )
    if fmt.bare is not None:
        parts = [values] if plain is None else [values, plain]
        row = torch.cat([part.to(fmt.bare) for part in parts], 1)
        return row.masked_fill_(row.isnan(), torch.nan).view(torch.uint8)
    out = torch.empty(n, fmt.nbytes, dtype=torch.uint8, device=values.device)
    for pad in fmt.padding:
        out[:, pad.offset : pad.end] = 0
    if out.device.type == "cuda" and fmt.scale is not None:
        import kvflow.kernels.triton_codec as triton_codec

        if triton_codec.supports(fmt, values.dtype, *([plain.dtype] if plain is not None else [])):
            triton_codec.quantise(fmt, values, plain, out, power_of_two=power_of_two)
            return out
    if plain is not None and fmt.plain is not None:
        _store(out, fmt.plain, plain)
    if fmt.scale is None:
        _store(out, fmt.values, values)
    else:
        _quantise_rows(
            fmt, fmt.scale, values, out, power_of_two_scale if power_of_two else group_scale
        )
    return out


def _quantise_rows(
    fmt: RowFormat, scale: Span, values: Tensor, out: Tensor, rule: ScaleRule
) -> None:
    """Write codes and scales of values [n, size] into packed rows, a chunk of rows at a time."""
    size, group = fmt.values.size, fmt.group
    padded = scale.size * group
    step = _chunk_rows(out, padded)
    scratch = torch.zeros(step, padded, device=out.device)
    all_codes = out[:, fmt.values.offset : fmt.values.end]
    for start in range(0, len(out), step):
        codes = all_codes[start : start + step]
        x = scratch[: len(codes)]
        x[:, :size].copy_(values[start : start + step])
        groups = x.view(-1, scale.size, group)
        amax = groups.abs().amax(-1)
        scales = rule(amax)
        poisoned = amax.isfinite().logical_not_()
        scales.masked_fill_(poisoned, torch.nan)
        groups.div_(scales[..., None])  # at most 448 and an ulp, which every cast rounds to 448
        groups.masked_fill_(poisoned[..., None], torch.nan)  # every cast gives the code 0x7F
        codes.view(FP8).copy_(x[:, :size])
        if size < padded:
            x[:, size:] = 0
        out[start : start + step, scale.offset : scale.end] = scales.view(torch.uint8)


def _chunk_rows(rows: Tensor, row_size: int) -> int:
    """Rows per pass: all of them on a GPU, a cache's worth on a CPU."""
    most = len(rows) if rows.device.type != "cpu" else CPU_CHUNK // row_size
    return max(1, min(len(rows), most))


@torch.no_grad()
def _decode(fmt: RowFormat, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype != torch.uint8 or rows.ndim < 1 or rows.shape[-1] != fmt.nbytes:
        raise LayoutError(
            f"rows are {rows.dtype} {list(rows.shape)}, must be torch.uint8 [..., {fmt.nbytes}]"
        )
    if dtype not in FLOATS.values():
        raise LayoutError(f"decode to {dtype}, must be one of {list(FLOATS)}")
    view = _view(fmt, rows, dtype)
    if view is not None:
        return view
    flat = rows.reshape(rows.shape[:-1].numel(), fmt.nbytes)
    out = torch.empty(len(flat), fmt.size, dtype=dtype, device=rows.device)
    if out.device.type == "cuda" and fmt.scale is not None:
        import kvflow.kernels.triton_codec as triton_codec

        if triton_codec.supports(fmt, dtype):
            triton_codec.dequantise(fmt, flat, out)
            return out.view(*rows.shape[:-1], fmt.size)
    if fmt.plain is not None:
        out[:, fmt.values.size :].copy_(_load(flat, fmt.plain))
    if fmt.scale is None:
        out[:, : fmt.values.size].copy_(_load(flat, fmt.values))
    else:
        _dequantise(fmt, fmt.scale, flat, out[:, : fmt.values.size])
    return out.view(*rows.shape[:-1], fmt.size)


def _view(fmt: RowFormat, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    aligned = (rows.data_ptr() | int(rows.storage_offset())) % dtype.itemsize == 0
    return rows.view(dtype) if aligned and rows.is_contiguous() and fmt.bare == dtype else None


def _dequantise(fmt: RowFormat, scale: Span, rows: Tensor, out: Tensor) -> None:
    """Write code * scale, rounded once to float32, then to the dtype of `out`."""
    size, group = fmt.values.size, fmt.group
    step = _chunk_rows(rows, size)
    table = _VALUES.to(rows.device)
    index = torch.empty(step, size, dtype=torch.int32, device=rows.device)
    values = torch.empty(step, size, device=rows.device)
    full = size // group
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        i, x = index[: len(chunk)], values[: len(chunk)]
        i.copy_(chunk[:, fmt.values.offset : fmt.values.end])
        torch.index_select(table, 0, i.view(-1), out=x.view(-1))
        scales = _load(chunk, scale)
        x[:, : full * group].view(-1, full, group).mul_(scales[:, :full, None])
        if full < scale.size:
            x[:, full * group :].mul_(scales[:, full:])
        out[start : start + step].copy_(x)


def _store(out: Tensor, span: Span, x: Tensor) -> None:
    """Write x [n, size] into a span of rows, each NaN as the dtype's positive quiet NaN."""
    value = x.to(span.dtype, copy=True).contiguous()
    value.masked_fill_(x.isnan(), torch.nan)
    out[:, span.offset : span.end] = value.view(torch.uint8)


def _load(rows: Tensor, span: Span) -> Tensor:
    """A span of rows [n, nbytes] as [n, size] of its dtype; a view where alignment allows."""
    raw = rows[:, span.offset : span.end]
    width = span.dtype.itemsize
    aligned = raw.storage_offset() % width == 0 and raw.data_ptr() % width == 0
    if not aligned or raw.stride(0) % width or raw.stride(1) != 1:
        raw = torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw)
    return raw.view(span.dtype)


def _check_vector(name: str, x: Tensor, size: int) -> None:
    if x.ndim != 2 or x.shape[1] != size or x.dtype not in FLOATS.values():
        raise LayoutError(f"{name} is {x.dtype} {list(x.shape)}, must be a float dtype [n, {size}]")
