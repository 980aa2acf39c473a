"""Moving rows between the pages of a pool and packed rows, whatever the record's arrangement.

Everything here takes slots; where a slot's bytes lie is `PageView.byte_offsets`, exact in 64 bits.
On a CPU a piece of a page is an array of opaque items (numpy moves an item with one copy); slots
that form one ascending run are copied as whole pages. On a GPU the kernels of `triton_rows` run.
"""

from math import gcd

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.layouts.paging import PADDING_SLOT, bytes_of_slots
from kvflow.layouts.pieces import Heads, Piece
from kvflow.layouts.record import Record

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@frozen(eq=False)
class PageView:
    """The pages of one component and layer inside one region.

    memory: uint8 [region bytes], contiguous. Page b is ``memory[offset + b * block_stride:]``,
    `block_size` tokens of `record`; `block_stride` is at least the page's bytes (more when blocks
    are outermost). Raises `LayoutError` if that does not describe at least one page of `memory`.
    """

    memory: Tensor
    record: Record
    block_size: int
    block_stride: int
    offset: int = 0
    num_blocks: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.memory.dtype != torch.uint8 or self.memory.ndim != 1:
            raise LayoutError(
                f"memory is {self.memory.dtype} {list(self.memory.shape)}, must be torch.uint8 [n]"
            )
        if self.memory.stride(0) != 1:
            raise LayoutError(f"memory has stride {self.memory.stride(0)}, must be 1")
        if self.block_size < 1 or self.offset < 0:
            raise LayoutError(
                f"block_size {self.block_size} must be at least 1, offset {self.offset} at least 0"
            )
        page = self.record.page_extent(self.block_size)
        if self.block_stride < page:
            raise LayoutError(f"block_stride {self.block_stride} is below a page of {page} bytes")
        spare = len(self.memory) - self.offset - page
        if spare < 0:
            raise LayoutError(
                f"a page of {page} bytes at offset {self.offset} needs {self.offset + page} bytes, "
                f"memory has {len(self.memory)}"
            )
        object.__setattr__(self, "num_blocks", spare // self.block_stride + 1)

    def pieces(self, heads: Heads | None = None) -> tuple[Piece, ...]:
        """The bytes of a token in some heads (default: all), in the order of the packed row."""
        return self.record.pieces(self.block_size, heads)

    @property
    def num_slots(self) -> int:
        """Slots are 0 <= slot < num_slots."""
        return self.num_blocks * self.block_size

    def byte_offsets(self, slots: Tensor, piece: Piece) -> Tensor:
        """int64 [n] -> int64 [n]: where `piece` of each slot starts, in bytes from memory[0].
        Pure arithmetic: it checks nothing and touches no memory."""
        return self.offset + bytes_of_slots(slots, self.block_size, self.block_stride, piece)


def gather_rows(
    pages: PageView, slots: Tensor, out: Tensor | None = None, heads: Heads | None = None
) -> Tensor:
    """Packed rows of the given slots, in a range of the heads that the pages store (default: all).

    slots: int64 [n] on the device of the pages; `PADDING_SLOT` gives a row of zeros; repeats are
    fine. out: uint8 [n, record.row_nbytes(heads)], contiguous, made when not given; it is returned.
    Raises `LayoutError` before a byte moves for any other slot, shape, dtype or device.
    """
    run = _check_slots(pages, slots)
    if out is None:
        shape = (len(slots), pages.record.row_nbytes(heads))
        out = torch.empty(shape, dtype=torch.uint8, device=slots.device)
    _check_rows(pages, slots, out, heads)
    if not out.is_contiguous():
        raise LayoutError(f"out has strides {out.stride()}, must be contiguous")
    if slots.device.type == "cuda":
        import kvflow.kernels.triton_rows as triton_rows

        triton_rows.gather(pages, slots, out, heads)
    elif run is not None and _is_even(pages, heads):
        _copy_run(pages, run, out, heads, to_pages=False)
    else:
        _gather_indexed(pages, slots, out, heads)
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
    run = _check_slots(pages, slots)
    _check_rows(pages, slots, rows, heads)
    if check_unique and run is None:
        _check_unique(slots)
    rows = rows.contiguous()
    if slots.device.type == "cuda":
        import kvflow.kernels.triton_rows as triton_rows

        triton_rows.scatter(pages, slots, rows, heads)
    elif run is not None and _is_even(pages, heads):
        _copy_run(pages, run, rows, heads, to_pages=True)
    else:
        _scatter_indexed(pages, slots, rows, heads)


def _is_even(pages: PageView, heads: Heads | None) -> bool:
    return not any(piece.tiles for piece in pages.pieces(heads))


def _check_slots(pages: PageView, slots: Tensor) -> int | None:
    """Raise for a bad slot; return the first slot if they are one ascending run (CPU only)."""
    if slots.dtype != torch.int64 or slots.ndim != 1:
        raise LayoutError(f"slots are {slots.dtype} {list(slots.shape)}, must be torch.int64 [n]")
    if slots.device != pages.memory.device or slots.device.type not in ("cpu", "cuda"):
        raise LayoutError(
            f"slots on {slots.device}, pages on {pages.memory.device}: must be one cpu or cuda"
        )
    if not len(slots):
        return None
    low, high = (int(x) for x in torch.stack(torch.aminmax(slots)).tolist())
    if low < PADDING_SLOT or high >= pages.num_slots:
        raise LayoutError(
            f"slots reach from {low} to {high}, must be {PADDING_SLOT} (padding) or "
            f"0 <= slot < {pages.num_slots}"
        )
    if slots.device.type != "cpu" or low < 0 or high - low != len(slots) - 1:
        return None
    return low if torch.equal(slots, torch.arange(low, high + 1)) else None


def _check_rows(pages: PageView, slots: Tensor, rows: Tensor, heads: Heads | None) -> None:
    expected = (len(slots), pages.record.row_nbytes(heads))
    if rows.dtype != torch.uint8 or tuple(rows.shape) != expected or rows.device != slots.device:
        raise LayoutError(
            f"rows are {rows.dtype} {list(rows.shape)} on {rows.device}, must be torch.uint8 "
            f"{list(expected)} on {slots.device}"
        )
    start, memory = rows.data_ptr(), pages.memory.data_ptr()
    span = sum((n - 1) * s for n, s in zip(rows.shape, rows.stride(), strict=True)) + 1
    if rows.numel() and start < memory + len(pages.memory) and memory < start + span:
        raise LayoutError(
            f"rows at {start:#x} + {span} share bytes with the pages at {memory:#x} + "
            f"{len(pages.memory)}"
        )


def _check_unique(slots: Tensor) -> None:
    ordered, row = torch.sort(slots, stable=True)
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if bool(same.any()):
        i = int(same.nonzero()[0])
        raise LayoutError(
            f"slot {int(ordered[i])} is written by rows {int(row[i])} and {int(row[i + 1])}, "
            "must be written once"
        )


def _gather_indexed(
    pages: PageView, slots: Tensor, out: Tensor, heads: Heads | None = None
) -> None:
    padding = slots < 0
    padded = bool(padding.any())
    if padded:
        slots = slots.clamp_min(0)
    for piece in pages.pieces(heads):
        packed = piece.nbytes == out.shape[1] == piece.stride and not piece.tiles
        if packed and pages.block_stride % piece.nbytes == 0:
            first = pages.offset + piece.offset
            count = (len(pages.memory) - first) // piece.nbytes
            items = pages.memory[first : first + count * piece.nbytes].view(count, piece.nbytes)
            index = (pages.byte_offsets(slots, piece) - first).div_(
                piece.nbytes, rounding_mode="floor"
            )
            torch.index_select(items, 0, index, out=out)
        else:
            items_np, index_np = _page_items(pages, slots, piece)
            _row_items(out, piece)[:] = items_np[index_np]
    if padded:
        out.masked_fill_(padding[:, None], 0)


def _scatter_indexed(
    pages: PageView, slots: Tensor, rows: Tensor, heads: Heads | None = None
) -> None:
    keep = slots >= 0
    if not bool(keep.all()):
        slots, rows = slots[keep], rows[keep]
    for piece in pages.pieces(heads):
        items, index = _page_items(pages, slots, piece)
        items[index] = _row_items(rows, piece)


def _page_items(
    pages: PageView, slots: Tensor, piece: Piece
) -> tuple[
    "np.ndarray[tuple[int], np.dtype[np.void]]", "np.ndarray[tuple[int], np.dtype[np.int64]]"
]:
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


def _row_items(rows: Tensor, piece: Piece) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    """`piece` of every packed row as an item; writes go to the rows."""
    nbytes = rows.shape[1]
    if not len(rows):
        return np.empty(0, _item(piece))
    return np.ndarray(
        (len(rows),), _item(piece), rows.numpy(), offset=piece.record_offset, strides=(nbytes,)
    )


def _item(piece: Piece) -> str:
    return f"u{piece.nbytes}" if piece.nbytes in _WORDS else f"V{piece.nbytes}"


def _copy_run(
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
