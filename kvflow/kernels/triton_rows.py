"""Triton kernels that move rows between pages and packed rows.

A program moves one tile of words of the packed rows: lanes run over words, not rows, so none is
idle whatever the row's size, and 16-byte accesses follow wherever the record's pieces allow them.
All offsets are 64-bit. `PADDING_SLOT` never reaches an address: its lanes are masked.
"""

# Constants of a kernel are upper case by Triton's convention, and `triton.jit` is untyped.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.layouts.pieces import Heads, Piece

if TYPE_CHECKING:
    from kvflow.kernels.rows import PageView

TILE_NBYTES = 4096
"""Bytes that one program moves: 32 bytes a thread with 4 warps."""


@triton.jit
def locate(
    slots, tile, num_rows,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ROW_WIDTH: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Per lane: word offset in the pages, word offset in the rows, has a row, has a slot."""
    lane = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    row = lane // WIDTH
    word = lane - row * WIDTH
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    block = slot // BLOCK_SIZE
    page_word = block * BLOCK_STRIDE + (slot - block * BLOCK_SIZE) * STRIDE + word
    # A hint that the lanes of one row live and die together: without it gfx942 moves single words.
    live = tl.max_constancy(inside & (slot >= 0), RUN)
    return page_word, row * ROW_WIDTH + word, inside, live


@triton.jit
def gather_kernel(
    pages, slots, rows, num_rows,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ROW_WIDTH: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Words of the pages -> packed rows; rows of padding slots become zero."""
    page_word, row_word, inside, live = locate(
        slots, tl.program_id(0), num_rows,
        BLOCK_SIZE, BLOCK_STRIDE, STRIDE, WIDTH, ROW_WIDTH, RUN, TILE,
    )  # fmt: skip
    x = tl.load(pages + page_word, mask=live, other=0)
    tl.store(rows + row_word, x, mask=inside)


@triton.jit
def scatter_kernel(
    pages, slots, rows, num_rows,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, ROW_WIDTH: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Packed rows -> words of the pages; rows of padding slots are skipped."""
    page_word, row_word, _inside, live = locate(
        slots, tl.program_id(0), num_rows,
        BLOCK_SIZE, BLOCK_STRIDE, STRIDE, WIDTH, ROW_WIDTH, RUN, TILE,
    )  # fmt: skip
    x = tl.load(rows + row_word, mask=live)
    tl.store(pages + page_word, x, mask=live)


@frozen(eq=False)
class Launch:
    """One kernel launch: positional tensors and counts, compile-time constants, programs."""

    args: tuple[Any, ...]
    constants: dict[str, int]
    grid: tuple[int]


def launch(
    pages: "PageView", piece: Piece, slots: Tensor, rows: Tensor, tile_nbytes: int = TILE_NBYTES
) -> Launch:
    """Arguments that move `piece` of every row: int32 words where every address allows it, bytes
    where not. `tile_nbytes` is a power of two."""
    if piece.tiles:
        raise LayoutError(f"pages of {pages.record} are tiled, the kernels move even steps only")
    first = pages.offset + piece.offset
    word = gcd(
        4, first, pages.block_stride, piece.stride, piece.nbytes, piece.record_offset,
        rows.shape[1], pages.memory.data_ptr(), int(pages.memory.storage_offset()),
        rows.data_ptr(), int(rows.storage_offset()),
    )  # fmt: skip
    word, dtype = (4, torch.int32) if word == 4 else (1, torch.uint8)
    usable = (len(pages.memory) - first) // word * word
    page_words = pages.memory[first : first + usable].view(dtype)
    row_words = rows.view(-1)[piece.record_offset :].view(dtype)
    width, tile = piece.nbytes // word, tile_nbytes // word
    return Launch(
        args=(page_words, slots, row_words, len(rows)),
        constants={
            "BLOCK_SIZE": pages.block_size,
            "BLOCK_STRIDE": pages.block_stride // word,
            "STRIDE": piece.stride // word,
            "WIDTH": width,
            "ROW_WIDTH": rows.shape[1] // word,
            "RUN": min(width & -width, tile),
            "TILE": tile,
        },
        grid=(-(-len(rows) * width // tile),),
    )


def gather(
    pages: "PageView",
    slots: Tensor,
    out: Tensor,
    heads: Heads | None = None,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """`gather_rows` without its checks, one launch per piece."""
    for piece in pages.pieces(heads) if len(slots) else ():
        it = launch(pages, piece, slots, out, tile_nbytes)
        gather_kernel[it.grid](*it.args, **it.constants)


def scatter(
    pages: "PageView",
    slots: Tensor,
    rows: Tensor,
    heads: Heads | None = None,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """`scatter_rows` without its checks, one launch per piece."""
    for piece in pages.pieces(heads) if len(slots) else ():
        it = launch(pages, piece, slots, rows, tile_nbytes)
        scatter_kernel[it.grid](*it.args, **it.constants)
