"""Moving rows: between the pages of a pool and packed rows, and from pool to pool.

Everything here takes slots; where a slot's bytes lie is `PageView.byte_offsets`, exact in 64 bits.
On a CPU `host_rows` moves the bytes, on a GPU the kernel of `triton_rows`.
"""

import torch
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.kernels.checks import check_pairs, check_rows, check_slots, check_written_once
from kvflow.kernels.host_rows import copy_run, gather_indexed, is_even, repack, scatter_indexed
from kvflow.kernels.pages import PageView as PageView
from kvflow.layouts.paging import PADDING_SLOT
from kvflow.layouts.pieces import Heads
from kvflow.transfers.lower import paired_pieces


def gather_rows(
    pages: PageView, slots: Tensor, out: Tensor | None = None, heads: Heads | None = None
) -> Tensor:
    """Packed rows of the given slots, in a range of the heads that the pages store (default: all).

    slots: int64 [n] on the device of the pages; `PADDING_SLOT` gives a row of zeros; repeats are
    fine. out: uint8 [n, record.row_nbytes(heads)], contiguous, made when not given; it is returned.
    Raises `LayoutError` before a byte moves for any other slot, shape, dtype or device.
    """
    run = check_slots(pages, slots)
    if out is None:
        shape = (len(slots), pages.record.row_nbytes(heads))
        out = torch.empty(shape, dtype=torch.uint8, device=slots.device)
    check_rows(pages, slots, out, heads)
    if not out.is_contiguous():
        raise LayoutError(f"out has strides {out.stride()}, must be contiguous")
    if slots.device.type == "cuda":
        import kvflow.kernels.triton_rows as triton_rows

        triton_rows.gather(pages, slots, out, heads)
    elif run is not None and is_even(pages, heads):
        copy_run(pages, run, out, heads, to_pages=False)
    else:
        gather_indexed(pages, slots, out, heads)
    return out


def scatter_rows(
    pages: PageView,
    slots: Tensor,
    rows: Tensor,
    heads: Heads | None = None,
    *,
    check_unique: bool = True,
) -> None:
    """Write packed rows to the given slots, in a range of the heads that the pages store (default:
    all); every other byte of the memory stays as it is.

    slots: int64 [n]; rows at `PADDING_SLOT` are skipped. rows: uint8 [n, record.row_nbytes(heads)].
    Raises `LayoutError` before a byte moves for any other slot, a slot named twice (unless
    `check_unique` is off: then which row stays is undefined), or a wrong shape, dtype or device.
    """
    run = check_slots(pages, slots)
    check_rows(pages, slots, rows, heads)
    if check_unique and run is None:
        check_written_once(slots)
    rows = rows.contiguous()
    if slots.device.type == "cuda":
        import kvflow.kernels.triton_rows as triton_rows

        triton_rows.scatter(pages, slots, rows, heads)
    elif run is not None and is_even(pages, heads):
        copy_run(pages, run, rows, heads, to_pages=True)
    else:
        scatter_indexed(pages, slots, rows, heads)


def repack_rows(
    src: PageView,
    src_slots: Tensor,
    dst: PageView,
    dst_slots: Tensor,
    src_heads: Heads | None = None,
    dst_heads: Heads | None = None,
) -> None:
    """Move rows from slots of one pool to slots of another, whatever the block size and the
    arrangement of either, with no packed buffer in between.

    src_slots, dst_slots: int64 [n] on the device of their pages, which is one device; a pair of
    `PADDING_SLOT` is skipped. The heads are ranges of those that each side stores (default: all).
    Raises `PlanError` for records with other fields or heads that do not pair, and `LayoutError`
    for any other slot, a target slot named twice, or memories that overlap, before a byte moves.
    """
    pairs = paired_pieces(src.geometry, dst.geometry, src_heads, dst_heads)
    check_pairs(src, src_slots, dst, dst_slots)
    if src_slots.device.type == "cuda":
        import kvflow.kernels.triton_rows as triton_rows

        triton_rows.repack(src, src_slots, dst, dst_slots, pairs)
    else:
        repack(src, src_slots, dst, dst_slots, pairs)


def fill_slots(captured: Tensor, slots: Tensor) -> None:
    """Put the slots of a batch into a captured vector, which outlives it (a CUDA graph's input, of
    the largest batch): what is left becomes padding, whatever an earlier batch wrote there.

    captured: int64 [m]; slots: int64 [n], n <= m, on the same device. Raises `LayoutError` for any
    other shape or dtype."""
    fits = captured.ndim == slots.ndim == 1 and len(slots) <= len(captured)
    if not fits or {captured.dtype, slots.dtype} != {torch.int64}:
        raise LayoutError(
            f"slots are {slots.dtype} {list(slots.shape)}, must be torch.int64 [n] for a captured "
            f"{captured.dtype} {list(captured.shape)}"
        )
    captured[: len(slots)] = slots
    captured[len(slots) :] = PADDING_SLOT
