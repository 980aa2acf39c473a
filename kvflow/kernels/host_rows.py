"""Rows on a CPU: runs of slots as strided words, other slots as opaque items that numpy or torch
indexes, long ranges as slices."""

from collections.abc import Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvflow.kernels.pages import PageView
from kvflow.kernels.ranges import CHUNK_NBYTES, RangeCopy
from kvflow.kernels.stacks import Stack, packed, stacked
from kvflow.layouts.paging import in_page
from kvflow.layouts.pieces import Heads, Piece
from kvflow.transfers.lower import Descriptors

MAX_RANGES = 1 << 20
"""Byte ranges that a repack describes at a time."""
LONG_RUN = 8
"""Rows behind each other, on average, from which slots are copied as ranges."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_Items = npt.NDArray[np.void]
_Index = npt.NDArray[np.int64]


def is_even(pages: PageView, heads: Heads | None) -> bool:
    """Whether each piece steps evenly from token to token."""
    return not any(piece.tiles for piece in pages.pieces(heads))


def gather_indexed(pages: PageView, slots: Tensor, out: Tensor, heads: Heads | None = None) -> None:
    """Any slots -> packed rows; rows of padding slots become zero."""
    padding = slots < 0
    padded = bool(padding.any())
    if padded:
        slots = slots.clamp_min(0)
    for stack in stacked(packed(pages.pieces(heads))):
        if _is_row(stack, out) and (ranges := _row_ranges(pages, slots, stack.src)) is not None:
            RangeCopy.of(ranges).copy(pages.memory, out.view(-1))
            continue
        if _is_row(stack, out) and pages.block_stride % stack.src.nbytes == 0:
            _select_rows(pages, slots, stack.src, out)
            continue
        items, index = _page_items(pages, slots, stack)
        rows = _row_items(out, stack)
        for some in _chunks(out, stack):
            rows[some] = items[index[some]]
    if padded:
        out.masked_fill_(padding[:, None], 0)


def scatter_indexed(
    pages: PageView, slots: Tensor, rows: Tensor, heads: Heads | None = None
) -> None:
    """Packed rows -> any slots; rows of padding slots are skipped."""
    keep = slots >= 0
    if not bool(keep.all()):
        slots, rows = slots[keep], rows[keep]
    for stack in stacked(packed(pages.pieces(heads))):
        if _is_row(stack, rows) and (ranges := _row_ranges(pages, slots, stack.src)) is not None:
            RangeCopy.of(Descriptors(ranges.dst, ranges.src, ranges.nbytes)).copy(
                rows.view(-1), pages.memory
            )
            continue
        items, index = _page_items(pages, slots, stack)
        items[index] = _row_items(rows, stack)


def repack(
    src: PageView,
    src_slots: Tensor,
    dst: PageView,
    dst_slots: Tensor,
    pairs: Sequence[tuple[Piece, Piece]],
) -> None:
    """Any slots -> any slots of another memory; pairs of padding slots are skipped."""
    keep = src_slots >= 0
    if not bool(keep.all()):
        src_slots, dst_slots = src_slots[keep], dst_slots[keep]
    step = max(MAX_RANGES // len(pairs), 1)
    for i in range(0, len(src_slots), step):
        here, there = src_slots[i : i + step], dst_slots[i : i + step]
        columns = [
            (
                src.byte_offsets(here, a).numpy(),
                dst.byte_offsets(there, b).numpy(),
                np.full(len(here), a.nbytes),
            )
            for a, b in pairs
        ]
        joined = Descriptors(*map(np.concatenate, zip(*columns, strict=True)))
        RangeCopy.of(joined.coalesced()).copy(src.memory, dst.memory)


def _is_row(stack: Stack, rows: Tensor) -> bool:
    """Whether a piece is the whole row, and the next token's follows it."""
    piece = stack.src
    return stack.count == 1 and piece.nbytes == rows.shape[1] == piece.stride and not piece.tiles


def _row_ranges(pages: PageView, slots: Tensor, piece: Piece) -> Descriptors | None:
    """Stretches of slots as ranges (in the pages, in the packed rows); None if most are short."""
    follows = slots[1:].numpy() == slots[:-1].numpy() + 1
    if (len(slots) - np.count_nonzero(follows)) * LONG_RUN > len(slots):
        return None
    cut = np.append(True, ~follows) | (in_page(slots, pages.block_size).numpy() == 0)
    first = np.flatnonzero(cut)
    if len(first) * LONG_RUN > len(slots):
        return None
    at = pages.byte_offsets(slots[torch.from_numpy(first)], piece).numpy()
    count = np.diff(first, append=len(slots))
    return Descriptors(at, first * piece.nbytes, count * piece.nbytes)


def _select_rows(pages: PageView, slots: Tensor, piece: Piece, out: Tensor) -> None:
    """Pages that are one array of rows, indexed by torch, which needs no copy in between."""
    first = pages.offset + piece.offset
    count = (len(pages.memory) - first) // piece.nbytes
    rows = pages.memory[first : first + count * piece.nbytes].view(count, piece.nbytes)
    if pages.block_stride != pages.block_size * piece.nbytes:  # else rows are numbered as slots are
        at = pages.byte_offsets(slots, piece) - first
        slots = at.div_(piece.nbytes, rounding_mode="floor")
    torch.index_select(rows, 0, slots, out=out)


def _chunks(rows: Tensor, stack: Stack) -> list[slice]:
    """A cache's worth of rows each."""
    step = max(CHUNK_NBYTES // (stack.src.nbytes * stack.count), 1)
    return [slice(i, i + step) for i in range(0, len(rows), step)]


def _page_items(pages: PageView, slots: Tensor, stack: Stack) -> tuple[_Items, _Index]:
    """The pieces of every slot as items of one array, and the index [slots, pieces] of each in it.
    The items start at every common divisor of the steps, so they overlap; the index picks only
    true ones."""
    piece = stack.src
    tiles = (stride for _, stride in piece.tiles)
    unit = gcd(pages.block_stride, piece.stride, stack.src_step, *tiles)
    first = pages.offset + piece.offset
    last = torch.tensor([pages.num_slots - 1], dtype=torch.int64)
    reach = int(pages.byte_offsets(last, piece)) - first + (stack.count - 1) * stack.src_step
    items = np.ndarray(
        (reach // unit + 1,), _item(piece), pages.memory.numpy(), offset=first, strides=(unit,)
    )
    index = (pages.byte_offsets(slots, piece) - first).div_(unit, rounding_mode="floor")
    steps = torch.arange(stack.count) * (stack.src_step // unit)
    return items, (index[:, None] + steps).numpy()


def _row_items(rows: Tensor, stack: Stack) -> _Items:
    """The pieces of every packed row as items [rows, pieces]; writes go to the rows."""
    shape, piece = (len(rows), stack.count), stack.dst
    if not len(rows):
        return np.empty(shape, _item(piece))
    steps = (rows.shape[1], stack.dst_step)
    return np.ndarray(shape, _item(piece), rows.numpy(), offset=piece.offset, strides=steps)


def _item(piece: Piece) -> str:
    return f"u{piece.nbytes}" if piece.nbytes in _WORDS else f"V{piece.nbytes}"


def copy_run(
    pages: PageView, start: int, rows: Tensor, heads: Heads | None = None, *, to_pages: bool
) -> None:
    """Copy the slots start, start + 1, ... as a partial block, whole blocks, a partial block."""
    size, end, position = pages.block_size, start + len(rows), 0
    stacks = stacked(packed(pages.pieces(heads)))
    while start < end:
        block, within = divmod(start, size)
        whole = within == 0 and end - start >= size
        num_blocks = (end - start) // size if whole else 1
        tokens = size if whole else min(size - within, end - start)
        part = rows[position : position + num_blocks * tokens].view(num_blocks, tokens, -1)
        for stack in stacks:
            page, row = _word_views(pages, stack, block, within, part)
            if to_pages:
                page.copy_(row)
            else:
                row.copy_(page)
        start += num_blocks * tokens
        position += num_blocks * tokens


def _word_views(
    pages: PageView, stack: Stack, block: int, within: int, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """The pieces of rows [blocks, tokens, nbytes], in the pages from a token of a block on and in
    the packed rows, both [blocks, tokens, pieces, words] of the widest word that all addresses
    allow."""
    piece, memory = stack.src, pages.memory
    first = pages.offset + piece.offset + block * pages.block_stride + within * piece.stride
    bits = [8, first, piece.stride, piece.nbytes, stack.src_step]
    bits += [stack.dst.offset, stack.dst_step, rows.shape[2]]
    bits += [memory.data_ptr(), int(memory.storage_offset())]
    bits += [rows.data_ptr(), int(rows.storage_offset())]
    if rows.shape[0] > 1:
        bits.append(pages.block_stride)
    width = gcd(*bits)
    shape = (*rows.shape[:2], stack.count, piece.nbytes // width)

    def view(memory: Tensor, first: int, *steps: int) -> Tensor:
        words = memory[: len(memory) // width * width].view(_WORDS[width])
        strides = (*(step // width for step in steps), 1)
        return words.as_strided(shape, strides, words.storage_offset() + first // width)

    row_steps = (rows.shape[1] * rows.shape[2], rows.shape[2], stack.dst_step)
    return (
        view(memory, first, pages.block_stride, piece.stride, stack.src_step),
        view(rows.view(-1), stack.dst.offset, *row_steps),
    )
