"""Rows at slots that the caller knows to be good: nothing is checked, and the host waits for
nothing. `kvflow.kernels.rows` is for slots from elsewhere."""

from functools import cached_property
from math import gcd

import torch
from attrs import frozen
from torch import Tensor

from kvflow.kernels.pages import PageView
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.paging import in_page, page_of

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@frozen(eq=False)
class SlotRows:
    """The pages of a component as rows. Slots are int64 [n] in ``[0, num_slots)``, on the device
    of the pages, written at most once. Pages whose tokens step by tiles are still read and written
    with the checks of `gather_rows` and `scatter_rows`."""

    pages: PageView

    def read(self, slots: Tensor) -> Tensor:
        """Packed rows uint8 ``[n, nbytes]``, a copy."""
        rows = self._rows
        if rows is not None:
            return rows.index_select(0, slots).view(torch.uint8)
        if self._is_tiled:
            return gather_rows(self.pages, slots)
        out = torch.empty(
            len(slots), self.pages.record.nbytes, dtype=torch.uint8, device=slots.device
        )
        page, place = page_of(slots, self.pages.block_size), in_page(slots, self.pages.block_size)
        for start, stop, items in self._items if len(slots) else ():
            out[:, start:stop] = items[page, place].view(torch.uint8)
        return out

    @property
    def in_place(self) -> Tensor | None:
        """Every slot's packed row, uint8 ``[num_slots, nbytes]``, no copy; None where a row's bytes
        do not lie together."""
        return None if self._rows is None else self._rows.view(torch.uint8)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Stores packed rows uint8 ``[n, nbytes]``."""
        held = self._rows
        if held is not None:
            # a single row counts as contiguous whatever its stride, which a view in words minds
            packed = (rows.shape[1], 1) == rows.stride() and rows.data_ptr() % held.itemsize == 0
            rows = rows if packed else rows.clone(memory_format=torch.contiguous_format)
            held.index_copy_(0, slots, rows.view(held.dtype))
            return
        if self._is_tiled:
            scatter_rows(self.pages, slots, rows)
            return
        page, place = page_of(slots, self.pages.block_size), in_page(slots, self.pages.block_size)
        for start, stop, items in self._items if len(slots) else ():
            # a single row counts as contiguous whatever its stride, which a view in words minds
            part = rows[:, start:stop].clone(memory_format=torch.contiguous_format)
            items.index_put_((page, place), part.view(items.dtype))

    @cached_property
    def _is_tiled(self) -> bool:
        return any(piece.tiles for piece in self.pages.pieces())

    @cached_property
    def _rows(self) -> Tensor | None:
        """The memory as one row a slot, in words, where slots lie behind each other."""
        pages, nbytes = self.pages, self.pages.record.nbytes
        (piece, *rest) = pages.pieces()
        gapless = pages.block_stride == pages.block_size * nbytes and piece.stride == nbytes
        if rest or piece.tiles or piece.nbytes != nbytes or not gapless:
            return None
        first = pages.offset + piece.offset
        width = self._width(first, nbytes)
        held = pages.memory[first : first + pages.num_slots * nbytes]
        return held.view(_WORDS[width]).view(pages.num_slots, nbytes // width)

    @cached_property
    def _items(self) -> list[tuple[int, int, Tensor]]:
        """By piece: the bytes of a packed row it makes, and words ``[page, token, word]``."""
        pages, items = self.pages, []
        for piece in pages.pieces():
            first = pages.offset + piece.offset
            width = self._width(first, piece.nbytes, piece.stride, pages.block_stride)
            words = pages.memory[: len(pages.memory) // width * width].view(_WORDS[width])
            shape = (pages.num_blocks, pages.block_size, piece.nbytes // width)
            steps = (pages.block_stride // width, piece.stride // width, 1)
            view = words.as_strided(shape, steps, words.storage_offset() + first // width)
            items.append((piece.record_offset, piece.record_offset + piece.nbytes, view))
        return items

    def _width(self, *steps: int) -> int:
        """Bytes of the widest word that all addresses allow."""
        memory = self.pages.memory
        return gcd(8, memory.data_ptr(), int(memory.storage_offset()), *steps)
