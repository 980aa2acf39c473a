"""Rows that do not come: a decode engine goes on without a lender, and without the engine that
computed the prompt; what may still be written stays apart until nothing can arrive."""

import asyncio
import contextlib
import random

import pytest
from engine_world import (
    assert_idle,
    greedy,
    one_rank_tokens,
    request,
    serve_all,
    until,
    world,
)
from msgspec.structs import replace
from test_decode import Gate
from test_reuse_between import IDS, launch, nbytes, right
from test_streaming import Streamed

from kvflow.engine.decode.requests import Phase
from kvflow.engine.messages import (
    Abort,
    AskLoan,
    AskPush,
    Connect,
    Generated,
    Loaned,
    Pushed,
    Readable,
    RequestFailed,
    Source,
    TransferEnded,
)
from kvflow.errors import TransferError
from kvflow.layouts.wire import layout_to_wire
from kvflow.router.config import Load
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint
from kvflow.transfers.executors.nixl import NixlEndpoint, settle_environment
from kvflow.transfers.planner import plan_transfer


class Failing(Streamed):
    """A pull is held before its move number 3 until `let_go`, and fails meanwhile."""

    def __init__(self, **changes):
        super().__init__(Gate(-1), timeout=0.2, **changes)

    def fail(self, name, *messages):
        """Waits until a part of the request has failed; later ones pass."""
        before = self.engine.counters["transfer_failures"]
        self.gate.hold_at = 3
        self.tell(*messages)
        self.turn(lambda: self.engine.counters["transfer_failures"] > before)
        self.gate.hold_at = -1
        assert not self.engine.worker.endpoint.quiesced()
        return self.pool.count("quarantined")

    def let_go(self):
        """What was held writes its rows now."""
        self.gate.open.set()
        self.turn(lambda: not self.pool.count("quarantined"))

    def ends(self, name):
        return [(m.engine, sorted(m.src_ranks), m.error) for m in self.sent(TransferEnded, name)]


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:

        def build(**changes):
            world = Failing(**changes)
            stack.callback(world.engine.worker.close)
            stack.callback(world.gate.open.set)
            return world

        yield build


# --- from the engine that computed the prompt


@pytest.mark.parametrize("arrived", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_d01_rows_that_do_not_come_are_computed_in_other_blocks(make, arrived):
    """All is computed when the last part fails; whole blocks that had come are not anew. Its late
    writes meet nobody: not the request itself, nor one that comes meanwhile."""
    world = make()
    first = world.admit("a", 32)
    for stop in range(8, arrived + 1, 8):
        world.stream("a", stop)
    held = world.fail("a", Readable("a", 32, first))
    assert held >= 8
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    world.whole("b", 20, world.admit("b", 20, offset=5))
    world.assert_right("b")
    assert world.pool.count("quarantined") == held
    assert world.sent(TransferEnded, "a") == []
    world.let_go()
    ((engine, ranks, error),) = world.ends("a")
    assert (engine, ranks) == ("prefill-0", [0, 1])
    assert "transfer failed" in error
    assert world.sent(RequestFailed, "a") == []
    world.settle()
    counters = world.engine.counters
    assert (counters["transfer_failures"], counters["recomputed_prompts"]) == (1, 1)
    assert counters["recomputed_tokens"] == 32 - arrived
    assert (counters["preemptions"], counters["failed_loans"]) == (0, 0)
    world.whole("c", 32, world.admit("c", 32))  # what was computed here is known
    world.assert_right("c")


def test_who_lacks_the_first_token_waits_for_it_and_keeps_its_source(make):
    """A prefill engine whose reader goes computes no further. Of what came before nothing is known:
    a prompt without a first token may be worth nothing."""
    world = make()
    first = world.admit("a", 32)
    world.stream("a", 8)
    world.fail("a", Readable("a", 16))
    world.tell(Readable("a", 24))
    world.gate.open.set()
    world.turn(world.engine.worker.endpoint.quiesced)
    world.turns()
    assert world.work("a").phase is Phase.PULLING
    assert (world.sent(TransferEnded, "a"), world.sent(RequestFailed, "a")) == ([], [])
    world.tell(Readable("a", 32, first))
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    assert [end[:2] for end in world.ends("a")] == [("prefill-0", [0, 1])]
    assert world.engine.counters["recomputed_tokens"] == 32
    world.settle()


@pytest.mark.parametrize("when", ["part under way", "no first token", "running"])
@pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_d14_an_abort_behind_a_failure_gives_everything_back(make, when, late):
    """`late`: before nothing of the failed part can arrive any more."""
    world = make()
    first = world.admit("a", 32, 8)
    world.stream("a", 8)
    if when == "part under way":
        world.gate.hold_at = 3
        world.tell(Readable("a", 16))
        world.turn(world.gate.reached.is_set)
        world.tell(Abort("a"))
        world.turn(lambda: world.engine.counters["transfer_failures"])
        world.gate.hold_at = -1
        assert world.engine.counters["recomputed_prompts"] == 0
    else:
        world.fail("a", Readable("a", 16))
        if when == "running":
            world.tell(Readable("a", 32, first))
            world.turn(lambda: world.sent(Generated, "a"))
    if not late:
        world.gate.open.set()
        world.turn(world.engine.worker.endpoint.quiesced)
        world.turns(2)
    world.tell(Abort("a"))
    world.turn(lambda: world.work("a") is None)
    assert bool(world.sent(TransferEnded, "a")) == (not late)
    world.let_go()
    assert [end[:2] for end in world.ends("a")] == [("prefill-0", [0, 1])]
    assert world.sent(RequestFailed, "a") == []
    assert not world.finished("a")
    world.settle()
    world.whole("b", 32, world.admit("b", 32))
    world.assert_right("b")


@pytest.mark.parametrize("num_blocks", [17, 16])
def test_a_request_waits_for_room_but_not_for_what_is_in_quarantine(make, num_blocks):
    """8 blocks are in quarantine, another has 5, it needs 9. Where these could never be had it is
    given up."""
    world = make(num_blocks=num_blocks)
    other = world.admit("b", 16, 5, offset=5)
    first = world.admit("a", 32)
    world.stream("b", 8)
    assert world.fail("a", Readable("a", 32, first)) == 8
    world.turns(5)
    fits = num_blocks == 17
    if fits:
        assert world.work("a").phase is Phase.PREEMPTED
    world.tell(Readable("b", 16, other))
    world.turn(lambda: world.finished("b") and world.ended("a"))
    world.assert_right("b")
    assert world.sent(TransferEnded, "a") == []
    if fits:
        world.assert_right("a")
    else:
        (failed,) = world.sent(RequestFailed, "a")
        assert "KV transfer failed: 20 moves did not end" in failed.error
    world.let_go()
    assert [end[:2] for end in world.ends("a")] == [("prefill-0", [0, 1])]
    assert world.engine.counters["recomputed_prompts"] == fits
    world.settle()


# --- from a lender


class Borrowing(Failing):
    """A sibling lends rows, which are worth nothing: nobody may go by them."""

    def __init__(self, **changes):
        super().__init__(**changes)
        layout = self.engine.worker.layout
        self.lender = LocalEndpoint(RankCache.allocate(layout, 0, {"kv": 8}), self.fabric)
        exports = {0: self.lender.export()}
        self.tell(Connect("decode-1", layout_to_wire(layout), {"kv": 8}, exports))

    def borrow(self, name, length, lent):
        """The request has the loan, and everything can be read; returns how to lend it."""
        admit = self.prefill(name, length, 4)
        self.tell(replace(admit, lender="decode-1", lender_tokens=lent))
        self.turn(lambda: self.sent(AskLoan, name))
        plan = plan_transfer(*[self.engine.worker.layout] * 2, (0, lent))
        return Loaned(name, Source("decode-1", {"kv": [1, 2, 3, 4]}, 0, lent, plan.digest))


@pytest.fixture
def borrowing():
    with contextlib.ExitStack() as stack:

        def build(**changes):
            world = Borrowing(**changes)
            stack.callback(world.engine.worker.close)
            stack.callback(world.gate.open.set)
            return world

        yield build


@pytest.mark.parametrize("known", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_d01_what_a_lender_cannot_give_comes_from_the_prompts_engine(borrowing, known):
    world = borrowing()
    if known:
        world.whole("before", known, world.admit("before", known))
    before = world.engine.counters["transfer_nbytes"]
    held = world.fail("a", world.borrow("a", 20, 16))
    assert held == 6
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    shared = known // 4 * 4
    assert world.ends("a") == [("prefill-0", [0, 1], None)]
    assert world.pool.count("quarantined") == held
    counters = world.engine.counters
    assert counters["transfer_nbytes"] - before == world.expected_nbytes(shared, 20)
    assert (counters["failed_loans"], counters["recomputed_prompts"]) == (1, 0)
    assert counters["reused_tokens"] == shared
    world.let_go()
    ((engine, ranks, error),) = world.ends("a")[1:]
    assert (engine, ranks) == ("decode-1", [0])
    assert "did not end" in error
    assert len(world.sent(AskLoan, "a")) == 1
    world.settle()


def test_neither_the_lender_nor_the_prompts_engine_can_give_the_rows(borrowing):
    world = borrowing()
    loan = world.borrow("a", 20, 16)
    world.lender.close()
    for source in world.sources:
        source.close()
    world.tell(loan)
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    assert [end[:2] for end in world.ends("a")] == [("decode-1", [0]), ("prefill-0", [0, 1])]
    counters = world.engine.counters
    assert (counters["failed_loans"], counters["recomputed_prompts"]) == (1, 1)
    assert (counters["transfer_failures"], counters["transfers"]) == (2, 0)
    world.settle()


def test_only_the_prompts_engine_is_kept_until_the_first_token(borrowing):
    """Neither source can be read; the lender is told as soon as nothing can arrive any more."""
    world = borrowing()
    loan = world.borrow("a", 20, 16)
    first = world.work("a").tokens.pop()
    for source in world.sources:
        source.close()
    world.fail("a", loan)
    world.turn(lambda: world.engine.counters["transfer_failures"] == 2)
    world.let_go()
    assert [end[:2] for end in world.ends("a")] == [("decode-1", [0])]
    world.tell(Readable("a", 20, first))
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    assert [end[0] for end in world.ends("a")] == ["decode-1", "prefill-0"]
    world.settle()


@pytest.mark.parametrize("num_blocks", [13, 24])
def test_an_abort_that_comes_with_a_failed_push_ends_the_request_once(borrowing, num_blocks):
    """With 13 blocks there would be no room for it beside what is in quarantine."""
    world = borrowing(push=True, num_blocks=num_blocks)
    assert world.fail("b", world.borrow("b", 20, 16)) == 6
    world.tell(Abort("b"))
    world.turn(lambda: world.work("b") is None)
    first = world.admit("a", 20, 12)
    world.tell(Readable("a", 20, first))
    world.turn(lambda: world.sent(AskPush, "a"))
    world.tell(Pushed("a", None, "boom"), Abort("a"))
    world.turn(lambda: world.work("a") is None)
    world.turns(3)
    assert world.sent(RequestFailed, "a") == []
    assert world.engine.counters["recomputed_prompts"] == 0
    world.let_go()
    world.settle()


def test_an_abort_behind_a_failed_loan_ends_both_sources(borrowing):
    world = borrowing(num_blocks=20)
    other = world.admit("b", 48, 4, offset=3)
    world.stream("b", 8)
    world.fail("a", world.borrow("a", 20, 16))
    world.turns(3)
    assert world.work("a").phase is Phase.WAITING  # there is no room yet
    world.tell(Abort("a"))
    world.turn(lambda: world.work("a") is None)
    assert world.ends("a") == [("prefill-0", [0, 1], None)]
    world.let_go()
    assert world.ends("a")[1][:2] == ("decode-1", [0])
    world.tell(Readable("b", 48, other))
    world.turn(lambda: world.finished("b"))
    world.assert_right("b")
    world.settle()


# --- whole deployments


class Unsteady(LocalEndpoint):
    """Transfers of which some stop at one of their moves, as `plan` says."""

    plan = None

    def _transfer(self, bound, rank, peers, timeout, verify, *, pull):
        at = self.plan(bound)

        def gate(num_done):
            if num_done == at:
                raise TransferError("the cable is out")

        self.gate = gate
        return super()._transfer(bound, rank, peers, timeout, verify, pull=pull)


def unsteady(plan):
    return type("Planned", (Unsteady,), {"plan": staticmethod(plan)})


SHAPES = {
    "alone": {},
    "group": {"decode_dcp": 2, "num_drafts": 2},
    "tp": {"decode_tp": 2},
    "hisparse": {"hisparse": True, "num_drafts": 2},
    "two": {"decode_ranks": 2, "prefill_engines": 2},
}


def requests(turn):
    lengths = (24, 33, 9, 41)
    return [request(f"{turn}.{i}", IDS[i : i + n], greedy(6)) for i, n in enumerate(lengths)]


class Hasty(NixlEndpoint):
    """Some transfers have no time: their deadline has passed when they have begun, and what the
    transport was given arrives late."""

    dice = random.Random(7)

    def _transfer(self, stage, bound, rank, peers, timeout, verify, strategy):
        late = self.dice.random() < 0.5
        timeout = self.dice.choice([0.0003, 0.001, 0.002]) if late else timeout
        return super()._transfer(stage, bound, rank, peers, timeout, verify, strategy)


def hasty(cache, fabric):
    return Hasty(cache, bytes(range(32)), staging_nbytes=1 << 16)


def all_back(deployment):
    """Whether no decode engine holds blocks, of any group, nor a loan runs."""
    held = ("used_blocks.", "pinned_blocks.", "quarantined_blocks.")
    gauges = (g for d in deployment.decode_ranks for g in deployment.gauges[d].items())
    blocks = sum(value for name, value in gauges if name.startswith(held))
    return not blocks and not deployment.journeys.lenders.num_running


CASES = [("group", "pull", 1)]
CASES += [
    pytest.param(shape, way, 3, marks=pytest.mark.slow)
    for shape in SHAPES
    for way in ("pull", "push")
]


@pytest.mark.parametrize(("shape", "transfer", "turns"), CASES)
def test_tokens_stay_right_whatever_fails(shape, transfer, turns):
    """Four in ten of all transfers, loans among them, stop somewhere."""
    dice = random.Random(5)

    def plan(bound):
        return dice.randrange(12) if dice.random() < 0.4 else -1

    play(shape, transfer, turns, unsteady(plan))


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize("shape", ["alone", "hisparse"])
def test_tokens_stay_right_whatever_comes_late_over_nixl(shape, transfer):
    settle_environment()
    play(shape, transfer, 3, hasty)


def play(shape, transfer, turns, endpoint):
    start = launch(pcp=2, dcp=2, max_num_batched_tokens=16, transfer=transfer, **SHAPES[shape])

    async def run():
        async with world(start, endpoint=endpoint) as deployment:
            for turn in range(turns):
                batch = requests(turn)
                tokens = await asyncio.wait_for(serve_all(deployment, batch), 100)
                assert tokens == {r.request_id: one_rank_tokens(r, "float64") for r in batch}
            assert await deployment.healthy()
            await until(lambda: all_back(deployment))
            await assert_idle(deployment, 128 // start.decode_dcp)
            assert deployment.num_requests == {"finished": 4 * turns, "aborted": 0, "failed": 0}
            return [deployment.counters[d] for d in deployment.decode_ranks]

    counters = asyncio.run(run())
    assert sum(c["recomputed_prompts"] for c in counters) > 0


def test_a_sibling_that_cannot_lend_costs_a_pull_from_the_prefill_engine():
    def plan(bound):
        return 1 if bound.src.layout == bound.dst.layout else -1

    start = launch(decode_ranks=2, pcp=2, dcp=2)

    async def run():
        async with world(start, endpoint=unsteady(plan)) as deployment:
            first = await right(deployment, request("a", IDS[:24], greedy(9)))
            await until(lambda: not deployment.journeys.live)
            (lender,) = [d for d in ("decode-0", "decode-1") if deployment.counters[d]["transfers"]]
            (other,) = {"decode-0", "decode-1"} - {lender}
            deployment.routing.router.on_load(lender, Load(1 << 41))  # no room
            turn = (*IDS[:24], *(o.token for o in first), *IDS[24:31])
            await right(deployment, request("b", turn))
            await until(lambda: not deployment.journeys.live)
            await assert_idle(deployment, 128)
            counters = deployment.counters[other]
            assert (counters["failed_loans"], counters["recomputed_prompts"]) == (1, 0)
            assert counters["transfer_nbytes"] == nbytes(deployment, 0, 40, "prefill-0", other)
            assert deployment.gauges[lender]["pinned_blocks.kv"] == 0

    asyncio.run(run())
