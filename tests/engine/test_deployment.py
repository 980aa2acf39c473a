"""Whole deployments: the phases of a request, cancels in each of them, failures, the door."""

import asyncio
import threading
import time

import msgspec
import pytest
from attrs import define, evolve, field
from engine_world import (
    Ranks,
    assert_idle,
    collect,
    config,
    free_blocks,
    greedy,
    one_rank_tokens,
    request,
    serve_all,
    until,
    world,
)

from kvflow.engine.api import InvalidRequest, Overloaded
from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.front.roster import Roster
from kvflow.engine.mailbox import ThreadHub
from kvflow.engine.messages import Admit, Connected, Gauges, Ready, TransferEnded
from kvflow.engine.moves import Mover
from kvflow.errors import KvflowError, TransferError

IDS = tuple(range(3, 43))


@define(eq=False)
class Gate:
    """Holds pulls before move `hold_at` until opened; set `hold_at` to -1 to let pulls pass."""

    hold_at: int = 3
    reached: threading.Event = field(factory=threading.Event)
    open: threading.Event = field(factory=threading.Event)

    def __call__(self, num_done):
        if num_done == self.hold_at:
            self.reached.set()
            assert self.open.wait(20)


def blocks(launch):
    return -(-launch.decode_kv_tokens // launch.decode_block)


def exact(launch):
    """The same deployment in float64, where one rank alone is the reference."""
    return evolve(launch, dtype="float64", kv_dtype="float64")


async def _cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 10, 15, 16])
def test_c08_tiny_prompts_finish_and_c07_first_token_requests_move_nothing(length, max_tokens):
    launch = exact(config(pcp=2, dcp=2, prefill_block=16, decode_block=16))

    async def run():
        async with world(launch) as deployment:
            one = request("a", IDS[:length], greedy(max_tokens))
            outputs = await asyncio.wait_for(collect(deployment, one), 30)
            assert [o.token for o in outputs] == one_rank_tokens(one, "float64")
            assert outputs[-1].finish_reason == "length"
            await assert_idle(deployment, blocks(launch))
            moved = sum(c.get("transfers", 0) for c in deployment.counters.values())
            assert moved == (0 if max_tokens == 1 else 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    "narrow",
    [
        {"max_num_seqs": 1},
        {"decode_block": 64, "decode_kv_tokens": 64, "max_model_len": 64},
    ],
)
def test_requests_that_wait_for_a_decode_rank_begin_when_it_is_free_again(narrow):
    """One place in the batch, or blocks for one request: nothing but the end of a request tells
    the rank, which sleeps on its mailbox, that the next may begin."""
    launch = exact(config(**narrow))
    asked = [request(name, IDS[:12], greedy(4)) for name in "abc"]

    async def run():
        async with world(launch) as deployment:
            tokens = await asyncio.wait_for(serve_all(deployment, asked), 30)
            assert tokens == {one.request_id: one_rank_tokens(one, "float64") for one in asked}
            await assert_idle(deployment, blocks(launch))

    asyncio.run(run())


def test_stop_tokens_end_a_request_at_the_first_token_and_later(prompts):
    ids, tokens = prompts["p12"]
    later = next(i for i in range(2, 30) if tokens[i] not in tokens[:i])

    async def run():
        async with world(config()) as deployment:
            for stop in (0, later):
                one = request("a", ids, greedy(32, stop_token_ids=[tokens[stop]]))
                outputs = await collect(deployment, one)
                assert [o.token for o in outputs] == tokens[: stop + 1]
                assert outputs[-1].finish_reason == "stop"
                await assert_idle(deployment, blocks(config()))

    asyncio.run(run())


# --- cancels (D14), pins (D15), reuse (D01)


@pytest.mark.parametrize(
    "phase", ["queued", "prefilling", "first token", "transferring", "decoding", "last token"]
)
def test_d14_a_client_that_leaves_frees_both_sides(phase):
    launch = exact(
        config(pcp=2, dcp=2, max_model_len=128, prefill_kv_tokens=128, max_num_batched_tokens=8)
    )

    async def run():
        gate = Gate(3 if phase == "transferring" else -1)
        async with world(launch, Ranks(gate)) as deployment:
            room = launch.max_model_len - 2
            if phase == "queued":
                ahead = asyncio.create_task(
                    collect(deployment, request("ahead", IDS * 3, greedy(2)))
                )
                await until(lambda: deployment.prefill.num_running == 1)
            generator = deployment.generate(
                request("a", IDS, greedy(3 if phase == "last token" else room - len(IDS)))
            )
            if phase in ("first token", "decoding", "last token"):
                for _ in range({"first token": 1, "decoding": 4, "last token": 3}[phase]):
                    await anext(generator)
                await generator.aclose()
            else:

                async def drain():
                    async for _ in generator:
                        pass

                task = asyncio.create_task(drain())
                if phase == "queued":
                    await until(lambda: deployment.prefill.num_waiting == 1)
                elif phase == "prefilling":
                    await until(lambda: deployment.prefill.num_steps >= 2)
                else:
                    await asyncio.to_thread(gate.reached.wait, 20)
                await _cancelled(task)
                await generator.aclose()
            if phase == "queued":
                await ahead
            gate.open.set()
            await assert_idle(deployment, blocks(launch))
            ends = deployment.num_requests
            assert ends["failed"] == 0
            assert ends["aborted"] == (0 if phase == "last token" else 1)
            after = request("b", IDS[:9], greedy(3))  # the deployment goes on
            assert await serve_all(deployment, [after]) == {"b": one_rank_tokens(after, "float64")}

    asyncio.run(run())


def test_d15_the_source_stays_pinned_while_a_slow_transfer_reads_it():
    """The prefill pool holds one request; the next waits until the first was read."""
    launch = exact(
        config(pcp=2, dcp=2, prefill_block=8, max_model_len=48, prefill_kv_tokens=48, interleave=8)
    )

    async def run():
        gate = Gate(3)
        async with world(launch, Ranks(gate)) as deployment:
            one, two = (request(n, IDS[i : i + 36], greedy(5)) for i, n in enumerate("ab"))
            first = asyncio.create_task(collect(deployment, one))
            await asyncio.to_thread(gate.reached.wait, 20)
            gate.hold_at = -1
            pinned = deployment.prefill.pools["kv"].count("pinned")
            second = asyncio.create_task(collect(deployment, two))
            await asyncio.sleep(0.2)
            assert deployment.prefill.num_waiting == 1
            assert deployment.prefill.pools["kv"].count("pinned") == pinned > 0
            gate.open.set()
            for task, r in ((first, one), (second, two)):
                assert [o.token for o in await task] == one_rank_tokens(r, "float64")
            await assert_idle(deployment, blocks(launch))

    asyncio.run(run())


def test_d01_a_request_after_an_abort_is_intact():
    """The decode pool holds one request; an aborted pull still writes into it."""
    launch = exact(config(decode_block=8, max_model_len=48, decode_kv_tokens=48))

    async def run():
        gate = Gate(3)
        async with world(launch, Ranks(gate)) as deployment:
            first = asyncio.create_task(collect(deployment, request("a", IDS[:36], greedy(5))))
            await asyncio.to_thread(gate.reached.wait, 20)
            await _cancelled(first)
            gate.hold_at = -1
            two = request("b", IDS[1:37], greedy(5))
            second = asyncio.create_task(collect(deployment, two))
            await asyncio.sleep(0.2)
            assert not second.done()
            assert free_blocks(deployment, "decode-0")[0] < 5
            gate.open.set()
            assert [o.token for o in await second] == one_rank_tokens(two, "float64")
            await assert_idle(deployment, blocks(launch))

    asyncio.run(run())


def test_d06_late_and_unknown_acknowledgements_change_nothing():
    async def run():
        async with world(config()) as deployment:
            one = request("a", IDS, greedy(4))
            generator = deployment.generate(one)
            await anext(generator)
            for message in (
                TransferEnded("nobody", "prefill-0", [0], None, None),
                TransferEnded("nobody", "prefill-0", [], None, "never begun"),
                TransferEnded("nobody", "elsewhere", [0], None, None),
                TransferEnded("a", "prefill-0", [7], None, None),
            ):
                deployment._handle("decode-0", message)
            assert len([o async for o in generator]) == 3
            for ranks, report in (([0], {"verified": True}), ([], None)):
                late = TransferEnded("a", "prefill-0", ranks, report, None)
                deployment._handle("decode-0", late)
            await assert_idle(deployment, blocks(config()))
            assert await deployment.healthy()

    asyncio.run(run())


# --- the door


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"prompt": (*IDS, 320)}, "prompt", r"token id 320, must be in \[0, 320\)"),
        ({"prompt": (-1,)}, "prompt", r"prompt\[0\] is -1 .* must be a token id"),
        ({"sampling": greedy(217)}, "prompt", r"40 prompt tokens \+ 217 max_tokens = 257"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_and_the_engine_goes_on(
    changes, param, message, prompts
):
    async def run():
        async with world(config()) as deployment:
            with pytest.raises(InvalidRequest, match=message) as caught:
                await collect(deployment, evolve(request("a", IDS), **changes))
            assert caught.value.param == param
            assert await deployment.healthy()
            ids, tokens = prompts["p12"]
            assert (await serve_all(deployment, [request("a", ids)]))["a"] == tokens[:4]

    asyncio.run(run())


def test_an_id_that_lives_is_refused_and_its_owner_is_not_disturbed(prompts):
    ids, tokens = prompts["p12"]

    async def run():
        async with world(config()) as deployment:
            generator = deployment.generate(request("a", ids, greedy(20)))
            got = [(await anext(generator)).token for _ in range(3)]
            with pytest.raises(InvalidRequest, match="'a' lives in the engine") as caught:
                await collect(deployment, request("a", ids))
            assert caught.value.param == "request_id"
            got += [o.token async for o in generator]
            assert got == tokens[:20]
            await assert_idle(deployment, blocks(config()))

    asyncio.run(run())


def test_overload_is_said_and_passes():
    async def run():
        launch = config(max_num_batched_tokens=4, prefill_kv_tokens=256)
        async with world(launch) as deployment:
            deployment.prefill.max_waiting = 2
            # the pool holds 4 blocks of 64 and so does each prompt need: one at a time
            tasks = [
                asyncio.create_task(collect(deployment, request(f"r{i}", IDS * 6, greedy(2))))
                for i in range(3)
            ]
            await until(lambda: deployment.prefill.num_waiting == 2)
            with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
                await collect(deployment, request("late", IDS))
            for task in tasks:
                await _cancelled(task)
            await assert_idle(deployment, blocks(launch))
            assert len(await collect(deployment, request("late", IDS))) == 4

    asyncio.run(run())


# --- the start


def test_engines_are_connected_when_a_deployment_has_started(monkeypatch):
    """Of two groups of two decode ranks each reaches the other and the prefill engine; each of the
    two prefill ranks reaches both groups."""
    connect, reached = Mover.connect, []

    def slow(mover, message):
        time.sleep(0.1)
        connect(mover, message)
        reached.append(message.engine)

    async def run():
        async with world(config(pcp=2, decode_ranks=2, decode_dcp=2)):
            assert sorted(reached) == ["decode-0"] * 4 + ["decode-1"] * 4 + ["prefill-0"] * 4

    monkeypatch.setattr(Mover, "connect", slow)
    asyncio.run(run())


@pytest.mark.parametrize("engine", ["prefill-0", "decode-0"])
def test_a_rank_that_cannot_connect_ends_the_start(engine, monkeypatch):
    def fail(mover, message):
        if message.engine == engine:
            raise TransferError("nobody answers")

    async def run():
        with pytest.raises(KvflowError, match=r"^rank '.*' failed: TransferError: nobody answers"):
            async with world(config()):
                pass

    monkeypatch.setattr(Mover, "connect", fail)
    asyncio.run(run())


def test_ranks_that_do_not_connect_in_time_are_named():
    async def run():
        hub, heard = ThreadHub(), []
        roster = Roster(hub, {"p": ["p"]}, ["d", "e"])
        roster.ready = {name: Ready({}, {}, name, {}) for name in "pde"}
        boxes = {name: hub.mailbox(name) for name in "pde"}
        boxes["d"].send(Gauges({"a": 1.0}))
        boxes["d"].send(Connected("p"))
        late = r"^not every rank was connected within 0.05 s: \[\('e', 'p'\)\]$"
        with pytest.raises(KvflowError, match=late):
            await roster.connect([("d", "p"), ("e", "p")], 0.05, lambda *one: heard.append(one))
        assert heard == [("d", Gauges({"a": 1.0}))]
        hub.close()

    asyncio.run(run())


# --- failures


@pytest.mark.parametrize("rank", ["prefill-0", "prefill-0.1", "decode-0"])
def test_a_rank_that_raises_fails_every_request_and_the_health(rank, monkeypatch):
    """The next step on it raises: a prefill rank's cache loses a component, a decode rank's hand
    fails."""

    def fail(worker, items):
        raise KvflowError("this step fails")

    async def run():
        ranks = Ranks()
        async with world(config(pcp=2, dcp=2), ranks) as deployment:
            generator = deployment.generate(request("a", IDS, greedy(100)))
            await anext(generator)
            await anext(generator)
            if rank.startswith("decode"):
                monkeypatch.setattr(DecodeWorker, "step", fail)
            else:
                ranks.caches[rank].pages.pop("latent.2")
            others = [collect(deployment, request(f"r{i}", IDS)) for i in range(2)]
            results = await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 20)
            assert all(isinstance(r, KvflowError) for r in results), results
            with pytest.raises(KvflowError, match=r"prefill-|decode-0"):
                async for _ in generator:
                    pass
            assert not await deployment.healthy()
            assert rank.split("-")[0] in deployment.failure
            with pytest.raises(KvflowError):
                await collect(deployment, request("after", IDS))

    asyncio.run(run())


class Tampering:
    """A hub on the way to which hand-overs change."""

    def __init__(self, hub):
        self.hub = hub

    def send(self, name, message):
        if isinstance(message, Admit):
            digest = "f" * len(message.source.digest)
            source = msgspec.structs.replace(message.source, digest=digest)
            message = msgspec.structs.replace(message, source=source)
        self.hub.send(name, message)


def test_a_tampered_source_fails_its_request_only():
    async def run():
        async with world(config()) as deployment:
            honest = deployment.hub
            deployment.journeys.hub = Tampering(honest)
            with pytest.raises(KvflowError, match="the sender ffff"):
                await collect(deployment, request("a", IDS))
            deployment.journeys.hub = honest
            assert await deployment.healthy()
            assert len(await collect(deployment, request("b", IDS))) == 4
            await assert_idle(deployment, blocks(config()))
            assert deployment.num_requests == {"finished": 1, "aborted": 0, "failed": 1}

    asyncio.run(run())


def test_a_byte_that_differs_after_the_move_is_never_used(caplog):
    """A fault planted in the decode cache after the last move is found by the digests; the rows are
    computed instead, and the front's log says why."""
    exact = config(kv_dtype="float64", dtype="float64")

    async def run():
        ranks = Ranks()

        def corrupt(num_done):
            if num_done == 10:  # one rank, ten components: all moved
                for view in ranks.caches["decode-0"].pages.values():
                    view.memory.bitwise_xor_(1)

        ranks.gate = corrupt
        async with world(exact, ranks) as deployment:
            one = request("a", IDS)
            outputs = await collect(deployment, one)
            assert [o.token for o in outputs] == one_rank_tokens(one, "float64")
            assert {o.transfer for o in outputs} == {None}
            assert await deployment.healthy()
            await assert_idle(deployment, blocks(exact))
            counters = deployment.counters["decode-0"]
            assert (counters["transfer_failures"], counters["transfers"]) == (1, 0)
            assert (counters["recomputed_prompts"], counters["recomputed_tokens"]) == (1, len(IDS))

    asyncio.run(run())
    (record,) = caplog.records
    assert "prefill-0 to decode-0: transfer failed" in record.getMessage()
    assert "source digest" in record.getMessage()


def test_a_message_that_cannot_be_read_fails_the_deployment():
    """Nobody waits for ever for a front that has stopped to read."""

    async def run():
        async with world(config()) as deployment:
            generator = deployment.generate(request("a", IDS, greedy(200)))
            await anext(generator)
            deployment.hub.deliver("decode-0", b"garbage")
            with pytest.raises(KvflowError, match="rank 'decode-0'"):
                await asyncio.wait_for(_drain(generator), 20)
            assert not await deployment.healthy()

    asyncio.run(run())


async def _drain(generator):
    async for _ in generator:
        pass


def test_closing_ends_requests_that_still_run():
    async def run():
        async with world(config()) as deployment:
            task = asyncio.create_task(collect(deployment, request("a", IDS, greedy(200))))
            await until(lambda: deployment.journeys.live)
        with pytest.raises(KvflowError, match="the engine is closed"):
            await asyncio.wait_for(task, 10)

    asyncio.run(run())


def test_metrics_name_blocks_requests_and_ranks():
    async def run():
        async with world(config(pcp=2, dcp=2, decode_ranks=2)) as deployment:
            await serve_all(deployment, [request(n, IDS) for n in "abc"])
            await assert_idle(deployment, blocks(config()))
            families = {m.name: m for m in deployment.metrics()}
        outcomes = {
            s.labels["outcome"]: s.value for s in families["kvflow_engine_requests_total"].samples
        }
        assert outcomes == {"finished": 3, "aborted": 0, "failed": 0}
        states = {s.labels["state"]: s.value for s in families["kvflow_prefill_blocks"].samples}
        assert states.pop("free") > 0
        assert set(states.values()) == {0}
        transfers = {
            s.labels["rank"]: s.value
            for s in families["kvflow_rank_total"].samples
            if s.labels["name"] == "transfers"
        }
        assert transfers == {"decode-0": 2, "decode-1": 1}  # to the rank with the least load

    asyncio.run(run())
