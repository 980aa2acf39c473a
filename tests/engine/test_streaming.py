"""DecodeEngine turned by hand: prompts whose rows come while they are computed, behind what is held
already, and prefixes that are lent."""

import contextlib

import pytest
from engine_world import one_rank_tokens
from msgspec.structs import replace
from rank_group import TOKENS
from test_decode import Gate, World

from kvflow.engine.decode.requests import Phase
from kvflow.engine.messages import (
    Abort,
    AskLoan,
    EndLoan,
    ForgetPrefixes,
    Gauges,
    Generated,
    Lend,
    Lent,
    Loaned,
    Readable,
    RequestFailed,
    Source,
    TransferEnded,
)
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.transfers.planner import plan_transfer

CHUNK = 8


class Streamed(World):
    """Blocks of 4, known in blocks of 4."""

    def __init__(self, gate=None, num_blocks=24, **changes):
        super().__init__(gate, num_blocks=num_blocks, prefix=PrefixConfig(block_size=4), **changes)
        self.connect()

    def admit(self, name, length, max_tokens=4, **changes):
        """Hands a request over of which nothing is computed yet; returns its first token."""
        admit = self.prefill(name, length, max_tokens, **changes)
        self.tell(replace(admit, first_token=None, readable=0))
        return admit.first_token

    def stream(self, name, stop, first=None):
        """More of it is computed; waits until it has come."""
        self.tell(Readable(name, stop, first))
        self.turn(lambda: self.arrived(name) >= stop or self.ended(name))

    def whole(self, name, length, first):
        """The rest of it, in chunks, to the end of the request."""
        for stop in range(CHUNK, length, CHUNK):
            self.stream(name, stop)
        self.stream(name, length, first)
        self.turn(lambda: self.finished(name))

    def work(self, name):
        return next((r for r in self.engine._desk._requests if r.request_id == name), None)

    def arrived(self, name):
        return self.work(name).incoming.arrived if self.work(name) else 0

    def ended(self, name):
        return bool(self.sent(RequestFailed, name)) or self.finished(name)

    def expected_nbytes(self, start, stop):
        return plan_transfer(self.group.layout, self.engine.worker.layout, (start, stop)).nbytes

    def settle(self):
        """Everything is back: blocks that are left hold prefixes."""
        self.turn(lambda: self.pool.num_available == self.pool.num_blocks)
        self.turns(2)
        self.engine.kv.audit()
        gauges = [m for m in self.box.sent if isinstance(m, Gauges)][-1].values
        assert gauges["free_blocks.kv"] + gauges["cached_blocks.kv"] == self.pool.num_blocks

    def lent(self, loan_id):
        return next(
            (m for m in self.box.sent if isinstance(m, Lent) and m.loan_id == loan_id), None
        )

    def lend(self, loan_id, prompt, salt=None):
        self.tell(Lend(loan_id, list(prompt), salt))
        self.turn(lambda: self.lent(loan_id))
        return self.lent(loan_id)


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:

        def build(*args, **kwargs):
            world = Streamed(*args, **kwargs)
            stack.callback(world.engine.worker.close)
            if world.gate is not None:
                stack.callback(world.gate.open.set)
            return world

        yield build


# --- C06, C07, K07


@pytest.mark.parametrize(
    ("known", "held"),
    [
        (0, 0),
        (17, 16),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(7, 4), (9, 8), (31, 28)]),
        (32, 28),
    ],
)
def test_c06_k07_only_what_is_not_held_moves_chunk_by_chunk(make, known, held):
    """A prompt of 32 behind one that shares `known` tokens. (A block is known with the token behind
    it, hence 9 and 17; of a prompt of 32 the last token is never known.)"""
    world = make()
    if known:
        world.whole("before", known, world.admit("before", known))
    first = world.admit("a", 32)
    for stop in (8, 16, 24):
        world.stream("a", stop)
        assert world.arrived("a") == max(stop, held)
        assert world.work("a").phase is Phase.PULLING
    assert world.sent(Generated, "a") == []
    world.stream("a", 32, first)
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    (ended,) = world.sent(TransferEnded, "a")
    assert (sorted(ended.src_ranks), ended.num_held, ended.error) == ([0, 1], held, None)
    assert ended.report["nbytes"] == world.expected_nbytes(held, 32)
    assert ended.report["late_nbytes"] == world.expected_nbytes(max(held, 24), 32)
    assert ended.report["verified"] is True
    counters = world.engine.counters
    assert counters["reused_tokens"] == held
    before = world.expected_nbytes(0, known) if known else 0
    assert counters["transfer_nbytes"] == before + ended.report["nbytes"]
    world.settle()


def test_requests_of_one_prompt_at_once_share_nothing_that_is_not_there(make):
    """Four of them begin before anything of the prompt has come."""
    world = make(num_blocks=40)
    firsts = {name: world.admit(name, 20, 6) for name in "abcd"}
    world.turns(2)
    for stop in (8, 16):
        for name in "dbca":
            world.stream(name, stop)
    for name in "bdac":
        world.tell(Readable(name, 20, firsts[name]))
    world.turn(lambda: all(world.finished(name) for name in firsts))
    for name in firsts:
        world.assert_right(name)
    assert world.engine.counters["reused_tokens"] == 0
    world.settle()
    world.whole("e", 20, world.admit("e", 20))  # now it is known
    world.assert_right("e")
    assert world.engine.counters["reused_tokens"] == 16


# --- ends while the prompt is computed


def test_a_prefill_that_ends_without_a_result_moves_nothing_more(make):
    """It has failed, was cancelled, or its first token ended the request: the front says Abort."""
    world = make()
    first = world.admit("a", 32)
    world.stream("a", 8)
    world.tell(Abort("a"))
    world.turns(3)
    (ended,) = world.sent(TransferEnded, "a")
    assert (sorted(ended.src_ranks), ended.report, ended.error) == ([0, 1], None, None)
    assert world.engine.counters["transfers"] == 0
    world.settle()
    world.tell(Readable("a", 32, first), Abort("a"))  # late
    world.turns(3)
    assert len(world.sent(TransferEnded, "a")) == 1
    assert world.sent(Generated, "a") == []
    world.whole("b", 20, world.admit("b", 20, offset=3))
    world.assert_right("b")
    world.settle()


def test_d01_an_abort_while_a_part_moves_waits_for_it(make):
    world = make(Gate(-1))
    world.admit("a", 32)
    world.stream("a", 8)
    world.gate.hold_at = 3
    world.tell(Readable("a", 16))
    world.turn(world.gate.reached.is_set)
    world.tell(Abort("a"), Readable("a", 24))
    world.turns()
    assert world.sent(TransferEnded, "a") == []
    assert world.pool.count("used") > 0
    world.gate.hold_at = -1
    world.gate.open.set()
    world.turn(lambda: world.sent(TransferEnded, "a"))
    (ended,) = world.sent(TransferEnded, "a")
    assert (sorted(ended.src_ranks), ended.report) == ([0, 1], None)
    assert world.sent(RequestFailed, "a") == world.sent(Generated, "a") == []
    world.settle()


def test_d01_a_part_that_fails_quarantines_all_of_the_request(make):
    """The pool could not hold it beside its quarantine: it is given up."""
    world = make(Gate(-1), timeout=0.2, num_blocks=12)
    first = world.admit("a", 32)
    world.stream("a", 8)
    world.gate.hold_at = 3
    world.tell(Readable("a", 16))
    world.turn(lambda: world.sent(RequestFailed, "a"))
    world.tell(Readable("a", 32, first), Abort("a"))
    world.turns()
    assert world.pool.count("quarantined") == 8
    assert world.sent(TransferEnded, "a") == []
    world.gate.hold_at = -1
    world.gate.open.set()
    world.turn(lambda: world.sent(TransferEnded, "a"))
    (ended,) = world.sent(TransferEnded, "a")
    assert (sorted(ended.src_ranks), ended.report) == ([0, 1], None)
    assert "failed" in ended.error
    world.settle()
    assert len(world.sent(RequestFailed, "a")) == 1
    world.whole("b", 32, world.admit("b", 32))  # nothing of the first one is taken for known
    world.assert_right("b")
    assert world.engine.counters["reused_tokens"] == 0


def test_a_request_that_waits_hears_what_is_computed_meanwhile(make):
    """The batch holds one: the other's prompt is whole before it begins."""
    world = make(max_batch=1)
    one, two = world.admit("a", 20), world.admit("b", 20, offset=3)
    world.stream("a", 8)
    world.tell(Readable("b", 8), Readable("b", 16), Readable("b", 20, two))
    world.turns(3)
    assert world.work("b").phase is Phase.WAITING
    world.tell(Readable("a", 20, one))
    world.turn(lambda: world.finished("b"))
    for name in "ab":
        world.assert_right(name)
    world.settle()


# --- prompts that are computed here


@pytest.mark.parametrize(
    ("known", "held"), [(0, 0), pytest.param(17, 16, marks=pytest.mark.slow), (20, 16)]
)
def test_k05_a_prompt_computed_here_reuses_what_is_held_and_says_so(make, known, held):
    world = make(max_num_batched_tokens=6)
    if known:
        world.whole("before", known, world.admit("before", known))
    admit = world.prefill("a", 20, 4)
    world.tell(replace(admit, first_token=None, source=None))
    world.turn(lambda: world.finished("a"))
    alone = one_rank_tokens(world.requests["a"], "float64")
    got = world.sent(Generated, "a")
    assert [m.sampled.token for m in got] == alone
    assert [m.cached_tokens for m in got] == [held, 0, 0, 0]
    assert world.engine.counters["local_prefills"] == 1
    assert world.sent(TransferEnded, "a") == []
    world.settle()


# --- loans


def test_what_is_lent_is_kept_until_the_loan_ends(make):
    """8 blocks, of which 5 hold a prompt of 16 and what was generated; a request that needs 6
    waits for the loan."""
    world = make(num_blocks=8)
    world.whole("a", 16, world.admit("a", 16, 6))
    said = [*TOKENS[:16], *one_rank_tokens(world.requests["a"], "float64")]
    lent = world.lend("loan", [*said, 7])
    assert lent.length == 20  # 21 rows are computed, 20 are whole blocks
    assert len(lent.tables["kv"]) == 5
    assert world.pool.count("pinned") == 5
    first = world.admit("b", 20, offset=7)
    world.tell(Readable("b", 20, first))
    world.turns()
    assert world.work("b").phase is Phase.WAITING
    world.tell(EndLoan("loan"), EndLoan("loan"), EndLoan("nobody's"))
    world.turn(lambda: world.finished("b"))
    world.assert_right("b")
    world.settle()
    assert world.lend("again", said).length < 20  # b took its blocks
    world.tell(EndLoan("again"))
    world.settle()


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_nothing_is_lent_that_is_not_known(make, salt):
    world = make()
    if salt is not None:
        world.whole("a", 16, world.admit("a", 16))
    lent = world.lend("loan", TOKENS[:16], salt)
    assert (lent.length, lent.tables) == (0, {})
    assert world.pool.count("pinned") == 0
    world.settle()


# --- what others lend to this engine


def borrows(world, name, length, lender_tokens=16):
    """A request of which a sibling is said to hold so much; its first token."""
    admit = world.prefill(name, length, 4)
    world.tell(replace(admit, lender="decode-1", lender_tokens=lender_tokens))
    return admit.first_token


LOAN = Source("decode-1", {"kv": [1, 2, 3, 4]}, 0, 16, "d")
"""Of an engine that is not connected."""


@pytest.mark.parametrize("has", [True, False])
def test_what_is_lent_to_a_request_that_has_left_is_given_back(make, has):
    world = make()
    borrows(world, "a", 20)
    world.turn(lambda: world.sent(AskLoan, "a"))
    world.turns(3)
    assert world.sent(AskLoan, "a") == [AskLoan("a", "decode-1")]
    assert world.engine.counters["transfer_parts"] == 0  # the loan would be read first
    world.tell(Abort("a"))
    world.turn(lambda: world.sent(TransferEnded, "a"))
    world.settle()
    world.tell(Loaned("a", LOAN if has else None))
    world.turns(3)
    ends = [(m.engine, m.report, m.error) for m in world.sent(TransferEnded, "a")]
    assert ends == [("prefill-0", None, None), *[("decode-1", None, None)] * has]
    assert world.sent(RequestFailed, "a") == world.sent(Generated, "a") == []
    world.settle()


OFFERS = {
    "nothing": (None, []),
    "of an engine that is not connected": (LOAN, [True]),
    "no more than what is here": (Source("decode-1", {"kv": []}, 0, 0, "d"), [False]),
}
"""What is lent, and whether it is given back with an error."""


@pytest.mark.parametrize("kind", OFFERS)
def test_a_loan_that_cannot_be_read_leaves_all_to_the_prompts_engine(make, kind):
    loan, given = OFFERS[kind]
    world = make()
    borrows(world, "a", 20)
    world.turn(lambda: world.sent(AskLoan, "a"))
    world.tell(Loaned("a", loan))
    world.turn(lambda: world.finished("a"))
    world.assert_right("a")
    *given_back, ended = world.sent(TransferEnded, "a")
    assert (ended.engine, ended.report["nbytes"]) == ("prefill-0", world.expected_nbytes(0, 20))
    assert [m.error is not None for m in given_back] == given
    assert {m.engine for m in given_back} <= {"decode-1"}
    world.settle()


def test_nobody_is_asked_for_a_loan_while_there_are_no_blocks_or_no_need(make):
    """The lender may itself be waiting for blocks that somebody keeps for this engine."""
    world = make(num_blocks=8)
    first = world.admit("ahead", 20)
    world.stream("ahead", 8)
    borrows(world, "a", 20)
    world.turns(5)
    assert world.work("a").phase is Phase.WAITING
    assert world.sent(AskLoan, "a") == []
    world.tell(Readable("ahead", 20, first))
    world.turn(lambda: world.finished("a"))  # by now it holds as much itself
    world.assert_right("a")
    assert world.sent(AskLoan, "a") == []
    assert world.engine.counters["reused_tokens"] == 16
    world.settle()


# --- prefixes that are to be forgotten


def test_nothing_from_before_is_known_once_prefixes_are_forgotten(make):
    """One request is over then, one generates, one is on its way, and one waits."""
    world = make(num_blocks=40, max_batch=3)
    world.whole("over", 16, world.admit("over", 16))
    runs, comes = world.admit("runs", 20, 12, offset=3), world.admit("comes", 20, offset=5)
    waits = world.admit("waits", 20, offset=7)
    world.stream("comes", 8)
    world.tell(Readable("runs", 20, runs))
    world.turn(lambda: len(world.sent(Generated, "runs")) > 1)
    assert not world.finished("runs")
    assert world.work("waits") is not None
    world.tell(ForgetPrefixes())
    world.turn(lambda: world.finished("runs"))
    for name, first in (("comes", comes), ("waits", waits)):
        world.stream(name, 20, first)
        world.turn(lambda n=name: world.finished(n))
    for offset, name in enumerate(["over", "runs", "comes", "waits"]):
        world.assert_right(name)
        said = one_rank_tokens(world.requests[name], "float64")
        turn = [*world.requests[name].prompt, *said, 7]
        assert world.lend(f"of {name}", turn).length == 0, offset
    assert world.pool.num_free == world.pool.num_blocks
    world.whole("new", 16, world.admit("new", 16))
    assert world.engine.counters["reused_tokens"] == 0
    assert world.lend("of new", world.requests["new"].prompt).length == 12  # it goes on
    world.tell(EndLoan("of new"))
    world.settle()
