"""DecodeEngine turned by hand: transfers that are held, late, refused or aborted, and the batch.

The test writes and reads its mailbox; prefilled KV comes from real ranks, pulls go through real
endpoints, and a gate holds a pull at any of its moves.
"""

import threading
import time

import pytest
from attrs import define, evolve, field
from engine_world import greedy, one_rank_tokens, reference_model, request
from msgspec.structs import replace
from rank_group import SENTINEL, TOKENS, Group, blocks_for, item

from kvflow.comm.local import LocalComm
from kvflow.engine.decode import DecodeEngine
from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.messages import (
    Abort,
    Admit,
    Connect,
    Gauges,
    Generated,
    Ready,
    RequestFailed,
    RunStep,
    Shutdown,
    Source,
    TransferEnded,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from kvflow.engine.runner import StepRunner
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.wire import layout_to_wire
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.planner import plan_transfer

NUM_MOVES = 20  # 10 components from 2 ranks
BLOCK = 4


@define(eq=False)
class Gate:
    """Holds every pull before its move number `hold_at` until it is opened."""

    hold_at: int
    reached: threading.Event = field(factory=threading.Event)
    open: threading.Event = field(factory=threading.Event)

    def __call__(self, num_done):
        if num_done == self.hold_at:
            self.reached.set()
            assert self.open.wait(20)


class Script:
    """A `Mailbox` whose front is the test. It never blocks for long: the test turns the engine."""

    def __init__(self):
        self.inbox, self.sent = [], []

    def receive(self, timeout):
        messages, self.inbox = self.inbox, []
        if not messages:
            time.sleep(0.002)
        return [decode_to_rank(encode(m)) for m in messages]

    def send(self, message):
        self.sent.append(decode_from_rank(encode(message)))


class World:
    """Two prefill ranks (DCP 2) with prefilled requests, and a decode rank of 8 blocks."""

    def __init__(self, gate=None, timeout=20.0, num_blocks=8, **changes):
        self.group = Group(2, 2, num_blocks=32, kv_dtype="float64")
        self.fabric, self.gate = LocalFabric(), gate
        self.sources = [LocalEndpoint(cache, self.fabric) for cache in self.group.caches]
        model = reference_model("float64", "float64")
        layout = KVLayout.uniform(model.spec, Placement.simple(Replicated()), Paged(BLOCK))
        self.cache = RankCache.allocate(layout, 0, {"kv": num_blocks}, fill=SENTINEL)
        self.box, self.next_block, self.requests = Script(), 0, {}
        worker = DecodeWorker(
            StepRunner.over(model, layout, self.cache, LocalComm()),
            {"kv": num_blocks},
            LocalEndpoint(self.cache, self.fabric, gate),
            transfer_timeout=timeout,
            verify_transfers=True,
        )
        self.engine = DecodeEngine(worker, self.box, frozenset(), **changes)
        self.bounds = []

    @property
    def pool(self):
        return self.engine.pools["kv"]

    def connect(self, layout=None):
        exports = {r: e.export() for r, e in enumerate(self.sources)}
        wire = layout_to_wire(layout or self.group.layout)
        self.tell(Connect("prefill-0", wire, self.group.num_blocks, exports))

    def tell(self, *messages):
        self.box.inbox += messages

    def prefill(self, name, length, max_tokens, offset=0):
        """Computes a prompt on the prefill ranks; the `Admit` that hands it over."""
        table = blocks_for(self.group, length, self.next_block)
        self.next_block += len(table)
        tokens = TOKENS[offset:] + TOKENS
        one = item(name, 0, length, table, tokens=tokens)
        first = self.group.run([[one]])[1][name]
        self.requests[name] = request(name, tokens[:length], greedy(max_tokens))
        plan = plan_transfer(self.group.layout, self.engine.worker.layout, (0, length))
        source = Source("prefill-0", {"kv": table}, 0, length, plan.digest)
        return Admit(name, tokens[:length], first, greedy(max_tokens), source, length)

    def turn(self, until, seconds=20.0):
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.box.sent
            self.engine.turn()
            self.pool.audit()

    def turns(self, n=10):
        for _ in range(n):
            self.engine.turn()
            self.pool.audit()

    def sent(self, kind, name):
        return [m for m in self.box.sent if isinstance(m, kind) and m.request_id == name]

    def finished(self, name):
        return any(m.finish_reason for m in self.sent(Generated, name))

    def assert_right(self, name):
        """The request's tokens are those of one rank alone."""
        alone = one_rank_tokens(self.requests[name], "float64")
        assert [m.sampled.token for m in self.sent(Generated, name)] == alone[1:]

    def assert_idle(self):
        self.turn(lambda: self.pool.num_free == self.pool.num_blocks)
        gauges = [m for m in self.box.sent if isinstance(m, Gauges)][-1].values
        assert gauges["free_blocks.kv"] == self.pool.num_blocks


@pytest.fixture
def make():
    worlds = []

    def build(*args, **kwargs):
        worlds.append(World(*args, **kwargs))
        return worlds[-1]

    yield build
    for world in worlds:
        if world.gate is not None:
            world.gate.open.set()
        world.engine.worker.close()


def test_requests_are_taken_over_and_finish(make):
    """Two requests in one batch, with one transfer each; the sources are told once."""
    world = make()
    world.connect()
    world.tell(world.prefill("a", 7, 4), world.prefill("b", 9, 6, offset=5))
    world.turn(lambda: world.finished("a") and world.finished("b"))
    for name in "ab":
        world.assert_right(name)
        (ended,) = world.sent(TransferEnded, name)
        assert sorted(ended.src_ranks) == [0, 1]
        assert ended.report["verified"] is True
    world.assert_idle()


def test_requests_beyond_the_batch_or_the_pool_wait_their_turn(make):
    world = make(max_batch=1)
    world.connect()
    world.tell(world.prefill("a", 7, 4), world.prefill("b", 9, 6, offset=5))
    world.turn(lambda: world.finished("b"))
    order = [m.request_id for m in world.box.sent if isinstance(m, Generated)]
    assert order == ["a"] * 3 + ["b"] * 5
    world.assert_right("a")
    world.assert_right("b")
    world.assert_idle()


# --- blocks and late writers


def test_d01_abort_midway_keeps_the_blocks_until_the_writer_has_ended(make):
    """8 blocks. A pull into 6 of them is aborted at 40 %; a request that needs 6 waits, and its
    bytes are intact although the writer went on."""
    world = make(Gate(NUM_MOVES * 4 // 10))
    world.connect()
    world.tell(world.prefill("a", 20, 4))
    world.turn(world.gate.reached.is_set)
    assert world.pool.num_free == 2
    world.tell(Abort("a"), world.prefill("b", 20, 4, offset=5))
    world.turns()
    assert world.pool.num_free == 2
    assert world.sent(TransferEnded, "a") == []  # the source is still read
    assert world.sent(Generated, "b") == []
    world.gate.open.set()
    world.turn(lambda: world.finished("b"))
    assert len(world.sent(TransferEnded, "a")) == 1
    assert world.sent(Generated, "a") == []
    world.assert_right("b")
    world.assert_idle()


def test_d01_late_writes_of_a_failed_pull_meet_quarantined_blocks(make):
    """The pull misses its deadline, its writer goes on; the pool could not hold its request beside
    these blocks. A small request gets other blocks and its bytes stay; a large one waits for the
    quarantine to end."""
    world = make(Gate(NUM_MOVES * 4 // 10), timeout=0.2)
    world.connect()
    world.tell(world.prefill("a", 20, 4))
    world.turn(lambda: world.sent(RequestFailed, "a"))
    assert world.pool.count("quarantined") == 6
    assert world.sent(TransferEnded, "a") == []
    world.gate.hold_at = -1  # later pulls pass
    small, large = world.prefill("b", 4, 4, offset=5), world.prefill("c", 16, 3, offset=9)
    world.tell(small, large)
    world.turn(lambda: world.finished("b"))
    world.assert_right("b")
    world.turns()
    assert world.sent(Generated, "c") == []
    assert not world.engine.worker.endpoint.quiesced()
    assert world.engine._patience() is not None  # nobody says when the blocks are back
    world.gate.open.set()
    world.turn(lambda: world.finished("c"))
    world.assert_right("c")
    (ended,) = world.sent(TransferEnded, "a")
    assert (sorted(ended.src_ranks), ended.report) == ([0, 1], None)
    world.assert_idle()
    assert world.engine.counters["transfer_failures"] == 1


def test_d03_no_cancel_is_asked_for():
    """The protocol of endpoints has no cancel: safety rests on waiting alone."""
    from kvflow.transfers.executors.base import Endpoint

    calls = {name for name in vars(Endpoint) if not name.startswith("_")}
    assert calls == {"name", "export", "connect", "pull", "quiesced", "close"}


@pytest.mark.parametrize("phase", ["waiting", "transferring", "decoding"])
def test_d14_an_abort_gives_the_blocks_back(make, phase):
    world = make(Gate(3 if phase == "transferring" else -1))
    world.connect()
    ahead = world.prefill("ahead", 20, 12)  # takes all blocks
    admit = world.prefill("a", 16, 12, offset=5)
    if phase == "waiting":
        world.tell(ahead, admit)
        world.turn(lambda: world.sent(Generated, "ahead"))
    elif phase == "transferring":
        world.tell(admit)
        world.turn(world.gate.reached.is_set)
    else:
        world.tell(admit)
        world.turn(lambda: len(world.sent(Generated, "a")) == 3)
    world.tell(Abort("a"), Abort("a"), Abort("ahead"))
    world.turns(3)
    if world.gate is not None:
        world.gate.open.set()
    world.assert_idle()
    ended = world.sent(TransferEnded, "a")
    assert [sorted(e.src_ranks) for e in ended] == [[0, 1]]  # told once, whatever the phase
    told = len(world.sent(Generated, "a"))
    world.turns(3)
    assert len(world.sent(Generated, "a")) == told


# --- ends, in any order


@pytest.mark.parametrize("order", ["finish-abort", "abort-finish", "abort-abort", "unknown"])
def test_d08_events_after_the_end_change_nothing(make, order):
    world = make(Gate(3))
    world.connect()
    world.tell(world.prefill("a", 7, 3))
    world.turn(world.gate.reached.is_set)
    if order == "unknown":
        world.tell(Abort("nobody"))
    if order.startswith("abort"):
        world.tell(Abort("a"), *([Abort("a")] if order == "abort-abort" else []))
        world.turns(2)
    world.gate.open.set()
    if order in ("finish-abort", "unknown"):
        world.turn(lambda: world.finished("a"))
        world.tell(Abort("a"), Abort("a"))
    world.turns(5)
    world.assert_idle()
    assert len(world.sent(TransferEnded, "a")) == 1
    assert len(world.sent(Generated, "a")) == (0 if order.startswith("abort") else 2)
    world.tell(world.prefill("b", 7, 3, offset=3))  # the engine goes on
    world.turn(lambda: world.finished("b"))
    world.assert_right("b")


# --- what is refused


def _tampered(admit, kind):
    source = admit.source
    table = source.tables["kv"]
    changed = {
        "digest": {"digest": "0" * len(source.digest)},
        "block out of range": {"tables": {"kv": [99, *table[1:]]}},
        "block twice": {"tables": {"kv": [table[0]] * len(table)}},
        "block negative": {"tables": {"kv": [-1, *table[1:]]}},
        "table too short": {"tables": {"kv": table[:-1]}},
        "table empty": {"tables": {"kv": []}},
        "group unknown": {"tables": {"other": table}},
        "stop too short": {"stop": source.stop - 1},
    }[kind]
    return replace(admit, source=replace(source, **changed))


@pytest.mark.parametrize(
    "kind",
    [
        "digest",
        "block out of range",
        "block twice",
        "block negative",
        "table too short",
        "table empty",
        "group unknown",
        "stop too short",
    ],
)
def test_d06_a_reference_that_cannot_be_true_fails_the_request_and_nothing_else(make, kind):
    world = make()
    world.connect()
    world.tell(_tampered(world.prefill("a", 17, 3), kind))
    world.turn(lambda: world.sent(RequestFailed, "a"))
    world.assert_idle()
    assert world.sent(Generated, "a") == []
    world.turn(lambda: len(world.sent(TransferEnded, "a")) == 1)
    counters = world.engine.counters
    assert counters["refused"] + counters["transfer_failures"] == 1
    assert counters["transfer_nbytes"] == 0
    world.tell(world.prefill("b", 7, 3, offset=3))
    world.turn(lambda: world.finished("b"))
    world.assert_right("b")


def test_a_request_of_an_engine_that_is_not_connected_fails(make):
    world = make()
    world.tell(world.prefill("a", 7, 3))
    world.turn(lambda: world.sent(RequestFailed, "a"))
    assert "not connected" in world.sent(RequestFailed, "a")[0].error


def test_other_weights_are_refused_by_name(make):
    world = make()
    layout = world.group.layout
    content = tuple((k, "other" if k == "weights" else v) for k, v in layout.spec.content)
    world.connect(evolve(layout, spec=evolve(layout.spec, content=content)))
    world.tell(world.prefill("a", 7, 3))
    world.turn(lambda: world.sent(RequestFailed, "a"))
    assert "weights" in world.sent(RequestFailed, "a")[0].error
    assert world.engine.counters["transfers"] == 0


def test_a_request_that_can_never_fit_fails_with_both_numbers(make):
    world = make()
    world.connect()
    world.tell(world.prefill("a", 30, 5))
    world.turn(lambda: world.sent(RequestFailed, "a"))
    assert "34 tokens need 9 blocks, the decode pool 'kv' has 8" in (
        world.sent(RequestFailed, "a")[0].error
    )


def test_what_a_source_that_is_gone_has_not_given_is_computed_here(make):
    world = make(num_blocks=12)
    world.connect()
    admit = world.prefill("a", 7, 3)
    world.turns(1)
    world.sources[1].close()
    world.tell(admit)
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    world.assert_idle()
    (ended,) = world.sent(TransferEnded, "a")
    assert (sorted(ended.src_ranks), ended.report) == ([0, 1], None)
    assert "closed" in ended.error
    counters = world.engine.counters
    assert (counters["transfer_failures"], counters["recomputed_prompts"]) == (1, 1)
    assert counters["recomputed_tokens"] == 7


def test_a_step_from_outside_ends_the_rank(make):
    world = make()
    world.tell(RunStep(1, []))
    with pytest.raises(KvflowError, match="forms its own steps"):
        world.engine.turn()


def test_a_rank_says_that_it_is_ready_and_ends_when_told(make):
    world = make()
    world.tell(Shutdown())
    world.engine.serve()
    assert isinstance(world.box.sent[0], Ready)
