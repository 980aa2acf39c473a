"""PrefillEngine: schedules, pins and frees. The test plays the ranks; no model runs."""

import asyncio
import itertools

import pytest
from engine_world import greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.engine.api import InvalidRequest, Overloaded, Request
from kvflow.engine.messages import StepDone
from kvflow.engine.prefill import PrefillEngine
from kvflow.engine.sampling import Sampled
from kvflow.errors import ContentMismatch, KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec

CONFIG = {
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "index_head_dim": 4,
    "indexer_types": ["full"],
}
CONTENT = {"model": "toy", "weights": "ours"}
SPEC = KVCacheSpec.from_config(CONFIG, kv_dtype="float32", content=CONTENT)
TARGET = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(8))


class Play:
    """An engine and the ranks that answer its steps."""

    def __init__(self, pcp=2, dcp=2, block=4, num_blocks=8, target=TARGET, **changes):
        mesh = Mesh((Axis("pcp", pcp), Axis("dcp", dcp, over=("pcp",))))
        layout = KVLayout.uniform(SPEC, mesh.place(RoundRobin(dcp), "dcp"), Paged(block))
        self.steps, self.num_ranks = [], pcp
        self.engine = PrefillEngine(
            layout, pcp, {"kv": num_blocks}, target, self.steps.append, **changes
        )

    @property
    def pool(self):
        return self.engine.pools["kv"]

    def submit(self, name, length):
        one = Request(name, tuple(range(length)), greedy(4))
        return asyncio.ensure_future(self.engine.prefill(one))

    def done(self, rank, step=None):
        """What a rank answers to a step; the last rank samples."""
        step = step or self.steps[-1]
        last = [i for i in step.items if i.sampling is not None]
        sampled = {i.request_id: Sampled(7, i.stop) for i in last if rank == self.num_ranks - 1}
        return StepDone(step.step_id, rank, sampled, 0.5)

    def answer(self):
        step = self.steps[-1]
        for rank in range(self.num_ranks):
            self.engine.on_step_done(self.done(rank, step))

    async def prefilled(self, name, length):
        task = self.submit(name, length)
        await asyncio.sleep(0)
        while not task.done():
            self.answer()
            await asyncio.sleep(0)
        return task.result()

    def assert_idle(self):
        self.engine.audit()
        assert self.pool.num_free == self.pool.num_blocks


def scenario(body):
    """Runs an async test."""

    def run(*args, **kwargs):
        return asyncio.run(asyncio.wait_for(body(*args, **kwargs), 20))

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    return run


# --- steps that cannot be sent


@scenario
async def test_a_step_that_cannot_be_sent_ends_its_requests_and_no_others():
    play = Play(max_num_batched_tokens=8)
    send = play.engine.steps.send

    def refuse_bad(step):
        if any(item.request_id == "bad" for item in step.items):
            raise UnicodeEncodeError("utf-8", "bad", 0, 1, "no such letter")
        send(step)

    play.engine.steps.send = refuse_bad
    first, bad = play.submit("first", 8), play.submit("bad", 8)
    await asyncio.sleep(0)
    play.answer()
    with pytest.raises(KvflowError, match="step was not sent: UnicodeEncodeError"):
        await bad
    last = play.submit("last", 8)
    await asyncio.sleep(0)
    play.answer()
    assert (await first).token == (await last).token == 7
    for name in ("first", "bad", "last"):
        play.engine.release(name)
    play.assert_idle()
    await play.prefilled("next", 8)
    play.engine.release("next")
    play.assert_idle()


# --- readers and acknowledgements


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a05_blocks_are_held_until_every_planned_rank_is_acknowledged(order):
    @scenario
    async def run():
        play = Play(4, 4)
        await play.prefilled("a", 13)
        play.engine.source("a")
        for rank in order[:-1]:
            play.engine.acknowledge("a", [rank])
            play.engine.acknowledge("a", [rank])  # a duplicate does not count twice
            assert play.pool.count("pinned") > 0
        assert play.pool.num_free < play.pool.num_blocks
        play.engine.acknowledge("a", [order[-1]])
        play.assert_idle()
        play.engine.acknowledge("a", [order[-1]])  # late
        play.assert_idle()

    run()


def test_a07_requests_that_read_one_rank_only_never_wait_for_the_others():
    """20 requests of one token each on 4 ranks, room for 8: one source rank each."""

    @scenario
    async def run():
        play = Play(4, 1, num_blocks=8)
        tasks = {f"r{i}": play.submit(f"r{i}", 1) for i in range(20)}
        await asyncio.sleep(0)
        finished = set()
        while len(finished) < 20:
            play.answer()
            await asyncio.sleep(0)
            ready = [n for n, t in tasks.items() if t.done() and n not in finished]
            assert ready
            for name in ready:
                play.engine.source(name)
                for rank in range(4):
                    play.engine.acknowledge(name, [rank])
                finished.add(name)
        play.assert_idle()

    run()


@pytest.mark.parametrize(("length", "num_blocks"), [(15, 1), (16, 1), (17, 2), (32, 2)])
def test_b07_the_export_has_the_blocks_of_the_prompt_and_no_more(length, num_blocks):
    @scenario
    async def run():
        play = Play(1, 1, block=16)
        await play.prefilled("a", length)
        source = play.engine.source("a")
        assert len(source.tables["kv"]) == num_blocks
        assert (source.engine, source.start, source.stop) == ("prefill-0", 0, length)

    run()


@pytest.mark.parametrize(("pcp", "dcp"), [(1, 1), (4, 4), (4, 1), (4, 2)])
def test_c10_only_the_planned_ranks_count(pcp, dcp):
    @scenario
    async def run():
        play = Play(pcp, dcp)
        await play.prefilled("a", 1)  # one token: exactly one rank is read
        play.engine.acknowledge("a", list(range(pcp)))  # too early, nobody was told to read
        assert play.pool.count("pinned") > 0
        play.engine.source("a")
        unread = set(play.engine._held["a"].unread)
        assert len(unread) == 1
        play.engine.acknowledge("a", [r for r in range(9) if r not in unread])
        play.engine.acknowledge("nobody", [0])
        assert play.pool.count("pinned") > 0
        play.engine.acknowledge("a", sorted(unread))
        play.assert_idle()

    run()


def test_c10_no_reader_releases_too():
    @scenario
    async def run():
        play = Play()
        await play.prefilled("a", 9)
        play.engine.release("a")
        play.assert_idle()

    run()


@pytest.mark.parametrize("orders", list(itertools.permutations(["ack", "release", "ack"])))
def test_d08_ends_in_any_order_are_idempotent(orders):
    @scenario
    async def run():
        play = Play()
        await play.prefilled("a", 9)
        play.engine.source("a")
        for end in orders:
            if end == "ack":
                play.engine.acknowledge("a", [0, 1])
            else:
                play.engine.release("a")
        play.assert_idle()

    run()


# --- cancels and pressure


@pytest.mark.parametrize("phase", ["queued", "prefilling", "between steps", "prefilled"])
def test_d14_a_cancel_gives_all_blocks_back(phase):
    @scenario
    async def run():
        play = Play(num_blocks=3, max_num_batched_tokens=8)
        blocker = play.submit("blocker", 20) if phase == "queued" else None
        await asyncio.sleep(0)
        task = play.submit("a", 20)
        await asyncio.sleep(0)
        if phase == "between steps":
            play.answer()
        if phase == "prefilled":
            for _ in range(3):
                play.answer()
            await task
        play.engine.release("a")
        await asyncio.sleep(0)
        if phase in ("prefilling", "between steps"):
            assert play.pool.num_free == 0  # the running step still writes them
            play.answer()
        if blocker is not None:
            for _ in range(3):
                play.answer()
            await blocker
            play.engine.release("blocker")
        play.assert_idle()
        play.engine.release("a")
        play.assert_idle()
        assert task.cancelled() or phase == "prefilled"

    run()


def test_d15_a_request_waits_for_blocks_that_are_still_read():
    @scenario
    async def run():
        play = Play(num_blocks=3)
        await play.prefilled("a", 20)
        held = play.engine.source("a").tables["kv"]
        waiting = play.submit("b", 20)
        await asyncio.sleep(0)
        play.engine.acknowledge("a", [0])
        assert len(play.steps) == 1  # b has not begun
        assert play.engine.num_waiting == 1
        play.engine.acknowledge("a", [1])
        assert len(play.steps) == 2
        assert sorted(play.steps[-1].items[0].tables["kv"]) == sorted(held)
        play.answer()
        await waiting

    run()


def test_d16_nothing_that_waits_or_has_ended_can_be_read():
    @scenario
    async def run():
        play = Play(num_blocks=3, max_num_batched_tokens=8)
        task = play.submit("a", 20)
        await asyncio.sleep(0)
        waiting = play.submit("b", 20)
        await asyncio.sleep(0)
        for name in ("b", "nobody"):  # it has no blocks yet
            with pytest.raises(KvflowError, match=f"'{name}' has no KV to read"):
                play.engine.source(name)
        play.answer()
        play.engine.release("a")  # in its second chunk
        with pytest.raises(KvflowError, match="'a' has no KV to read"):
            play.engine.source("a")
        play.answer()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(KvflowError, match="'a' has no KV to read"):
            play.engine.source("a")
        play.engine.source("b")  # it runs now
        with pytest.raises(KvflowError, match="or somebody reads it"):
            play.engine.source("b")
        play.engine.release("b")
        play.answer()
        await asyncio.sleep(0)
        assert play.pool.count("used")  # its reader has not acknowledged
        play.engine.acknowledge("b", [0, 1])
        play.assert_idle()
        assert waiting.cancelled()

    run()


def test_overload_and_prompts_that_never_fit():
    @scenario
    async def run():
        play = Play(num_blocks=2, max_waiting=2)
        with pytest.raises(
            InvalidRequest, match="17 tokens needs 3 blocks, the prefill pool has 2"
        ):
            await play.submit("big", 17)
        tasks = [play.submit(f"r{i}", 16) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
            await play.submit("r3", 1)
        for i, task in enumerate(tasks):
            play.answer()
            await task
            play.engine.release(f"r{i}")
        play.assert_idle()

    run()


def test_an_id_in_use_is_refused():
    @scenario
    async def run():
        play = Play()
        await play.prefilled("a", 3)
        with pytest.raises(KvflowError, match="'a' is in the engine already"):
            await play.submit("a", 3)

    run()


def test_caches_of_other_content_are_refused_at_construction():
    content = CONTENT | {"weights": "others"}
    other = KVCacheSpec.from_config(CONFIG, kv_dtype="float32", content=content)
    with pytest.raises(ContentMismatch, match="'weights': source has 'ours', target 'others'"):
        Play(target=KVLayout.uniform(other, Placement.simple(Replicated()), Paged(8)))


def test_fault_b10_a_target_with_an_mtp_layer_that_prefill_lacks_is_refused():
    other = KVCacheSpec.from_config(
        CONFIG | {"num_nextn_predict_layers": 1}, kv_dtype="float32", content=CONTENT
    )
    with pytest.raises(ContentMismatch, match=r"'component indexer\.1': source has nothing"):
        Play(target=KVLayout.uniform(other, Placement.simple(Replicated()), Paged(8)))


# --- steps


def test_steps_end_with_every_rank_and_answers_to_others_are_refused():
    @scenario
    async def run():
        play = Play(2, 2, max_num_batched_tokens=4)
        task = play.submit("a", 6)
        await asyncio.sleep(0)
        first = play.steps[0]
        play.engine.on_step_done(play.done(0))
        play.engine.on_step_done(play.done(0))  # a duplicate is not the other rank
        assert len(play.steps) == 1
        play.engine.on_step_done(play.done(1))
        assert len(play.steps) == 2
        with pytest.raises(KvflowError, match="answer to step 1, step 2 runs"):
            play.engine.on_step_done(play.done(0, first))
        play.answer()
        assert (await task).position == 6
        with pytest.raises(KvflowError, match="answer to step 2"):
            play.engine.on_step_done(play.done(0))

    run()


def test_a_first_token_that_nobody_sampled_is_an_error():
    @scenario
    async def run():
        play = Play(2, 2)
        task = play.submit("a", 6)
        await asyncio.sleep(0)
        for rank in range(2):
            play.engine.on_step_done(StepDone(1, rank, {}, 0.0))
        with pytest.raises(KvflowError, match="no rank sampled"):
            await task
        play.engine.release("a")
        play.assert_idle()

    run()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    budget=st.integers(1, 30),
    ends=st.lists(st.sampled_from(["read", "release", "early"]), min_size=8, max_size=8),
    block=st.integers(1, 6),
)
def test_any_schedule_keeps_its_laws(lengths, budget, ends, block):
    """Steps stay within the budget and use it up, positions of a request follow each other without
    a gap, the oldest request moves on in every step, and all blocks come back."""

    @scenario
    async def run():
        play = Play(2, 2, block, num_blocks=24, max_num_batched_tokens=budget)
        tasks = {f"r{i}": play.submit(f"r{i}", n) for i, n in enumerate(lengths)}
        await asyncio.sleep(0)
        owed = dict(zip(tasks, ends, strict=False))
        for name in [n for n, end in owed.items() if end == "early"]:
            play.engine.release(name)
            owed.pop(name)
        answered = 0
        while answered < len(play.steps) or owed:
            if answered < len(play.steps):
                play.answer()
                answered += 1
                await asyncio.sleep(0)
            for name in [n for n in owed if tasks[n].done()]:
                if owed.pop(name) == "read":
                    play.engine.source(name)
                    play.engine.acknowledge(name, [0, 1])
                else:
                    play.engine.release(name)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        play.assert_idle()
        done = {}
        for step in play.steps:
            assert sum(len(i.tokens) for i in step.items) <= budget
            assert step.items[0].request_id == min(i.request_id for i in step.items)
            share = lengths[int(step.items[0].request_id[1:])] - step.items[0].start
            assert len(step.items[0].tokens) >= min(share, max(budget // 2, 1))
            for one in step.items:
                assert one.start == done.get(one.request_id, 0)
                assert one.tokens == list(range(one.start, one.stop))
                length = lengths[int(one.request_id[1:])]
                assert one.next_token == (one.stop if one.stop < length else None)
                assert (one.sampling is None) == (one.stop < length)
                done[one.request_id] = one.stop

    run()
