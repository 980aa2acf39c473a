"""DecodeEngine turned by hand: rows of a host tier come into its blocks, or prove to be none.

The test is the front: it owns the tier, in which the ranks of a DCP 2 group store, and answers what
the engine asks for.
"""

import contextlib
import threading
from unittest import mock

import pytest
from engine_world import one_rank_tokens
from msgspec.structs import replace
from test_decode import World

from kvflow.engine.decode.requests import Phase
from kvflow.engine.decode.turns import Crew
from kvflow.engine.messages import (
    Abort,
    Admit,
    AskUnits,
    AttachTier,
    Gauges,
    Generated,
    RequestFailed,
    UnitRows,
    Units,
    UnitsRead,
)
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.tiers.memory import UnitMemory, unit_nbytes
from kvflow.engine.tiers.rows import UnitPort

UNIT = 4
NUM_UNITS = 24


class Tiered(World):
    """Blocks of 4, units of 4, and a tier that the engine has mapped."""

    def __init__(self, **changes):
        super().__init__(prefix=PrefixConfig(block_size=UNIT), **changes)
        spec = self.group.layout.spec
        size = NUM_UNITS * (unit_nbytes(spec, UNIT) + 32) + 4096
        self.memory = UnitMemory.create(spec, UNIT, size)
        self.tier = AttachTier(self.memory.name, UNIT, NUM_UNITS)
        self.connect()
        self.tell(self.tier)
        self.next_unit = 0

    def stored(self, name, length, max_tokens, offset=0):
        """A prompt that the group has computed and stored in units: how it is handed over, and what
        the tier has of it."""
        admit = self.prefill(name, length, max_tokens, offset)
        count = (length - 1) // UNIT
        units = list(range(self.next_unit, self.next_unit + count))
        self.next_unit += count
        for cache in self.group.caches:
            port = UnitPort(self.group.layout, cache, self.group.num_blocks, self.memory)
            port.give(UnitRows(0, count * UNIT, units), admit.source.tables)
        chain = self.engine.kv.chain(self.requests[name].prompt, None)
        labels = [chain.label(k, chain.following(k)) for k in range(count)]
        for unit, label in zip(units, labels, strict=True):
            self.memory.set_label(unit, label)
        return admit, UnitRows(0, count * UNIT, units, labels)

    def local(self, name, length, max_tokens, offset=0):
        """As `stored`, for the engine to compute."""
        admit, rows = self.stored(name, length, max_tokens, offset)
        return Admit(name, admit.prompt, None, admit.sampling, None, length), rows

    def asked(self, name):
        return self.sent(AskUnits, name)

    def answer(self, name, rows):
        """What the front says to the last question: the rows behind what is held."""
        start = self.asked(name)[-1].start
        if rows is not None:
            first = start // UNIT
            units, labels = rows.units[first:], rows.labels[first:]
            rows = UnitRows(start, rows.stop, units, labels, start - first * UNIT)
        self.tell(Units(name, self.memory.name, rows))

    def work(self, name):
        return next(w for w in self.engine._desk._requests if w.request_id == name)

    def assert_computed_here(self, name):
        """As `assert_right`, the first token included."""
        said = [m.sampled.token for m in self.sent(Generated, name)]
        assert said == one_rank_tokens(self.requests[name], "float64")

    def settle(self):
        self.turn(lambda: self.pool.num_available == self.pool.num_blocks)
        self.engine.kv.audit()

    @property
    def counters(self):
        return self.engine.counters


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:

        def build(**changes):
            world = Tiered(**changes)
            stack.callback(world.memory.close)
            stack.callback(world.engine.worker.close)
            return world

        yield build


@contextlib.contextmanager
def held():
    """Ranks read units only once the event that this yields is set."""
    gate, take = threading.Event(), UnitPort.take_proven

    def slow(port, rows, tables):
        assert gate.wait(20)
        return take(port, rows, tables)

    with mock.patch.object(UnitPort, "take_proven", slow):
        try:
            yield gate
        finally:
            gate.set()


@pytest.mark.parametrize("length", [5, 9, 20, 21])
def test_a_prompt_is_restored_and_the_rest_computed(make, length):
    world = make()
    admit, rows = world.local("a", length, 4)
    world.tell(admit)
    world.turn(lambda: world.asked("a"))
    (ask,) = world.asked("a")
    assert (ask.tokens, ask.start, ask.salt) == (admit.prompt, 0, None)
    world.turns(3)
    assert not world.sent(Generated, "a")  # it waits for the answer
    world.answer("a", rows)
    world.turn(lambda: world.finished("a"))
    world.assert_computed_here("a")
    assert len(world.sent(UnitsRead, "a")) == 1
    whole = (length - 1) // UNIT * UNIT
    assert [m.cached_tokens for m in world.sent(Generated, "a")] == [whole, 0, 0, 0]
    assert world.counters["restored_host_tokens"] == whole
    world.settle()


def test_what_the_tier_has_not_is_computed(make):
    """It is asked once, and not at all for less than a unit."""
    world = make()
    admit, _ = world.local("a", 9, 3)
    small, _ = world.local("b", 4, 3, offset=5)
    world.tell(admit, small)
    world.turn(lambda: world.finished("b"))
    world.answer("a", None)
    world.turn(lambda: world.finished("a"))
    world.assert_computed_here("a")
    world.assert_computed_here("b")
    assert len(world.asked("a")) == 1
    assert not world.asked("b")
    assert not world.sent(UnitsRead, "a")
    assert world.counters["restored_host_tokens"] == 0
    world.settle()


@pytest.mark.parametrize("when", ["before", "while"])
def test_units_that_prove_to_hold_something_else_are_computed(make, when):
    """Their rows are spoiled, and their label says so at the end of the reading at the latest."""
    world = make()
    admit, rows = world.local("a", 14, 4)
    world.tell(admit)
    world.turn(lambda: world.asked("a"))
    with held() as gate:
        world.answer("a", rows)
        world.turn(lambda: world.engine._restoring.is_reading)
        world.memory.units[rows.units[1]] = 0x55
        world.memory.set_label(rows.units[1], None)
        gate.set()
        world.turn(lambda: world.finished("a"))
    world.assert_computed_here("a")
    assert world.sent(Generated, "a")[0].cached_tokens == 0
    assert (world.counters["refused_restores"], world.counters["restored_host_tokens"]) == (1, 0)
    assert len(world.sent(UnitsRead, "a")) == 1
    world.settle()


def test_others_go_on_while_units_are_read(make):
    world = make(num_blocks=16)
    admit, rows = world.local("a", 14, 4)
    world.tell(world.prefill("b", 9, 8, offset=5))
    with held() as gate:
        world.tell(admit)
        world.turn(lambda: world.asked("a"))
        world.answer("a", rows)
        world.turn(lambda: world.finished("b"))
        assert world.work("a").phase is Phase.RESTORING
        gauges = [m for m in world.box.sent if isinstance(m, Gauges)][-1].values
        assert gauges["restoring"] == 1
        gate.set()
        world.turn(lambda: world.finished("a"))
    world.assert_right("b")
    world.assert_computed_here("a")
    world.settle()


def test_an_older_request_waits_for_blocks_that_a_restoring_one_holds(make):
    """It does not lose its own: once the younger one runs, that gives way."""
    world = make()
    world.tell(world.prefill("b", 9, 12, offset=5))
    world.turn(lambda: world.sent(Generated, "b"))
    admit, rows = world.local("a", 20, 4)
    with held() as gate:
        world.tell(admit)
        world.turn(lambda: world.asked("a"))
        world.answer("a", rows)
        world.turn(lambda: world.pool.num_available == 0)
        world.turns(20)
        assert world.work("a").phase is Phase.RESTORING
        assert world.work("b").phase is Phase.RUNNING
        assert world.counters["preemptions"] == 0
        gate.set()
        world.turn(lambda: world.finished("b"))
    assert world.counters["preemptions"] == 1
    world.assert_right("b")
    world.turn(lambda: len(world.asked("a")) == 2)
    world.answer("a", rows)
    world.turn(lambda: world.finished("a"))
    world.assert_computed_here("a")
    world.settle()


def test_an_abort_before_the_answer_gives_the_units_back_at_once(make):
    world = make()
    admit, rows = world.local("a", 14, 4)
    world.tell(admit)
    world.turn(lambda: world.asked("a"))
    world.tell(Abort("a"))
    world.settle()
    world.answer("a", rows)
    world.turn(lambda: world.sent(UnitsRead, "a"))
    world.turns(3)
    assert not world.sent(Generated, "a")
    assert world.counters["restored_host_tokens"] == 0


def test_an_abort_while_units_are_read_keeps_blocks_and_units_until_they_are(make):
    """Another request that needs the blocks waits, and its rows are its own."""
    world = make()
    admit, rows = world.local("a", 20, 4)
    world.tell(admit)
    world.turn(lambda: world.asked("a"))
    with held() as gate:
        world.answer("a", rows)
        world.turn(lambda: world.engine._restoring.is_reading)
        other = world.prefill("b", 20, 4, offset=5)
        world.tell(Abort("a"), other)
        world.turns()
        assert not world.sent(UnitsRead, "a")
        assert world.pool.num_available == 3
        assert not world.sent(Generated, "b")
        gate.set()
        world.turn(lambda: world.finished("b"))
    assert len(world.sent(UnitsRead, "a")) == 1
    assert not world.sent(Generated, "a")
    world.assert_right("b")
    world.settle()


def test_a_preempted_request_is_restored_behind_what_is_left_of_it(make):
    """8 blocks, all of which the older one comes to need: the younger one loses its own, and finds
    its prompt in the tier."""
    world = make()
    older = world.prefill("a", 12, 20)
    younger, rows = world.stored("b", 13, 12, offset=5)
    world.tell(older, younger)
    world.turn(lambda: world.asked("b"))
    assert world.finished("a")  # there was no room before
    (ask,) = world.asked("b")
    assert ask.tokens[:14] == [*younger.prompt, younger.first_token]
    lost = world.work("b").was_computed
    world.answer("b", rows)
    world.turn(lambda: world.finished("b"))
    for name in "ab":
        world.assert_right(name)
    assert world.counters["preemptions"] == 1
    assert world.counters["restored_host_tokens"] == rows.stop - ask.start > 0
    assert world.counters["recomputed_tokens"] == lost - rows.stop
    assert world.sent(Generated, "b")[0].cached_tokens == 0
    world.settle()


@pytest.mark.parametrize("restores", [True, False])
def test_who_fails_behind_restored_rows_says_that_they_are_spoilt(make, restores):
    """A preempted request that has given tokens: without what was restored its prompt is right."""
    world = make()
    older = world.prefill("a", 12, 20)
    younger, rows = world.stored("b", 13, 12, offset=5)
    world.tell(older, younger)
    world.turn(lambda: world.asked("b"))
    turn = Crew.turn

    def spoil(crew, said):
        why = {item.request_id: "its logits are not finite" for item in said.items}
        return [replace(a, sampled={}, failed=why) if why else a for a in turn(crew, said)]

    world.memory.units.fill_(255)
    world.answer("b", rows if restores else None)
    with mock.patch.object(Crew, "turn", turn if restores else spoil):
        world.turn(lambda: world.sent(RequestFailed, "b"))
    (failure,) = world.sent(RequestFailed, "b")
    assert "not finite" in failure.error
    given = [said.sampled.token for said in world.sent(Generated, "b")]
    assert given
    tokens = [*younger.prompt, younger.first_token, *given]
    assert failure.spoilt == (tokens if restores else [])
