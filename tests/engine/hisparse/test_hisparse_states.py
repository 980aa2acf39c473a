"""Tail pages and hot rows as state machines, against a model that keeps whole rows by position."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.engine.hisparse.hot import HotRows
from kvflow.engine.hisparse.request import GroupRows
from kvflow.engine.hisparse.tail import CLEAN, DIRTY, UNPINNED, TailPage, TailPages
from kvflow.errors import CapacityError, KvflowError

BLOCK, NUM_PAGES = 3, 2


class Tails(RuleBasedStateMachine):
    """One request. The model: what every row should hold, what the host holds, what each slot of
    the device holds. A row is written with a new number each time."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = TailPages(range(4, 4 + NUM_PAGES), BLOCK)
        self.rows: list[int] = []
        self.host: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.written, self.committed = 0, 0

    def _copy(self, rows, slots, *, to_host: bool) -> None:
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            assert 4 * BLOCK <= slot < (4 + NUM_PAGES) * BLOCK
            if to_host:
                self.host[row] = self.slots[slot]
            else:
                self.slots[slot] = self.host[row]

    @rule(kept=st.integers(0, 99), count=st.integers(0, 10))
    def step(self, kept: int, count: int) -> None:
        """Some of the last step's rows are kept, the rest are written again."""
        cached = min(self.committed + kept, len(self.rows))
        total = cached + count
        moves = self.tail.advance(cached, total)
        self._copy(*moves.mirror, to_host=True)
        self._copy(*moves.load, to_host=False)
        del self.rows[cached:]
        for row in range(cached, total):
            self.written += 1
            self.rows.append(self.written)
            if row >= self.tail.first_row:
                (slot,) = self.tail.slots(np.array([row])).tolist()
                self.slots[slot] = self.written
            else:
                self.host[row] = self.written
        self.committed = cached

    @rule()
    def flush(self) -> None:
        self._copy(*self.tail.flush(), to_host=True)
        assert self.tail.count(DIRTY) == 0
        assert [self.host[row] for row in range(len(self.rows))] == self.rows

    @precondition(lambda self: self.rows)
    @rule()
    def leave(self) -> None:
        """The request goes and comes back with what the host has."""
        self.flush()
        self.tail.discard()
        assert self.tail.count(UNPINNED) == NUM_PAGES

    @invariant()
    def every_row_is_somewhere(self) -> None:
        """Rows below the tail are on the host; those from there on in slots of their own. What is
        clean is on the host as well."""
        first = self.tail.first_row
        below = range(min(first, len(self.rows)))
        assert [self.host[row] for row in below] == [self.rows[row] for row in below]
        if self.tail.count(UNPINNED) == NUM_PAGES:
            return
        tail = np.arange(first, len(self.rows))
        slots = self.tail.slots(tail).tolist()
        assert len(set(slots)) == len(slots)
        assert [self.slots[slot] for slot in slots] == self.rows[first:]
        for page in self.tail.pages:
            if page.state is CLEAN:
                held = range(page.start, page.stop)
                assert [self.host[row] for row in held] == [self.rows[row] for row in held]


Tails.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestTails = Tails.TestCase


class Hots(RuleBasedStateMachine):
    """Hot rows against an ordered list of what was asked for when."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity, self.now = 5, 0
        self.hot = HotRows(100, self.capacity)
        self.used: dict[int, int] = {}
        self.slot: dict[int, int] = {}

    @rule(rows=st.lists(st.integers(0, 12), max_size=5, unique=True))
    def ask(self, rows: list[int]) -> None:
        self.now += 1
        placed = self.hot.resolve(np.array(rows, np.int64))
        assert placed.missing.tolist() == [row not in self.slot for row in rows]
        new = [row for row in rows if row not in self.slot]
        old = sorted((n, row) for row, n in self.used.items() if row not in rows)
        for _, row in old[: max(0, len(self.used) + len(new) - self.capacity)]:
            del self.used[row], self.slot[row]
        for row, slot in zip(rows, placed.slots.tolist(), strict=True):
            assert self.slot.setdefault(row, slot) == slot
            self.used[row] = self.now
        assert all(100 <= slot < 100 + self.capacity for slot in self.slot.values())
        assert len(set(self.slot.values())) == len(self.slot) == len(self.hot)

    @rule(first=st.integers(-2, 13))
    def forget(self, first: int) -> None:
        self.hot.forget(first)
        for row in [row for row in self.slot if row >= first]:
            del self.used[row], self.slot[row]
        assert len(self.hot) == len(self.slot)

    @rule()
    def ask_for_too_much(self) -> None:
        with pytest.raises(CapacityError, match="6 rows are wanted together, there are 5 hot rows"):
            self.hot.resolve(np.arange(6))
        assert len(self.hot) == len(self.slot)


Hots.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestHots = Hots.TestCase


def page_in(state):
    page = TailPage(7, 4)
    if state is not UNPINNED:
        page.pin(3, 13)
    if state is DIRTY:
        page.write(13, 14)
    assert page.state is state
    return page


@pytest.mark.parametrize(
    ("state", "transition", "message"),
    [
        (UNPINNED, lambda p: p.write(0, 1), r"page 7 \(entry -1\) is unpinned: write needs"),
        (UNPINNED, lambda p: p.mirror(), r"is unpinned: mirror needs \['dirty'\]"),
        (UNPINNED, lambda p: p.unpin(), r"is unpinned: unpin needs \['clean'\]"),
        (UNPINNED, lambda p: p.discard(), r"is unpinned: discard needs \['clean', 'dirty'\]"),
        (CLEAN, lambda p: p.pin(3, 13), r"\(entry 3\) is clean: pin needs \['unpinned'\]"),
        (CLEAN, lambda p: p.mirror(), r"is clean: mirror needs \['dirty'\]"),
        (DIRTY, lambda p: p.pin(4, 16), r"is dirty: pin needs \['unpinned'\]"),
        (DIRTY, lambda p: p.unpin(), r"is dirty: unpin needs \['clean'\]"),
        (CLEAN, lambda p: p.write(14, 15), r"rows \[14, 15\) do not follow the rows \[12, 13\)"),
        (CLEAN, lambda p: p.write(13, 17), r"rows \[13, 17\) .* of tail page 7, which ends at 16"),
        (DIRTY, lambda p: p.write(14, 14), r"rows \[14, 14\) do not follow"),
    ],
)
def test_illegal_transitions_are_refused(state, transition, message) -> None:
    page = page_in(state)
    before = (page.state, page.entry, page.start, page.clean, page.stop)
    with pytest.raises(KvflowError, match=message):
        transition(page)
    if state is not UNPINNED:
        assert (page.state, page.entry, page.start, page.clean, page.stop) == before


def test_rows_that_were_never_written_are_not_taken_for_cached() -> None:
    tail = TailPages([0, 1], 4)
    tail.advance(0, 2)
    with pytest.raises(KvflowError, match=r"rows \[2, 3\) are said to be cached, but were never"):
        tail.advance(3, 4)


def test_a_clean_page_that_is_written_again_is_dirty_again() -> None:
    page = page_in(DIRTY)
    assert page.mirror() == (13, 14)
    page.rewind(13)
    page.write(13, 15)
    assert page.state is DIRTY
    assert page.mirror() == (13, 15)


def test_what_is_rejected_whole_needs_no_mirror() -> None:
    page = page_in(DIRTY)
    page.rewind(13)
    assert page.state is CLEAN
    page.unpin()


def test_rows_of_tail_pages_take_no_hot_rows() -> None:
    """The tail moves back, as drafts that were rejected leave it: its rows are hot no more."""
    rows = GroupRows(TailPages([0, 1], 2), HotRows(4, 6))
    rows.advance(0, 9)
    assert rows.tail.first_row == 6
    _, missing = rows.resolve(np.arange(9))
    assert missing.tolist() == [True] * 6 + [False] * 3
    rows.advance(3, 4)
    assert len(rows.hot) == 0
