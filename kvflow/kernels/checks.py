"""What is refused before a row moves: bad slots, rows of another shape, overlapping memory."""

import torch
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.kernels.pages import PageView
from kvflow.layouts.paging import PADDING_SLOT
from kvflow.layouts.pieces import Heads


def check_slots(pages: PageView, slots: Tensor) -> int | None:
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


def check_rows(pages: PageView, slots: Tensor, rows: Tensor, heads: Heads | None) -> None:
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


def check_written_once(slots: Tensor) -> None:
    ordered, row = torch.sort(slots, stable=True)
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if bool(same.any()):
        i = int(same.nonzero()[0])
        raise LayoutError(
            f"slot {int(ordered[i])} is written by rows {int(row[i])} and {int(row[i + 1])}, "
            "must be written once"
        )


def check_pairs(src: PageView, src_slots: Tensor, dst: PageView, dst_slots: Tensor) -> None:
    """Raise unless the slots pair up on one device and the two memories are apart."""
    for pages, slots in ((src, src_slots), (dst, dst_slots)):
        check_slots(pages, slots)
    if len(src_slots) != len(dst_slots) or src_slots.device != dst_slots.device:
        raise LayoutError(
            f"{len(src_slots)} source slots on {src_slots.device}, "
            f"{len(dst_slots)} target slots on {dst_slots.device}"
        )
    odd = (src_slots < 0) != (dst_slots < 0)
    if bool(odd.any()):
        i = int(odd.nonzero()[0])
        raise LayoutError(
            f"pair {i} is slot {int(src_slots[i])} -> {int(dst_slots[i])}: both or none are padding"
        )
    here, there = src.memory.data_ptr(), dst.memory.data_ptr()
    if here < there + len(dst.memory) and there < here + len(src.memory):
        raise LayoutError(
            f"source pages at {here:#x} + {len(src.memory)} share bytes with target pages at "
            f"{there:#x} + {len(dst.memory)}"
        )
    check_written_once(dst_slots)
