"""Regions: memory of this process for rows that are read in random order."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvflow.errors import CapacityError

PAGE_NBYTES = mmap.PAGESIZE
HUGE_PAGE_NBYTES = 2 << 20
"""Of x86-64, and of 64-bit ARM whose pages have 4 KiB."""


def region_memory(nbytes: int, fill: int | None = 0) -> Tensor:
    """uint8 [nbytes] of a byte `fill`, all of it taken from the system at once; for None whatever
    is there, taken as it is written. Raises `CapacityError` for a negative number and for more than
    the system gives.

    A region that fills a huge page lies on huge pages where the system has any: rows far apart are
    then found without a walk through the page table for each."""
    if nbytes < 0:
        raise CapacityError(f"a region of {nbytes} bytes, must be at least 0")
    try:
        memory = _taken(nbytes)
    except (OSError, OverflowError, RuntimeError) as error:
        raise CapacityError(f"the system does not give {nbytes} bytes: {error}") from error
    return memory if fill is None else memory.fill_(fill)


def _taken(nbytes: int) -> Tensor:
    if nbytes < HUGE_PAGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    whole = -(-nbytes // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES  # the system aligns whole ones
    mapped = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system built without: pages stay small
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes)


def region_memories(sizes: Sequence[int], fill: int | None = 0) -> list[Tensor]:
    """uint8 [size] for each of some sizes, one behind the other, so that small ones lie on huge
    pages too; each begins on a page. Raises `CapacityError` as `region_memory` does."""
    starts = [0]
    for nbytes in sizes:
        if nbytes < 0:
            raise CapacityError(f"a region of {nbytes} bytes, must be at least 0")
        starts.append(starts[-1] + -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
    if starts[-1] < HUGE_PAGE_NBYTES:
        return [region_memory(nbytes, fill) for nbytes in sizes]
    whole = region_memory(starts[-1], fill)
    return [whole[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=False)]
