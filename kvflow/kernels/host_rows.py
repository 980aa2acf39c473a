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
from kvflow.layouts.pieces import Heads, Piece
from kvflow.transfers.lower import Descriptors

MAX_RANGES = 1 << 20
"""Byte ranges that a repack describes at a time."""
LONG_RUN = 8
"""Rows behind each other, on average, from which slots are copied as ranges."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_Items = np.ndarray[tuple[int], np.dtype[np.void]]
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
    for piece in pages.pieces(heads):
        if _is_row_array(pages, piece, out):
            _gather_whole_rows(pages, slots, piece, out)
            continue
        items, index = _page_items(pages, slots, piece)
        rows = _row_items(out, piece)
        for some in _chunks(len(index), piece.nbytes):
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
    for piece in pages.pieces(heads):
        items, index = _page_items(pages, slots, piece)
        if _is_row_array(pages, piece, rows) and (runs := _runs(index)) is not None:
            first, nbytes = runs[0] * piece.nbytes, runs[1] * piece.nbytes
            at = pages.byte_offsets(slots, piece).numpy()[runs[0]]
            RangeCopy.of(Descriptors(first, at, nbytes)).copy(rows.view(-1), pages.memory)
        else:
            items[index] = _row_items(rows, piece)


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


def _is_row_array(pages: PageView, piece: Piece, rows: Tensor) -> bool:
    """Whether a piece is the whole row, and the pages are one array of rows."""
    whole = piece.nbytes == rows.shape[1] == piece.stride and not piece.tiles
    return whole and pages.block_stride % piece.nbytes == 0


def _gather_whole_rows(pages: PageView, slots: Tensor, piece: Piece, out: Tensor) -> None:
    first = pages.offset + piece.offset
    at = pages.byte_offsets(slots, piece) - first
    index = at.div_(piece.nbytes, rounding_mode="floor")
    count = (len(pages.memory) - first) // piece.nbytes
    items = pages.memory[first : first + count * piece.nbytes]
    if (runs := _runs(index.numpy())) is not None:
        begin, nbytes = index.numpy()[runs[0]] * piece.nbytes, runs[1] * piece.nbytes
        ranges = Descriptors(begin, runs[0] * piece.nbytes, nbytes)
        RangeCopy.of(ranges).copy(items, out.view(-1))
    else:
        torch.index_select(items.view(count, piece.nbytes), 0, index, out=out)


def _runs(index: _Index) -> tuple[_Index, _Index] | None:
    """Where each stretch of ascending neighbours begins, and its length; None if most are short."""
    first = np.flatnonzero(np.diff(index, prepend=index[:1] - 2) != 1)
    if len(first) * LONG_RUN > len(index):
        return None
    return first, np.diff(first, append=len(index))


def _chunks(num: int, nbytes: int) -> list[slice]:
    """A cache's worth of items each."""
    step = max(CHUNK_NBYTES // nbytes, 1)
    return [slice(i, i + step) for i in range(0, num, step)]


def _page_items(pages: PageView, slots: Tensor, piece: Piece) -> tuple[_Items, _Index]:
    """`piece` of every slot as items of one array, and the index of each slot in it. The items
    start at every common divisor of the two strides, so they overlap; the index picks only true
    ones."""
    unit = gcd(pages.block_stride, piece.stride, *(stride for _, stride in piece.tiles))
    first = pages.offset + piece.offset
    last = torch.tensor([pages.num_slots - 1], dtype=torch.int64)
    reach = int(pages.byte_offsets(last, piece)) - first
    items = np.ndarray(
        (reach // unit + 1,), _item(piece), pages.memory.numpy(), offset=first, strides=(unit,)
    )
    index = (pages.byte_offsets(slots, piece) - first).div_(unit, rounding_mode="floor")
    return items, index.numpy()


def _row_items(rows: Tensor, piece: Piece) -> _Items:
    """`piece` of every packed row as an item; writes go to the rows."""
    nbytes = rows.shape[1]
    if not len(rows):
        return np.empty(0, _item(piece))
    return np.ndarray(
        (len(rows),), _item(piece), rows.numpy(), offset=piece.record_offset, strides=(nbytes,)
    )


def _item(piece: Piece) -> str:
    return f"u{piece.nbytes}" if piece.nbytes in _WORDS else f"V{piece.nbytes}"


def copy_run(
    pages: PageView, start: int, rows: Tensor, heads: Heads | None = None, *, to_pages: bool
) -> None:
    """Copy the slots start, start + 1, ... as a partial block, whole blocks, a partial block."""
    size, end, position = pages.block_size, start + len(rows), 0
    while start < end:
        block, within = divmod(start, size)
        whole = within == 0 and end - start >= size
        num_blocks = (end - start) // size if whole else 1
        tokens = size if whole else min(size - within, end - start)
        part = rows[position : position + num_blocks * tokens].view(num_blocks, tokens, -1)
        for piece in pages.pieces(heads):
            first = pages.offset + piece.offset + block * pages.block_stride + within * piece.stride
            page, row = _word_views(pages, piece, first, part)
            if to_pages:
                page.copy_(row)
            else:
                row.copy_(page)
        start += num_blocks * tokens
        position += num_blocks * tokens


def _word_views(pages: PageView, piece: Piece, first: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`piece` of rows [blocks, tokens, nbytes], in the pages from byte `first` on and in the
    packed rows, both [blocks, tokens, words] of the widest word that all addresses allow."""
    memory = pages.memory
    bits = [8, first, piece.stride, piece.nbytes, piece.record_offset, rows.shape[2]]
    bits += [memory.data_ptr(), int(memory.storage_offset())]
    bits += [rows.data_ptr(), int(rows.storage_offset())]
    if rows.shape[0] > 1:
        bits.append(pages.block_stride)
    width = gcd(*bits)
    words = memory[: len(memory) // width * width].view(_WORDS[width])
    page = words.as_strided(
        (rows.shape[0], rows.shape[1], piece.nbytes // width),
        (pages.block_stride // width, piece.stride // width, 1),
        words.storage_offset() + first // width,
    )
    span = slice(piece.record_offset // width, (piece.record_offset + piece.nbytes) // width)
    return page, rows.view(_WORDS[width])[..., span]
