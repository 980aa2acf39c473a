"""Triton kernels of the fp8 row codec: one token per program, the same bytes as `codec`.

Divisions are correctly rounded (`div_rn`): the plain `/` of a GPU is 2 ulp off, which changes half
of the scales. Non-finite groups are written as codes 0x7f under a NaN scale by hand, because
maximum on a GPU drops NaN.
"""

# Constants of a kernel are upper case by Triton's convention, and `triton.jit` is untyped.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvflow.kernels.formats import RowFormat


@triton.jit
def quantise_kernel(
    values, plain, rows, values_stride, plain_stride,
    SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr, SCALE_OFFSET: tl.constexpr, PLAIN_OFFSET: tl.constexpr,
    PLAIN_SIZE: tl.constexpr, PLAIN_PADDED: tl.constexpr, ROW_NBYTES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """values [n, SIZE] and plain [n, PLAIN_SIZE] -> packed rows; padding bytes stay."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)
    within = tl.arange(0, GROUP_PADDED)
    element = group[:, None] * GROUP + within[None, :]
    mine = (within < GROUP)[None, :] & (element < SIZE)
    x = tl.load(values + token * values_stride + element, mask=mine, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    poisoned = tl.max((magnitude < float("inf")).to(tl.int32) ^ 1, axis=1) > 0
    x = tl.where(poisoned[:, None], 0.0, x)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10)
    if POWER_OF_TWO:
        bits = amax.to(tl.int32, bitcast=True)
        scale = ((((bits + 0x1FFFFF) >> 23) - 8) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(amax, 448.0)
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    codes = tl.where(poisoned[:, None], 0x7F, codes).to(tl.uint8)
    scale = tl.where(poisoned, 0x7FC00000, scale.to(tl.int32, bitcast=True)).to(tl.int32)
    row = rows + token * ROW_NBYTES
    tl.store(row + element, codes, mask=mine)
    scale_at = (row + SCALE_OFFSET).to(tl.pointer_type(tl.int32))
    tl.store(scale_at + group, scale, mask=group * GROUP < SIZE)
    if PLAIN_SIZE > 0:
        p = tl.arange(0, PLAIN_PADDED)
        v = tl.load(plain + token * plain_stride + p, mask=p < PLAIN_SIZE, other=0.0)
        v = v.to(tl.float32)
        is_nan = v != v
        v = v.to(tl.bfloat16).to(tl.int16, bitcast=True)
        v = tl.where(is_nan, 0x7FC0, v).to(tl.int16)
        plain_at = (row + PLAIN_OFFSET).to(tl.pointer_type(tl.int16))
        tl.store(plain_at + p, v, mask=p < PLAIN_SIZE)


@triton.jit
def dequantise_kernel(
    rows, out,
    SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr, SCALE_OFFSET: tl.constexpr, PLAIN_OFFSET: tl.constexpr,
    PLAIN_SIZE: tl.constexpr, PLAIN_PADDED: tl.constexpr, ROW_NBYTES: tl.constexpr,
):  # fmt: skip
    """Packed rows -> out [n, SIZE + PLAIN_SIZE], in the dtype of `out`."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)
    within = tl.arange(0, GROUP_PADDED)
    element = group[:, None] * GROUP + within[None, :]
    mine = (within < GROUP)[None, :] & (element < SIZE)
    row = rows + token * ROW_NBYTES
    codes = tl.load(row + element, mask=mine, other=0).to(tl.float8e4nv, bitcast=True)
    scale_at = (row + SCALE_OFFSET).to(tl.pointer_type(tl.float32))
    scale = tl.load(scale_at + group, mask=group * GROUP < SIZE, other=0.0)
    x = codes.to(tl.float32) * scale[:, None]
    to = out + token * (SIZE + PLAIN_SIZE)
    tl.store(to + element, x.to(out.dtype.element_ty), mask=mine)
    if PLAIN_SIZE > 0:
        p = tl.arange(0, PLAIN_PADDED)
        plain_at = (row + PLAIN_OFFSET).to(tl.pointer_type(tl.bfloat16))
        v = tl.load(plain_at + p, mask=p < PLAIN_SIZE, other=0.0).to(tl.float32)
        tl.store(to + SIZE + p, v.to(out.dtype.element_ty), mask=p < PLAIN_SIZE)


def constants(fmt: RowFormat) -> dict[str, int]:
    """Compile-time constants of both kernels for one row format."""
    assert fmt.scale is not None
    plain_size = fmt.plain.size if fmt.plain else 0
    return {
        "SIZE": fmt.values.size,
        "GROUP": fmt.group,
        "GROUPS_PADDED": triton.next_power_of_2(fmt.scale.size),
        "GROUP_PADDED": triton.next_power_of_2(fmt.group),
        "SCALE_OFFSET": fmt.scale.offset,
        "PLAIN_OFFSET": fmt.plain.offset if fmt.plain else 0,
        "PLAIN_SIZE": plain_size,
        "PLAIN_PADDED": triton.next_power_of_2(max(plain_size, 1)),
        "ROW_NBYTES": fmt.nbytes,
    }


def supports(fmt: RowFormat, *dtypes: torch.dtype) -> bool:
    """Whether the kernels serve this format: fp8 values whose scales and bfloat16 vector lie on
    their natural alignment (the row buffers come from an allocator), no float64 anywhere."""
    aligned = fmt.scale is not None and fmt.scale.offset % 4 == 0 and fmt.nbytes % 4 == 0
    plain = fmt.plain is None or (fmt.plain.offset % 2 == 0 and fmt.plain.dtype == torch.bfloat16)
    starts_at_zero = fmt.values.offset == 0
    return aligned and plain and starts_at_zero and torch.float64 not in dtypes


def quantise(
    fmt: RowFormat, values: Tensor, plain: Tensor | None, rows: Tensor, *, power_of_two: bool
) -> None:
    """Fill the packed rows uint8 [n, nbytes], their padding excepted."""
    if not len(rows):
        return
    values = values if values.stride(1) == 1 else values.contiguous()
    plain = plain if plain is None or plain.stride(1) == 1 else plain.contiguous()
    args: tuple[Any, ...] = (values, plain, rows, values.stride(0))
    args = (*args, plain.stride(0) if plain is not None else 0)
    kernel = quantise_kernel[(len(rows),)]
    kernel(*args, **constants(fmt), POWER_OF_TWO=power_of_two, num_warps=1)


def dequantise(fmt: RowFormat, rows: Tensor, out: Tensor) -> None:
    """Packed rows uint8 [n, nbytes] -> contiguous out [n, values + plain]."""
    rows = rows.contiguous() if rows.data_ptr() % 4 == 0 else torch.cat([rows])
    if len(rows):
        dequantise_kernel[(len(rows),)](rows, out, **constants(fmt), num_warps=1)
