"""One Triton kernel that moves rows: pages -> packed rows, packed rows -> pages, pages -> pages.

A side of a move is memory in pages; packed rows are pages of one token. A program moves one tile of
words: lanes run over the words of (row, piece), not over rows, so none is idle whatever the row's
size, and 16-byte accesses follow wherever the pieces of both sides allow them. All offsets are
64-bit. `PADDING_SLOT` never reaches an address: its lanes are masked.
"""

# Constants of a kernel are upper case by Triton's convention, and `triton.jit` is untyped.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvflow.kernels.pages import PageView
from kvflow.kernels.stacks import Pairs, Stack, packed, stacked
from kvflow.layouts.pieces import Heads, Piece

TILE_NBYTES = 4096
"""Bytes that one program moves: 32 bytes a thread with 4 warps."""

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def lanes(tile, TILE: tl.constexpr):
    """The words of a tile, counted in 64 bits over the whole move."""
    return tile.to(tl.int64) * TILE + tl.arange(0, TILE)


@triton.jit
def place(
    slot, word,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
    TILES: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Word offset of a word of one piece of each slot. TILES are size and stride of each digit
    below the slowest, the fastest first."""
    block = slot // BLOCK_SIZE
    index = slot - block * BLOCK_SIZE
    at = block * BLOCK_STRIDE + word
    for k in tl.static_range(NUM_TILES):
        rest = index // TILES[2 * k]
        at += (index - rest * TILES[2 * k]) * TILES[2 * k + 1]
        index = rest
    return at + index * STRIDE


@triton.jit
def slot_of(slots, row, inside):
    """The slot of each row; without slots, the row itself."""
    if slots is None:
        slot = row
    else:
        slot = tl.load(slots + row, mask=inside, other=-1)
    return slot


@triton.jit
def move_kernel(
    src, dst, src_slots, dst_slots, num_rows,
    SRC_BLOCK_SIZE: tl.constexpr, SRC_BLOCK_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr,
    SRC_TILES: tl.constexpr, SRC_NUM_TILES: tl.constexpr, SRC_STEP: tl.constexpr,
    DST_BLOCK_SIZE: tl.constexpr, DST_BLOCK_STRIDE: tl.constexpr, DST_STRIDE: tl.constexpr,
    DST_TILES: tl.constexpr, DST_NUM_TILES: tl.constexpr, DST_STEP: tl.constexpr,
    WIDTH: tl.constexpr, NUM_PIECES: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Words of a stack of pieces at the source slots -> the target slots: zeros for a padding
    source, nothing for a padding target. The pointers are at the first piece."""
    lane = lanes(tl.program_id(0), TILE)
    row = lane // (NUM_PIECES * WIDTH)
    word = lane - row * (NUM_PIECES * WIDTH)
    inside = row < num_rows
    src_slot, dst_slot = slot_of(src_slots, row, inside), slot_of(dst_slots, row, inside)
    # A hint that the lanes of one run live and die together: without it gfx942 moves single words.
    wanted = tl.max_constancy(inside & (dst_slot >= 0), RUN)
    live = tl.max_constancy(wanted & (src_slot >= 0), RUN)
    src_word, dst_word = word, word
    if NUM_PIECES > 1:
        piece = tl.max_constancy(word // WIDTH, RUN)
        src_word = word + piece * (SRC_STEP - WIDTH)
        dst_word = word + piece * (DST_STEP - WIDTH)
    src_at = place(
        src_slot, src_word,
        SRC_BLOCK_SIZE, SRC_BLOCK_STRIDE, SRC_STRIDE, SRC_TILES, SRC_NUM_TILES,
    )  # fmt: skip
    dst_at = place(
        dst_slot, dst_word,
        DST_BLOCK_SIZE, DST_BLOCK_STRIDE, DST_STRIDE, DST_TILES, DST_NUM_TILES,
    )  # fmt: skip
    tl.store(dst + dst_at, tl.load(src + src_at, mask=live, other=0), mask=wanted)


@frozen(eq=False)
class Side:
    """Memory in pages and the slots of a move in it; without `slots`, row i has slot i."""

    memory: Tensor
    offset: int
    block_size: int
    block_stride: int
    slots: Tensor | None = None

    @classmethod
    def of_pages(cls, pages: PageView, slots: Tensor) -> "Side":
        return cls(pages.memory, pages.offset, pages.block_size, pages.block_stride, slots)

    @classmethod
    def of_rows(cls, rows: Tensor) -> "Side":
        """Packed rows, contiguous uint8 [n, nbytes]."""
        return cls(rows.view(-1), 0, 1, rows.shape[1])

    def addresses(self) -> tuple[int, ...]:
        """What the address of every word is made of, pieces aside."""
        return self.block_stride, self.memory.data_ptr(), int(self.memory.storage_offset())

    def words(self, first: int, word: int) -> Tensor:
        """The memory from a byte of the first page on, in words."""
        first += self.offset
        usable = (len(self.memory) - first) // word * word
        return self.memory[first : first + usable].view(_WORDS[word])


@frozen(eq=False)
class Launch:
    """One kernel launch: positional tensors and counts, compile-time constants, programs."""

    args: tuple[Any, ...]
    constants: dict[str, Any]
    grid: tuple[int]

    def __call__(self) -> None:
        move_kernel[self.grid](*self.args, **self.constants)


def launches(
    src: Side, dst: Side, pairs: Pairs, num_rows: int, tile_nbytes: int = TILE_NBYTES
) -> Iterator[Launch]:
    """One launch for each stack of pieces: one for row pages, one for each field of planar pages,
    one for all items of a transposed page. Words are as wide as all addresses allow, 4 bytes at
    most; `tile_nbytes` is a power of two."""
    for stack in stacked(pairs) if num_rows else ():
        yield _launch(src, dst, stack, num_rows, tile_nbytes)


def _launch(src: Side, dst: Side, stack: Stack, num_rows: int, tile_nbytes: int) -> Launch:
    sides = ((src, stack.src, stack.src_step), (dst, stack.dst, stack.dst_step))
    word = gcd(4, stack.src.nbytes, *(n for it in sides for n in _steps(*it)))
    width, tile = stack.src.nbytes // word, tile_nbytes // word
    return Launch(
        args=(
            src.words(stack.src.offset, word), dst.words(stack.dst.offset, word),
            src.slots, dst.slots, num_rows,
        ),
        constants={
            **_constants("SRC", *sides[0], word),
            **_constants("DST", *sides[1], word),
            "WIDTH": width,
            "NUM_PIECES": stack.count,
            "RUN": min(width & -width, tile),
            "TILE": tile,
        },
        grid=(-(-num_rows * stack.count * width // tile),),
    )  # fmt: skip


def _steps(side: Side, piece: Piece, step: int) -> tuple[int, ...]:
    """Every step in bytes that leads to a piece."""
    tiles = (stride for _, stride in piece.tiles)
    return (*side.addresses(), side.offset + piece.offset, piece.stride, step, *tiles)


def _constants(name: str, side: Side, piece: Piece, step: int, word: int) -> dict[str, Any]:
    digits = [number for size, stride in reversed(piece.tiles) for number in (size, stride // word)]
    return {
        f"{name}_BLOCK_SIZE": side.block_size,
        f"{name}_BLOCK_STRIDE": side.block_stride // word,
        f"{name}_STRIDE": piece.stride // word,
        f"{name}_TILES": tuple(digits),
        f"{name}_NUM_TILES": len(piece.tiles),
        f"{name}_STEP": step // word,
    }


def gather(
    pages: PageView,
    slots: Tensor,
    out: Tensor,
    heads: Heads | None = None,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """`gather_rows` without its checks."""
    here, there, pairs = (
        Side.of_pages(pages, slots),
        Side.of_rows(out),
        packed(pages.pieces(heads)),
    )
    for launch in launches(here, there, pairs, len(slots), tile_nbytes):
        launch()


def scatter(
    pages: PageView,
    slots: Tensor,
    rows: Tensor,
    heads: Heads | None = None,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """`scatter_rows` without its checks."""
    pairs = [(b, a) for a, b in packed(pages.pieces(heads))]
    for launch in launches(
        Side.of_rows(rows), Side.of_pages(pages, slots), pairs, len(slots), tile_nbytes
    ):
        launch()


def repack(
    src: PageView,
    src_slots: Tensor,
    dst: PageView,
    dst_slots: Tensor,
    pairs: Pairs,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """`repack_rows` without its checks."""
    here, there = Side.of_pages(src, src_slots), Side.of_pages(dst, dst_slots)
    for launch in launches(here, there, pairs, len(src_slots), tile_nbytes):
        launch()
