"""GET /kv_events over a real socket."""

import asyncio
import base64
import time

import httpx
import pytest
from front_world import BLOCK, TIERS, CachingEngine, events_of, log_of
from server_helpers import ScriptedEngine, served

from kvflow.engine.prefix.hashes import HASH_SCHEME, PrefixHasher
from kvflow.router.config import Load
from kvflow.router.events import KVEvents, Stored
from kvflow.server import events as module
from kvflow.server import make_app, serve

PROMPT = list(range(5, 5 + 3 * BLOCK + 2))


def engine_of(tokenizer, **kwargs):
    return CachingEngine(tokenizer.vocab_size, **kwargs)


def names(hashes):
    return [base64.b64encode(one).decode() for one in hashes]


async def snapshot(events):
    begin = await anext(events)
    held = []
    while (event := await anext(events))["type"] == "held":
        held.append(event["events"])
    assert event["type"] == "snapshot_end"
    return begin, held, event["seq"]


async def of_type(events, kind):
    while (event := await anext(events))["type"] != kind:
        pass
    return event


def test_a_stream_begins_with_how_blocks_are_named_and_all_that_is_held(tokenizer):
    engine = engine_of(tokenizer)
    engine.log.on_load("prefill-0", Load(12, 1, 2, 3))

    async def scenario(url):
        async with httpx.AsyncClient(base_url=url) as client:
            await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        async with events_of(url) as events:
            return await snapshot(events), await of_type(events, "load")

    (begin, held, seq), load = served(engine, tokenizer, scenario)
    scheme = begin["scheme"]
    assert scheme == {
        "hashing": HASH_SCHEME,
        "content": "scripted",
        "block_size": BLOCK,
        "salt_field": "cache_salt",
    }
    assert begin["tiers"] == list(TIERS)
    assert begin["max_kv_tokens"] == 10_000
    assert begin["model"] == engine.model_name
    assert begin["log_id"] == engine.log.log_id
    chain = PrefixHasher(scheme["content"], scheme["block_size"]).chain(PROMPT)
    stored = {"hashes": names(chain.hashes), "parent": None, "num_tokens": 3 * BLOCK}
    assert [(one["tier"], one["stored"]) for one in held] == [("device", [stored])]
    assert seq == 1
    assert load["load"] == {
        "kv_tokens_used": 12,
        "num_running": 1,
        "num_waiting": 2,
        "waiting_tokens": 3,
    }


def test_changes_follow_one_by_one_and_salts_have_chains_of_their_own(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(url):
        async with events_of(url) as events, httpx.AsyncClient(base_url=url) as client:
            *_, seq = await snapshot(events)
            seen = []
            for salt in (None, "tenant"):
                body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
                await client.post("/v1/completions", json=body)
                seen.append(await of_type(events, "change"))
            engine.forget()
            return seq, [*seen, await of_type(events, "change")]

    seq, (first, second, third) = served(engine, tokenizer, scenario)
    assert [one["seq"] for one in (first, second, third)] == [seq + 1, seq + 2, seq + 3]
    for event, salt in ((first, None), (second, "tenant")):
        chain = PrefixHasher("scripted", BLOCK).chain(PROMPT, salt)
        assert event["events"]["stored"][0]["hashes"] == names(chain.hashes)
    assert third["events"]["cleared"] is True


def test_a_long_snapshot_comes_in_pieces_that_keep_their_parents(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BLOCKS", 4)
    engine = engine_of(tokenizer)
    chain = [b"%032d" % n for n in range(11)]
    engine.log.on_events("a", KVEvents("host", [Stored(chain, None, 11 * BLOCK)]))
    engine.log.on_events("a", KVEvents("disk", [Stored(chain[:1], None, BLOCK)]))

    async def scenario(url):
        async with events_of(url) as events:
            return await snapshot(events)

    _, held, _ = served(engine, tokenizer, scenario)
    assert [one["tier"] for one in held] == ["host", "host", "host", "disk"]
    runs = [run for one in held[:3] for run in one["stored"]]
    assert [len(run["hashes"]) for run in runs] == [4, 4, 3]
    assert [run["num_tokens"] for run in runs] == [4 * BLOCK, 4 * BLOCK, 3 * BLOCK]
    assert [name for run in runs for name in run["hashes"]] == names(chain)
    assert [run["parent"] for run in runs] == [None, *names([chain[3], chain[7]])]


def test_a_reader_who_is_behind_is_told_so(tokenizer):
    engine = engine_of(tokenizer, log=log_of(max_blocks=4))

    async def scenario(url):
        async with events_of(url) as events:
            await snapshot(events)
            chain = [b"%032d" % n for n in range(50)]
            engine.log.on_events("a", KVEvents("device", [Stored(chain, None, 50 * BLOCK)]))
            return await of_type(events, "behind"), await anext(events)

    behind, end = served(engine, tokenizer, scenario)
    assert "change 1 is asked for, the log keeps 2 to 1" in behind["reason"]
    assert end == "[DONE]"


@pytest.mark.parametrize("kind", ["no log", "no prefixes"])
def test_an_engine_without_a_cache_says_so(tokenizer, kind):
    plain = ScriptedEngine(tokenizer.vocab_size)
    if kind == "no prefixes":
        plain = engine_of(tokenizer, log=None)

    async def scenario(url):
        async with httpx.AsyncClient(base_url=url) as client:
            return await client.get("/kv_events")

    response = served(plain, tokenizer, scenario)
    assert response.status_code == 404
    assert "reuses no prefixes" in response.json()["error"]["message"]


def test_a_server_that_stops_ends_the_stream_and_a_reader_that_leaves_is_let_go(tokenizer):
    engine = engine_of(tokenizer)

    async def main():
        async with serve(make_app(engine, tokenizer), port=0) as running:
            async with events_of(running.url) as events:
                await snapshot(events)
            stream = events_of(running.url)
            events = await stream.__aenter__()
            await snapshot(events)
            before = time.monotonic()
        took = time.monotonic() - before
        last = [event async for event in events][-1]
        await stream.__aexit__(None, None, None)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        return took, last

    took, last = asyncio.run(main())
    assert last == "[DONE]"
    assert took < 2.0
