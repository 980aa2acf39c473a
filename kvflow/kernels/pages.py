"""PageView: the pages of one component and layer in memory, and where a slot's bytes lie."""

import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.layouts.memory import pages_are_apart
from kvflow.layouts.paging import bytes_of_slots
from kvflow.layouts.pieces import Heads, Piece
from kvflow.layouts.record import Record
from kvflow.transfers.lower import PageGeometry


@frozen(eq=False)
class PageView:
    """The pages of one component and layer inside one region.

    memory: uint8 [region bytes], contiguous. Page b is ``memory[offset + b * block_stride:]``,
    `block_size` tokens of `record`; `block_stride` is at least the page's bytes (more when blocks
    are outermost; less where a known number of pages stand in each other's holes). `num_blocks` is
    how many there are, by default as many as `memory` has room for. Raises `LayoutError` if that
    does not describe at least one page of `memory`, or if pages share a byte.
    """

    memory: Tensor
    record: Record
    block_size: int
    block_stride: int
    offset: int = 0
    num_blocks: int = field(default=0)

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
        if not pages_are_apart(self.record, self.block_size, self.block_stride, self.num_blocks):
            raise LayoutError(f"block_stride {self.block_stride} is below a page of {page} bytes")
        spare = len(self.memory) - self.offset - page
        if spare < 0:
            raise LayoutError(
                f"a page of {page} bytes at offset {self.offset} needs {self.offset + page} bytes, "
                f"memory has {len(self.memory)}"
            )
        room = spare // self.block_stride + 1
        if not 0 <= self.num_blocks <= room:
            raise LayoutError(f"{self.num_blocks} blocks in a memory that has room for {room}")
        object.__setattr__(self, "num_blocks", self.num_blocks or room)

    def pieces(self, heads: Heads | None = None) -> tuple[Piece, ...]:
        """The bytes of a token in some heads (default: all), in the order of the packed row."""
        return self.record.pieces(self.block_size, heads)

    @property
    def num_slots(self) -> int:
        """Slots are 0 <= slot < num_slots."""
        return self.num_blocks * self.block_size

    @property
    def geometry(self) -> PageGeometry:
        """The same pages, in bytes from memory[0]."""
        return PageGeometry(
            self.record, self.block_size, self.offset, self.block_stride, self.num_blocks
        )

    def byte_offsets(self, slots: Tensor, piece: Piece) -> Tensor:
        """int64 [n] -> int64 [n]: where `piece` of each slot starts, in bytes from memory[0].
        Pure arithmetic: it checks nothing and touches no memory."""
        return self.offset + bytes_of_slots(slots, self.block_size, self.block_stride, piece)
