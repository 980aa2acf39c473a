"""PrefillEngine: prompts whose beginning another engine lends. The test plays the ranks."""

import asyncio

import pytest
from engine_world import greedy
from test_prefill import Play, scenario

from kvflow.engine.api import InvalidRequest, Request
from kvflow.engine.messages import PullRows, RowsPulled, RunStep, Source
from kvflow.engine.prefill import Loan
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import KvflowError


class Borrowing(Play):
    """Also plays the lender and the reader."""

    def __init__(self, **changes):
        values = {"num_blocks": 12, "prefix": PrefixConfig(block_size=4)}
        super().__init__(**(values | changes))
        self.asked, self.ended, self.readable = [], [], []

    def borrow(self, name, prompt, stop, answer=None):
        """`answer` is awaited before the lender answers."""
        source = Source("decode-0", {"kv": [5, 6, 7]}, 0, stop, "d")

        async def lent():
            self.asked.append(name)
            if answer is not None:
                await answer
            return Loan(source, lambda: self.ended.append(name))

        one = Request(name, tuple(prompt), greedy(4))
        return asyncio.ensure_future(
            self.engine.prefill(one, lent, lambda stop, layers: self.readable.append(stop))
        )

    def pulled(self, name, rank, error=None):
        report = {"nbytes": 1} if error is None else None
        self.engine.on_rows_pulled(RowsPulled(name, rank, report, error))

    def end(self, name):
        self.engine.release(name)
        self.engine.audit()
        assert self.pool.num_available == self.pool.num_blocks
        assert self.engine.steps.held == {}


async def answered():
    """Lenders have been asked, and have answered."""
    for _ in range(3):
        await asyncio.sleep(0)


@scenario
async def test_rows_are_borrowed_before_the_rest_is_computed():
    play = Borrowing()
    task = play.borrow("a", range(20), 12)
    await answered()
    (pull,) = play.steps
    assert isinstance(pull, PullRows)
    assert (pull.request_id, pull.start, pull.stop) == ("a", 0, 12)
    assert pull.tables == play.engine._held["a"].kv.tables
    play.pulled("a", 0)
    assert (play.ended, len(play.steps)) == ([], 1)  # a rank still reads
    play.pulled("a", 1)
    assert play.ended == ["a"]
    (item,) = play.steps[-1].items
    assert (item.start, item.stop) == (12, 20)
    assert play.readable == [12]
    play.answer()
    assert (await task).position == 20
    assert play.engine.cached_tokens("a") == 12
    assert play.engine.kv.num_reused == {"device": 0, "peer": 12}
    play.end("a")
    again = play.borrow("b", range(20), 12)  # now it knows as much itself
    await answered()
    assert play.ended == ["a", "b"]
    assert isinstance(play.steps[-1], RunStep)
    play.answer()
    await again
    assert play.engine.kv.num_reused == {"device": 16, "peer": 12}
    play.end("b")


@scenario
async def test_only_what_is_not_known_is_borrowed():
    play = Borrowing()
    await play.prefilled("a", 9)
    play.end("a")
    task = play.borrow("b", range(20), 12)
    await answered()
    assert (play.steps[-1].start, play.steps[-1].stop) == (8, 12)
    for rank in range(2):
        play.pulled("b", rank)
    play.answer()
    await task
    assert play.engine.cached_tokens("b") == 12
    assert play.engine.kv.num_reused == {"device": 8, "peer": 4}
    play.end("b")


@pytest.mark.parametrize("failing", [0, 1])
def test_what_cannot_be_pulled_is_computed_anew_and_counted(failing):
    @scenario
    async def run():
        play = Borrowing()
        task = play.borrow("a", range(20), 12)
        await answered()
        for rank in range(2):
            play.pulled("a", rank, "it is gone" if rank == failing else None)
        assert play.ended == ["a"]
        assert play.steps[-1].items[0].start == 0
        assert play.readable == []
        play.answer()
        await task
        assert play.engine.cached_tokens("a") == 0
        assert play.engine.kv.num_reused == {"device": 0, "peer": 0}
        assert play.engine.steps.num_failed_loans == 1
        play.end("a")

    run()


@scenario
async def test_an_abort_while_rows_arrive_keeps_the_blocks_until_they_have():
    play = Borrowing(num_blocks=5, pcp=2, dcp=1)
    task = play.borrow("a", range(20), 12)
    await answered()
    other = play.submit("b", 20)
    await asyncio.sleep(0)
    play.engine.release("a")
    play.engine.release("a")
    await asyncio.sleep(0)
    assert task.cancelled()
    play.pulled("a", 0)
    assert (play.pool.num_free, play.ended) == (0, [])
    assert play.engine.num_waiting == 1
    play.pulled("a", 1)
    assert play.ended == ["a"]
    assert play.steps[-1].items[0].request_id == "b"  # its blocks came back
    play.answer()
    await other
    assert play.engine.kv.num_reused["device"] == 0  # nothing of "a" is known
    play.end("b")


@pytest.mark.parametrize("why", ["too long", "its id is in use", "aborted while it waits"])
def test_nobody_is_asked_for_a_loan_if_the_request_never_begins(why):
    @scenario
    async def run():
        play = Borrowing(num_blocks=3, pcp=1, dcp=1)
        if why == "too long":
            with pytest.raises(InvalidRequest, match="4 blocks"):
                await play.borrow("a", range(16), 8)
        elif why == "its id is in use":
            task = play.submit("a", 12)
            await asyncio.sleep(0)
            with pytest.raises(KvflowError, match="in the engine already"):
                await play.borrow("a", range(100, 112), 8)
            play.answer()
            await task
        else:
            ahead = play.submit("ahead", 12)
            await asyncio.sleep(0)
            task = play.borrow("a", range(100, 112), 8)
            await answered()
            assert play.engine.num_waiting == 1
            play.engine.release("a")
            await asyncio.sleep(0)
            play.answer()
            await ahead
            play.engine.release("ahead")
        assert (play.asked, play.ended) == ([], [])
        assert not any(isinstance(message, PullRows) for message in play.steps)
        play.end("a")

    run()


@scenario
async def test_a_request_that_waits_for_blocks_has_no_loan_yet():
    """Its lender may be waiting for somebody who waits behind it."""
    play = Borrowing(num_blocks=3, pcp=1, dcp=1)
    ahead = play.submit("ahead", 12)
    await asyncio.sleep(0)
    task = play.borrow("a", range(100, 112), 8)
    await answered()
    play.answer()
    await ahead
    await answered()
    assert (play.engine.num_waiting, play.asked) == (1, [])
    play.engine.release("ahead")
    await answered()
    assert play.asked == ["a"]
    play.pulled("a", 0)
    play.answer()
    await task
    play.end("a")


@pytest.mark.parametrize("why", ["released", "a rank is lost", "the lender is lost"])
def test_a_request_that_ends_while_its_lender_is_asked(why):
    """Its blocks stay its own until the answer, which is given back at once."""

    @scenario
    async def run():
        play, answer = Borrowing(), asyncio.get_running_loop().create_future()
        task = play.borrow("a", range(20), 12, answer)
        await answered()
        assert (play.asked, play.steps) == (["a"], [])
        if why == "released":
            play.engine.release("a")
            play.engine.release("a")
        elif why == "a rank is lost":
            play.engine.fail(KvflowError("a rank is gone"))
            play.engine.release("a")  # as the front does behind every failure
        assert play.pool.count("used") == 3
        if why == "the lender is lost":
            answer.set_exception(KvflowError("decode-0 is gone"))
        else:
            answer.set_result(None)
        await answered()
        assert play.steps == []
        assert play.ended == ([] if why == "the lender is lost" else ["a"])
        with pytest.raises((KvflowError, asyncio.CancelledError)):
            await task
        play.end("a")

    run()


@scenario
async def test_a_reset_while_rows_are_borrowed_forgets_them():
    play = Borrowing()
    task = play.borrow("a", range(20), 12)
    await answered()
    play.pulled("a", 0)
    assert play.engine.reset_prefix_cache() == {"device": 0}
    play.pulled("a", 1)
    play.answer()
    await task
    play.end("a")
    await play.prefilled("b", 20)
    assert play.engine.cached_tokens("b") == 0
    play.end("b")


@scenario
async def test_many_that_borrow_the_same_prefix_at_once():
    """Each pulls for itself; each loan ends; the prefix is known once afterwards."""
    play = Borrowing(num_blocks=40)
    names = [f"r{i}" for i in range(8)]
    tasks = [play.borrow(name, range(20), 12) for name in names]
    await answered()
    assert [m.request_id for m in play.steps if isinstance(m, PullRows)] == names
    for rank in (1, 0):
        for name in reversed(names):
            play.pulled(name, rank)
    while not all(task.done() for task in tasks):
        play.answer()
        await asyncio.sleep(0)
    assert sorted(play.ended) == names
    assert play.engine.kv.num_reused["peer"] == 8 * 12
    assert len(play.engine.kv.cache.index) == 5
    for name in names[:-1]:
        play.engine.release(name)
    play.end(names[-1])


# --- readers while a prompt is computed


def streamed(play, name, length, stops):
    one = Request(name, tuple(range(length)), greedy(4))
    return asyncio.ensure_future(play.engine.prefill(one, None, lambda s, n: stops.append(s)))


@scenario
async def test_readers_are_told_of_every_chunk_but_the_last():
    play, stops = Borrowing(max_num_batched_tokens=8), []
    task = streamed(play, "a", 20, stops)
    await asyncio.sleep(0)
    play.answer()
    assert stops == [8]
    source = play.engine.source("a")
    play.answer()
    play.answer()
    await task
    assert stops == [8, 16]  # with the last one comes the first token
    assert source.tables == play.engine._held["a"].kv.tables
    play.engine.preempt("a")
    play.engine.acknowledge("a", [0, 1])
    play.end("a")


@scenario
async def test_a_request_that_is_read_is_not_preempted():
    play, stops = Borrowing(max_num_batched_tokens=8), []
    task = streamed(play, "a", 20, stops)
    await asyncio.sleep(0)
    play.answer()
    tables = play.engine.source("a").tables
    play.engine.preempt("a")
    play.answer()
    play.answer()
    await task
    assert play.engine._held["a"].kv.tables == tables
    play.engine.acknowledge("a", [0, 1])
    play.end("a")


@pytest.mark.parametrize("how", ["refused", "read over"])
def test_a_reader_that_goes_while_the_prompt_is_computed_ends_the_request(how):
    """Its decode engine refuses it, or gives it up: nothing more is computed for it."""

    @scenario
    async def run():
        play, stops = Borrowing(max_num_batched_tokens=8), []
        task = streamed(play, "a", 30, stops)
        await asyncio.sleep(0)
        play.answer()
        play.engine.source("a")
        if how == "refused":
            play.engine.never_read("a")
        else:
            play.engine.acknowledge("a", [0, 1])
        with pytest.raises(KvflowError, match="reader of request 'a' has gone"):
            await task
        assert play.pool.count("used") > 0  # a step still writes
        play.answer()
        assert len([m for m in play.steps if isinstance(m, RunStep)]) == 2
        play.end("a")

    run()


@pytest.mark.parametrize("first", ["client", "reader"])
def test_c10_blocks_come_back_when_writer_reader_and_client_are_gone(first):
    @scenario
    async def run():
        play, stops = Borrowing(max_num_batched_tokens=8, pcp=4, dcp=4, num_blocks=6), []
        task = streamed(play, "a", 30, stops)
        await asyncio.sleep(0)
        play.answer()
        play.engine.source("a")
        if first == "client":
            play.engine.release("a")
            await asyncio.sleep(0)
            assert task.cancelled()
            play.answer()
            for rank in range(4):
                assert play.pool.count("used") > 0
                play.engine.acknowledge("a", [rank])
                play.engine.acknowledge("a", [rank])
        else:
            play.engine.acknowledge("a", range(4))
            play.engine.release("a")
            assert play.pool.count("used") > 0
            play.answer()
            with pytest.raises(KvflowError, match="has gone"):
                await task
        play.end("a")

    run()
