"""TailPages: where the newest rows of one request lie on the device, for one index group.

A page is unpinned, clean (the host has the same rows) or dirty (it has newer ones). Rows are
written to the page of their block-table entry; the last entries of a request have one each. What
leaves them is mirrored to the host before.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
from attrs import define, field, frozen

from kvflow.errors import KvflowError
from kvflow.layouts.paging import Paged, in_page, page_of, slots_of
from kvflow.layouts.sharding import Ints

NO_ENTRY = -1


class PageState(Enum):
    """unpinned -> clean <-> dirty; clean -> unpinned; dirty -> unpinned only by `discard`."""

    UNPINNED = "unpinned"
    CLEAN = "clean"
    DIRTY = "dirty"


UNPINNED, CLEAN, DIRTY = PageState
_LEGAL = {
    "pin": {UNPINNED: CLEAN},
    "write": {CLEAN: DIRTY, DIRTY: DIRTY},
    "mirror": {DIRTY: CLEAN},
    "unpin": {CLEAN: UNPINNED},
    "discard": {CLEAN: UNPINNED, DIRTY: UNPINNED},
}


@define(eq=False)
class TailPage:
    """One page. It holds the rows [start, stop) of its entry, of which those from `clean` on are
    newer than the host's. Rows are local indices of a rank. Raises `KvflowError` for a transition
    that its state does not allow."""

    page_id: int
    block_size: int
    state: PageState = field(init=False, default=UNPINNED)
    entry: int = field(init=False, default=NO_ENTRY)
    start: int = field(init=False, default=0)
    clean: int = field(init=False, default=0)
    stop: int = field(init=False, default=0)

    def _become(self, transition: str) -> None:
        after = _LEGAL[transition].get(self.state)
        if after is None:
            allowed = [state.value for state in _LEGAL[transition]]
            raise KvflowError(
                f"tail page {self.page_id} (entry {self.entry}) is {self.state.value}: "
                f"{transition} needs {allowed}"
            )
        self.state = after

    @property
    def end(self) -> int:
        """The row behind the last that fits."""
        return self.start + self.block_size

    def pin(self, entry: int, cached: int) -> tuple[int, int]:
        """For an entry of which the host holds the rows below `cached`: these are to be loaded."""
        self._become("pin")
        self.entry, self.start = entry, entry * self.block_size
        self.clean = self.stop = min(max(cached, self.start), self.end)
        return self.start, self.stop

    def rewind(self, cached: int) -> None:
        """Rows from `cached` on are written anew: what the page holds of them counts no more."""
        self.stop = min(self.stop, max(cached, self.start))
        self.clean = min(self.clean, self.stop)
        if self.state is DIRTY and self.clean == self.stop:
            self._become("mirror")

    def write(self, start: int, stop: int) -> None:
        """Rows [start, stop) are new, and follow those the page holds."""
        if start != self.stop or not self.start <= start < stop <= self.end:
            raise KvflowError(
                f"rows [{start}, {stop}) do not follow the rows [{self.start}, {self.stop}) of "
                f"tail page {self.page_id}, which ends at {self.end}"
            )
        self._become("write")
        self.stop = stop

    def mirror(self) -> tuple[int, int]:
        """The rows that the host must be given, and has then."""
        self._become("mirror")
        rows = self.clean, self.stop
        self.clean = self.stop
        return rows

    def unpin(self) -> None:
        """The host has all rows; the page is free for another entry."""
        self._become("unpin")
        self.entry = NO_ENTRY

    def discard(self) -> None:
        """Nobody will read what the page holds."""
        self._become("discard")
        self.entry = NO_ENTRY


@frozen(eq=False)
class Moves:
    """Rows that go to the host, then rows that come from it: int64 local indices and the slots of
    the device's pool in which they lie."""

    mirror: tuple[Ints, Ints]
    load: tuple[Ints, Ints]


@define(eq=False)
class TailPages:
    """The pages `page_ids` of the device's pool, in turn for consecutive entries."""

    page_ids: Sequence[int]
    block_size: int
    pages: list[TailPage] = field(init=False)
    first_entry: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.pages = [TailPage(page_id, self.block_size) for page_id in self.page_ids]

    @property
    def first_row(self) -> int:
        """Rows from here on lie in tail pages, if anywhere on the device."""
        return self.first_entry * self.block_size

    def count(self, state: PageState) -> int:
        return sum(page.state is state for page in self.pages)

    def advance(self, cached: int, total: int) -> Moves:
        """A step begins that writes the rows [cached, total): the last entries get the pages.
        Rows below `cached` that a page loses, or that fill one, go to the host."""
        mirror, load = _Rows(self), _Rows(self)
        num_entries = page_of(total + self.block_size - 1, self.block_size)
        first = max(num_entries - len(self.pages), 0)
        for page in self.pages:
            if page.state is UNPINNED:
                continue
            page.rewind(cached)
            kept = first <= page.entry < num_entries
            full = page.end <= cached
            if page.state is DIRTY and (full or not kept):
                mirror.add(page.entry, page.mirror())
            if not kept:
                page.unpin()
        mirrored = mirror.slots()
        self.first_entry = first
        for entry in range(first, num_entries):
            page = self._page(entry)
            if page.state is UNPINNED:
                load.add(entry, page.pin(entry, cached))
            elif page.stop < min(cached, page.end):
                raise KvflowError(
                    f"rows [{page.stop}, {min(cached, page.end)}) are said to be cached, but were "
                    f"never written"
                )
            if (start := max(cached, page.start)) < (stop := min(total, page.end)):
                page.write(start, stop)
        return Moves(mirrored, load.slots())

    def flush(self) -> tuple[Ints, Ints]:
        """All rows newer than the host's, which has them then."""
        mirror = _Rows(self)
        for page in self.pages:
            if page.state is DIRTY:
                mirror.add(page.entry, page.mirror())
        return mirror.slots()

    def discard(self) -> None:
        """The request has left."""
        for page in self.pages:
            if page.state is not UNPINNED:
                page.discard()

    def slots(self, rows: Ints) -> Ints:
        """Slots of the device's pool for rows from `first_row` on."""
        window = range(self.first_entry, self.first_entry + len(self.pages))
        table = [self._page(entry).page_id for entry in window]
        return slots_of(Paged(self.block_size), table, rows - self.first_row)

    def _page(self, entry: int) -> TailPage:
        return self.pages[in_page(entry, len(self.pages))]


@define(eq=False)
class _Rows:
    """Ranges of rows in pages of which the slots are known now."""

    tail: TailPages
    _rows: list[Ints] = field(init=False, factory=list)
    _slots: list[Ints] = field(init=False, factory=list)

    def add(self, entry: int, rows: tuple[int, int]) -> None:
        page, local = self.tail._page(entry), np.arange(*rows)
        table = Paged(self.tail.block_size)
        self._rows.append(local)
        self._slots.append(slots_of(table, [page.page_id], local - entry * table.block_size))

    def slots(self) -> tuple[Ints, Ints]:
        none = np.empty(0, np.int64)
        return np.concatenate([none, *self._rows]), np.concatenate([none, *self._slots])
