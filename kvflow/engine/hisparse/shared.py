"""Blocks that several requests hold: a request copies such a block before it writes into it.

Which blocks are shared, and which are free, the engine knows, once for all ranks; so it plans the
copies and every rank carries them out.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from kvflow.errors import KvflowError
from kvflow.layouts.layout import Binding, KVLayout
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


@define(eq=False)
class Holders:
    """How many requests with a seat hold each block of each group."""

    num_blocks: Mapping[str, int]
    _counts: dict[str, Ints] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = {name: np.zeros(n, np.int64) for name, n in self.num_blocks.items()}

    def change(self, before: Binding | None, after: Binding | None) -> None:
        """A request's tables, of which None is none, are others from now on."""
        for tables, by in ((before, -1), (after, 1)):
            if tables is not None:
                for group, count in self._counts.items():
                    count[tables.tables[group]] += by

    def check_exclusive(self, request_id: str, binding: Binding, start: int, stop: int) -> None:
        """Raises `KvflowError` if a request, known by its tables, would write positions
        [start, stop) into a block that another one holds too."""
        entries: dict[int, Ints] = {}
        for group, count in self._counts.items():
            size = binding.layout.group(group).paging.block_size
            if size not in entries:
                entries[size] = written_entries(binding.layout, group, start, stop)
            mine = binding.tables[group][entries[size]]
            if len(shared := mine[count[mine] > 1]):
                raise KvflowError(
                    f"request {request_id!r} writes block {int(shared[0])} of group {group!r}, "
                    f"which another request holds too: copy it first (plan_copies)"
                )
