"""Blocks that several requests hold: a request copies such a block before it writes into it.

Which blocks are shared, and which are free, the engine knows, once for all ranks; so it plans the
copies and every rank carries them out.
"""

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen

from kvflow.layouts.layout import KVLayout
from kvflow.layouts.paging import page_of
from kvflow.layouts.sharding import Ints


@frozen
class BlockCopy:
    """All pages of block `source` of a group into those of block `target`."""

    group: str
    source: int
    target: int


def written_entries(layout: KVLayout, group: str, start: int, stop: int) -> Ints:
    """The block-table entries, ascending, that positions [start, stop) are written to on any
    rank."""
    sharding, size = layout.placement.sharding, layout.group(group).paging.block_size
    shards = np.arange(sharding.num_shards)
    first, last = sharding.local_len(start, shards), sharding.local_len(stop, shards)
    found = [
        np.arange(page_of(lo, size), page_of(hi - 1, size) + 1)
        for lo, hi in zip(first.tolist(), last.tolist(), strict=True)
        if hi > lo
    ]
    return np.unique(np.concatenate([np.empty(0, np.int64), *found]))


def plan_copies(
    layout: KVLayout,
    tables: dict[str, list[int]],
    start: int,
    stop: int,
    is_shared: Callable[[str, int], bool],
    allocate: Callable[[str], int],
) -> Sequence[BlockCopy]:
    """Before a request writes positions [start, stop): each block it would write to that another
    one holds too is replaced in its `tables` by a free one, and is to be copied there. The share of
    the old block is then the engine's to end."""
    copies = []
    for group in layout.groups:
        table = tables[group.name]
        for entry in written_entries(layout, group.name, start, stop).tolist():
            if entry < len(table) and is_shared(group.name, table[entry]):
                fresh = allocate(group.name)
                copies.append(BlockCopy(group.name, table[entry], fresh))
                table[entry] = fresh
    return copies
