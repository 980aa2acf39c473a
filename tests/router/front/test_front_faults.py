"""Servers that go, come back, refuse, break off, or do not belong."""

import asyncio
import contextlib
import json
import time

import httpx
import pytest
from attrs import evolve
from front_faults import EVENTS, RawServer, chunk, event, whole
from front_servers import QUICK, routed
from front_world import BLOCK, CachingEngine, log_of, until

from kvflow.engine.api import Unavailable
from kvflow.engine.prefix.hashes import HASH_SCHEME
from kvflow.errors import KvflowError
from kvflow.router.front.app import make_front
from kvflow.router.front.fleet import Fleet
from kvflow.server import serve

PROMPT = [5 + n % 200 for n in range(6 * BLOCK + 3)]


def engine_of(tokenizer, **kwargs):
    return CachingEngine(tokenizer.vocab_size, **kwargs)


def number(text, name, **labels):
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [one for one in text.splitlines() if one.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(one.split()[-1]) for one in lines if all(label in one for label in wanted))


# --- away and back


def test_a_server_that_is_gone_is_passed_over_and_comes_back_with_what_it_holds(tokenizer):
    async def scenario(world):
        await world.all_in()
        home = world.server_of(await world.complete(prompt=PROMPT))
        gone, other = world.servers[home], world.servers[1 - home]
        await until(lambda: world.held(gone) == 6)
        assert world.server_of(await world.complete(prompt=[9] * 200)) == 1 - home
        await gone.stop()
        await until(lambda: world.held(gone) == 0)  # the stream of its events has ended
        second = await world.complete(prompt=[8] * 9)  # its turn: it had less work
        assert world.held(gone) is None
        metrics = (await world.client.get("/metrics")).text
        gone.engine.cache(PROMPT + [7] * BLOCK)
        await gone.start()
        world.fleet.members[gone.url].nudge.set()
        await until(lambda: world.held(gone) == 7)
        back = world.server_of(await world.complete(prompt=PROMPT))
        assert back == home
        return second, other.url, gone.url, metrics

    rarely = evolve(QUICK, health_interval_s=30)
    second, other, gone, metrics = routed(tokenizer, scenario, config=rarely)
    assert second.status_code == 200
    assert second.headers["x-kvflow-server"] == other
    assert number(metrics, "kvflow_router_request_retries_total") == 1
    assert number(metrics, "kvflow_router_server_departures_total", server=gone) == 1
    served = "kvflow_router_server_requests_total"
    assert number(metrics, served, server=gone, outcome="lost") == 1
    assert number(metrics, served, server=other, outcome="ok") == 2
    assert number(metrics, "kvflow_router_requests_total", outcome="ok") == 3
    assert number(metrics, "kvflow_router_server_in_rotation", server=gone) == 0
    assert number(metrics, "kvflow_router_server_feed_failures_total", server=gone) >= 1


def test_a_server_that_is_not_well_gets_nothing_until_it_is(tokenizer):
    async def scenario(world):
        await world.all_in()
        home = world.server_of(await world.complete(prompt=PROMPT))
        world.engines[home].well = False
        await until(lambda: len(world.fleet.rotation) == 1)
        health = await world.client.get("/health")
        away = {world.server_of(await world.complete(prompt=PROMPT)) for _ in range(3)}
        world.engines[1 - home].well = False
        await until(lambda: not world.fleet.rotation)
        none = [
            await world.complete(),
            *[await world.client.get(p) for p in ("/health", "/v1/models")],
        ]
        world.engines[home].well = True
        await until(lambda: len(world.fleet.rotation) == 1)
        back = world.server_of(await world.complete(prompt=PROMPT))
        return home, health, away, none, back

    home, health, away, none, back = routed(tokenizer, scenario)
    assert health.status_code == 200
    assert sorted(health.json()["servers"].values()) == ["/health answers 503", "ok"]
    assert away == {1 - home}
    assert [one.status_code for one in none] == [503] * 3
    assert none[0].headers["retry-after"] == "1"
    assert "/health answers 503" in none[0].json()["error"]["message"]
    assert back == home


def test_k02_servers_that_do_not_belong_stay_out_and_it_is_said_why(tokenizer):
    engines = [
        engine_of(tokenizer),
        engine_of(tokenizer, log=log_of(block_size=2 * BLOCK)),
        engine_of(tokenizer, log=log_of(content="another model")),
        engine_of(tokenizer, model_name="tiny/other"),
        engine_of(tokenizer),
    ]
    engines[4].log.scheme = type(engines[4].log.scheme)("another rule", "scripted", BLOCK)
    for engine in engines[1:]:
        engine.well = False

    async def scenario(world):
        await until(lambda: len(world.fleet.rotation) == 1)
        for engine in engines[1:]:
            engine.well = True
        members = world.fleet.members.values()
        await until(lambda: not any("/health" in (one.trouble or "") for one in members))
        homes = {world.server_of(await world.complete(prompt=PROMPT)) for _ in range(3)}
        said = (await world.client.get("/health")).json()["servers"]
        return homes, [said[one.url] for one in world.servers]

    homes, (well, other_size, other_content, other_model, other_rule) = routed(
        tokenizer, scenario, engines=engines
    )
    assert homes == {0}
    assert well == "ok"
    assert "block_size=16" in other_size
    assert "block_size=8" in other_size
    assert "'another model'" in other_content
    assert other_model == "it serves ['tiny/other'], not 'tiny/scripted'"
    assert "'another rule'" in other_rule
    assert HASH_SCHEME in other_rule


def test_servers_without_events_get_calls_by_load_alone(tokenizer):
    class Silent(CachingEngine):
        def kv_events(self):
            return None

    engines = [Silent(tokenizer.vocab_size) for _ in range(2)]

    async def scenario(world):
        await world.all_in()
        return [world.server_of(await world.complete(prompt=PROMPT)) for _ in range(4)]

    assert sorted(routed(tokenizer, scenario, engines=engines)) == [0, 0, 1, 1]


# --- what servers answer, and clients that leave


def test_full_and_unwell_servers_speak_for_themselves(tokenizer):
    class Lost(CachingEngine):
        async def _generate(self, request):
            if self.fail_at == -1:
                raise Unavailable("rank 3 is lost")
            async for output in super()._generate(request):
                yield output

    engine = Lost(tokenizer.vocab_size)

    async def scenario(world):
        await world.all_in()
        engine.capacity = 0
        full = await world.complete()
        engine.fail_at = -1
        lost = await world.complete(stream=True)
        engine.fail_at, engine.capacity = 2, None
        broken = await world.complete(stream=True, max_tokens=5)
        return full, lost, broken, (await world.client.get("/metrics")).text

    full, lost, broken, metrics = routed(tokenizer, scenario, engines=[engine])
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json()["error"]["code"] == "overloaded"
    assert (lost.status_code, lost.json()["error"]["message"]) == (503, "rank 3 is lost")
    assert broken.status_code == 200
    assert '"internal_error"' in broken.text
    assert broken.text.endswith("data: [DONE]\n\n")
    assert number(metrics, "kvflow_router_request_retries_total") == 0
    assert number(metrics, "kvflow_router_server_departures_total") == 0
    for outcome in ("overloaded", "error", "ok"):
        assert number(metrics, "kvflow_router_requests_total", outcome=outcome) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_call_on_the_server(tokenizer, stream):
    body = {"prompt": "a", "max_tokens": 400, "n": 3, "seed": 1, "stream": stream}

    async def scenario(world):
        await world.all_in()
        async with httpx.AsyncClient(base_url=world.url, timeout=20) as client:
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: sum(len(one.live) for one in world.engines) == 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        left = time.monotonic()
        await until(lambda: not any(one.live for one in world.engines))
        took = time.monotonic() - left
        await until(lambda: sum(world.fleet.metrics.requests._values.values()) == 1)
        return took, (await world.client.get("/metrics")).text

    took, metrics = routed(tokenizer, scenario, delay_s=0.02)
    assert took < 1.0
    assert number(metrics, "kvflow_router_requests_total", outcome="aborted") == 1
    assert number(metrics, "kvflow_router_server_requests_total", outcome="aborted") == 1
    assert number(metrics, "kvflow_router_server_running_requests") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_the_front_ends_what_runs_in_time(tokenizer, stream, caplog):
    engine = engine_of(tokenizer, delay_s=0.05)

    async def scenario(world):
        await world.all_in()
        async with httpx.AsyncClient(timeout=20) as client:
            fleet = Fleet(engine.model_name, [world.servers[0].url], QUICK)
            async with fleet.watched(), serve(make_front(fleet, tokenizer), port=0) as running:
                await until(lambda: fleet.rotation)
                body = {"prompt": "a", "max_tokens": 400, "stream": stream}
                url = f"{running.url}/v1/completions"
                task = asyncio.create_task(client.post(url, json=body))
                await until(lambda: len(engine.live) == 1)
                before = time.monotonic()
            took = time.monotonic() - before
            await until(lambda: not engine.live)
            return took, await task

    took, response = routed(tokenizer, scenario, engines=[engine])
    assert took < 2.0
    assert response.status_code == (200 if stream else 503)
    assert '"message":"the server is stopping"' in response.text
    assert not stream or response.text.endswith("data: [DONE]\n\n")
    assert "Traceback" not in caplog.text


# --- connections that break


async def _raw(tokenizer, server, scenario):
    """`scenario(fleet, client)` with a front before raw servers."""
    async with contextlib.AsyncExitStack() as stack:
        for one in server:
            await stack.enter_async_context(one.listening())
        fleet = Fleet("raw", [one.url for one in server], QUICK)
        await stack.enter_async_context(fleet.watched())
        running = await stack.enter_async_context(serve(make_front(fleet, tokenizer), port=0))
        client = httpx.AsyncClient(base_url=running.url, timeout=20)
        await stack.enter_async_context(client)
        await until(lambda: len(fleet.rotation) == len(server))
        return await scenario(fleet, client)


GOOD = whole({"choices": [], "id": "good"})
FIRST = event({"choices": [{"text": "a"}]})


@pytest.mark.parametrize(
    "broken",
    [b"", b"HTTP/1.1 200", GOOD[:-3], b"nonsense\r\n\r\n"],
    ids=["nothing", "half a head", "half a body", "no HTTP"],
)
def test_a_call_that_breaks_before_anything_was_sent_is_tried_once_more(tokenizer, broken):
    async def scenario(fleet, client):
        return [
            await client.post("/v1/completions", json={"prompt": "a" * n}) for n in range(1, 5)
        ], (await client.get("/metrics")).text

    servers = [RawServer("raw", broken), RawServer("raw", GOOD)]
    answers, metrics = asyncio.run(_raw(tokenizer, servers, scenario))
    assert [one.json() for one in answers] == [{"choices": [], "id": "good"}] * 4
    assert servers[1].num_posts == 4
    lost = number(metrics, "kvflow_router_server_requests_total", outcome="lost")
    assert lost == servers[0].num_posts >= 1
    assert number(metrics, "kvflow_router_request_retries_total") == lost


def test_there_is_no_third_try(tokenizer):
    async def scenario(fleet, client):
        return await client.post("/v1/completions", json={"prompt": "a"})

    servers = [RawServer("raw", b"") for _ in range(3)]
    answer = asyncio.run(_raw(tokenizer, servers, scenario))
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "server_lost"
    assert sum(one.num_posts for one in servers) == 2


def test_a_lost_server_is_not_asked_again_for_the_same_call(tokenizer):
    async def scenario(fleet, client):
        return await client.post("/v1/completions", json={"prompt": "a"})

    server = RawServer("raw", b"")
    answer = asyncio.run(_raw(tokenizer, [server], scenario))
    assert answer.status_code == 503
    assert "closed the connection before its answer was whole" in answer.json()["error"]["message"]
    assert server.num_posts == 1


@pytest.mark.parametrize("rest", [b"", chunk(b'data: {"choi')], ids=["between", "within"])
def test_a_stream_that_breaks_is_not_tried_again_and_not_taken_for_whole(tokenizer, rest):
    async def scenario(fleet, client):
        body = {"prompt": "a", "stream": True}
        text = b""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for piece in response.aiter_bytes():
                    text += piece
                return response.status_code, text, True
        return response.status_code, text, False

    servers = [RawServer("raw", EVENTS + FIRST + rest) for _ in range(2)]
    status, text, ended = asyncio.run(_raw(tokenizer, servers, scenario))
    assert status == 200
    assert sum(one.num_posts for one in servers) == 1
    assert text.startswith(b'data: {"choices": [{"text": "a"}]}\n\n')
    assert ended == (not rest)
    assert (b'"server_lost"' in text) == (not rest)


# --- events that cannot be relied on

BEGIN = {
    "type": "begin",
    "log_id": "1",
    "model": "raw",
    "scheme": {"hashing": HASH_SCHEME, "content": "c", "block_size": BLOCK},
    "tiers": ["device"],
    "max_kv_tokens": 100,
}


def change(seq, name, kind="change"):
    stored = [{"hashes": [name], "parent": None, "num_tokens": BLOCK}]
    return {"type": kind, "seq": seq, "events": {"tier": "device", "stored": stored}}


@pytest.mark.parametrize(
    "wrong",
    [
        event(change(9, "AAAA")),
        event({"type": "behind", "reason": "too slow"}),
        event({"type": "change"}),
        event(BEGIN),
        chunk(b"data: [DONE]\n\n"),
        None,
    ],
    ids=["a lost change", "too slow", "no event", "a second beginning", "the end", "broken off"],
)
def test_what_is_held_is_forgotten_until_a_new_snapshot(tokenizer, wrong):
    feed = EVENTS + event(BEGIN) + event(change(0, "CCCC", "held"))
    feed += event({"type": "snapshot_end", "seq": 6}) + event(change(7, "BBBB"))
    server = RawServer("raw", GOOD, feed)

    async def scenario(fleet, client):
        def held():
            return fleet.router.index.num_blocks(server.url, "device")

        await until(lambda: held() == 2)
        server.feed = EVENTS + event(BEGIN)
        server.feeds[0].put_nowait(wrong)
        await until(lambda: held() == 0)
        await until(lambda: len(server.feeds) == 2)
        assert fleet.rotation
        server.feeds[1].put_nowait(event(change(0, "DDDD", "held")))
        await until(lambda: held() == 1)
        return (await client.get("/metrics")).text

    metrics = asyncio.run(_raw(tokenizer, [server], scenario))
    assert number(metrics, "kvflow_router_server_feed_failures_total") == 1
    assert number(metrics, "kvflow_router_server_snapshots_total") == 1


def test_silence_is_a_fault(tokenizer):
    server = RawServer("raw", GOOD, EVENTS + event(BEGIN))

    async def scenario():
        async with server.listening():
            fleet = Fleet("raw", [server.url], evolve(QUICK, feed_silence_s=0.1))
            async with fleet.watched():
                await until(lambda: len(server.feeds) >= 2)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "at least one"),
        (["http://a:1", "http://a:1/"], "no one twice"),
        (["https://a:1"], "must be http://"),
        (["a:1"], "must be http://"),
        (["http://a:port"], "is no URL"),
    ],
)
def test_servers_are_checked(urls, message):
    with pytest.raises(KvflowError, match=message):
        Fleet("m", urls)


DONE = chunk(b"data: [DONE]\n\n")


async def _streamed(client):
    """All that a client gets of a stream, and whether the connection ended in order."""
    text = b""
    body = {"prompt": "a", "stream": True}
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_bytes():
                text += piece
            return text, True
    return text, False


def test_a_stream_that_ends_in_order_but_without_its_end_is_an_error(tokenizer):
    async def scenario(fleet, client):
        return await _streamed(client)

    server = RawServer("raw", EVENTS + FIRST + b"0\r\n\r\n")
    text, ended = asyncio.run(_raw(tokenizer, [server], scenario))
    assert ended
    assert b'"server_lost"' in text
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_connection_that_breaks_behind_the_end_of_a_stream_breaks_nothing(tokenizer):
    async def scenario(fleet, client):
        return await _streamed(client)

    server = RawServer("raw", EVENTS + FIRST + DONE)
    text, ended = asyncio.run(_raw(tokenizer, [server], scenario))
    assert ended
    assert b"error" not in text
    assert text.count(b"data: [DONE]\n\n") == 1


def test_events_pass_however_they_are_cut(tokenizer):
    events = b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    cuts = {"one": [events], "each byte": [events[i : i + 1] for i in range(len(events))]}

    async def scenario(fleet, client):
        return await _streamed(client)

    for pieces in cuts.values():
        answer = EVENTS + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
        server = RawServer("raw", answer)
        assert asyncio.run(_raw(tokenizer, [server], scenario)) == (events, True)


def test_kv_events_are_read_however_they_are_cut(tokenizer):
    said = [BEGIN, change(0, "CCCC", "held"), {"type": "snapshot_end", "seq": 6}]
    said += [change(7, "BBBB"), change(8, "DDDD")]
    text = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in said)
    whole_text = chunk(text)
    bytewise = b"".join(chunk(text[i : i + 1]) for i in range(len(text)))
    servers = [RawServer("raw", GOOD, EVENTS + one) for one in (whole_text, bytewise)]

    async def scenario(fleet, client):
        await until(lambda: all(_held(fleet, one) == 3 for one in servers))

    asyncio.run(_raw(tokenizer, servers, scenario))


def _held(fleet, server):
    return fleet.router.index.num_blocks(server.url, "device")


def test_a_late_loss_does_not_take_out_a_server_that_came_back(tokenizer):
    """A call that began before the server left ends in an error behind its return."""

    async def scenario(fleet, client):
        (member,) = fleet.members.values()
        before = member.num_entered
        fleet.leave(member.name, "gone")
        await until(lambda: member.trouble is None)
        fleet.lost(member.name, before, "the old connection broke")
        still = member.trouble
        fleet.lost(member.name, member.num_entered, "the new connection broke")
        return still, member.trouble

    server = RawServer("raw", GOOD)
    still, then = asyncio.run(_raw(tokenizer, [server], scenario))
    assert still is None
    assert then == "the new connection broke"


def test_nothing_is_gathered_for_a_client_that_does_not_read(tokenizer):
    piece = chunk(b'data: "%s"\n\n' % (b"x" * 65_000))
    server = RawServer("raw", EVENTS + piece * 1000 + DONE + b"0\r\n\r\n")

    async def scenario(fleet, client):
        body = {"prompt": "a", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body):
            await asyncio.sleep(0.3)
            (writer,) = server.writers
            return writer.transport.get_write_buffer_size()

    left = asyncio.run(_raw(tokenizer, [server], scenario))
    assert left > len(server.answer) / 2  # the front has not taken it


def test_two_fronts_before_the_same_servers_hear_of_each_others_calls(tokenizer):
    async def scenario(world):
        await world.all_in()
        urls = [server.url for server in world.servers]
        fleet = Fleet(world.engines[0].model_name, urls, QUICK)
        async with fleet.watched(), serve(make_front(fleet, tokenizer), port=0) as running:
            await until(lambda: len(fleet.rotation) == 2)
            home = world.server_of(await world.complete(prompt=PROMPT))
            await until(lambda: fleet.router.index.num_blocks(urls[home], "device") == 6)
            async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
                body = {"prompt": PROMPT, "max_tokens": 2}
                other = world.server_of(await client.post("/v1/completions", json=body))
            return home, other

    home, other = routed(tokenizer, scenario)
    assert other == home
