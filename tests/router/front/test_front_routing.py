"""The front before two servers that hold real chains: who gets a call, and what comes back."""

import asyncio
import json

import httpx
from front_servers import routed
from front_world import BLOCK, until

PROMPT = [5 + n % 200 for n in range(6 * BLOCK + 3)]


def test_the_next_turn_goes_where_its_prefix_is(tokenizer):
    async def scenario(world):
        await world.all_in()
        first = await world.complete(prompt=PROMPT)
        home = world.server_of(first)
        await until(lambda: world.held(world.servers[home]) == 6)
        turns = [await world.complete(prompt=PROMPT + [7] * n) for n in (1, 20, 40)]
        other = await world.complete(prompt=[9] * 50)
        return first, home, turns, [world.server_of(one) for one in turns], world.server_of(other)

    first, home, turns, homes, other = routed(tokenizer, scenario)
    assert homes == [home] * 3
    assert other != home
    cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in turns]
    assert first.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert cached == [6 * BLOCK, 6 * BLOCK, 8 * BLOCK]


def test_k05_cached_tokens_pass_through_and_never_exceed_the_prompt(tokenizer):
    prompt = PROMPT[: 2 * BLOCK + 4]

    async def scenario(world):
        await world.all_in()
        for engine in world.engines:  # warm on both
            engine.cache(prompt[: 2 * BLOCK])
        await until(lambda: [world.held(one) for one in world.servers] == [2, 2])
        whole = await world.complete(prompt=prompt)
        body = {"prompt": prompt, "max_tokens": 1, "stream": True}
        body["stream_options"] = {"include_usage": True}
        streamed = await world.client.post("/v1/completions", json=body)
        metrics = (await world.client.get("/metrics")).text
        return whole.json()["usage"], streamed.text, metrics

    usage, streamed, metrics = routed(tokenizer, scenario)
    last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))
    for one in (usage, last["usage"]):
        assert one["prompt_tokens"] == 2 * BLOCK + 4 == 20
        assert one["prompt_tokens_details"] == {"cached_tokens": 16}
    hits = [line for line in metrics.splitlines() if "server_hit_tokens_total{" in line]
    assert sum(float(line.split()[-1]) for line in hits) == 32


def test_chats_are_hashed_as_the_servers_render_them_and_salts_part_them(tokenizer):
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 6}]
    body = {"messages": messages, "max_tokens": 1}

    def num_held(world):
        return sum(len(engine.held) for engine in world.engines)

    async def scenario(world):
        await world.all_in()
        homes = []
        for salt in (None, "tenant", None, "tenant", None):
            response = await world.client.post(
                "/v1/chat/completions", json=body | {"cache_salt": salt}
            )
            homes.append(world.server_of(response))
            await until(lambda: sum(map(world.held, world.servers)) == num_held(world))
        return homes

    homes = routed(tokenizer, scenario)
    assert homes[0] == homes[2] == homes[4]
    assert homes[1] == homes[3] != homes[0]


def test_a_burst_with_one_prefix_spreads(tokenizer):
    shared = PROMPT[: 4 * BLOCK]

    async def scenario(world):
        await world.all_in()
        await asyncio.gather(*(world.complete(prompt=[*shared, n, n]) for n in range(5, 45)))
        return [len(engine.prompts) for engine in world.engines]

    counts = routed(tokenizer, scenario, engines=4, delay_s=0.02)
    assert sum(counts) == 40
    assert max(counts) <= 1.5 * 10


def test_everything_of_an_answer_passes_unchanged(tokenizer):
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 3, "stream": True, "n": 2}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 1}

    async def scenario(world):
        await world.all_in()
        calls = [
            ("POST", "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
            ("POST", "/tokenize", {"prompt": "def main"}),
            ("POST", "/detokenize", {"tokens": [70, 71]}),
            ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}),
            ("POST", "/v1/completions", {"prompt": "a", "tools": 3, "max_tokens": 10**6}),
            ("POST", "/v1/completions", {"prompt": "a", "model": "gpt-none"}),
            ("GET", "/v1/models/gpt-none", None),
            ("POST", "/tokenize", {"prompt": 7}),
            ("GET", "/v1/completions", None),
            ("GET", "/nothing", None),
        ]
        async with httpx.AsyncClient(base_url=world.servers[0].url, timeout=20) as direct:
            pairs = [
                [await client.request(*call[:2], json=call[2]) for client in (direct, world.client)]
                for call in calls
            ]
            streams = [
                (await client.post("/v1/completions", json=body)).text
                for client in (direct, world.client)
            ]
            cards = [
                (await client.get("/v1/models")).json()["data"][0] | {"created": 0}
                for client in (direct, world.client)
            ]
        return pairs, streams, cards

    pairs, streams, cards = routed(tokenizer, scenario)
    for direct, through in pairs:
        assert through.status_code == direct.status_code
        assert through.headers["content-type"] == direct.headers["content-type"]
        assert _anonymous(through.json()) == _anonymous(direct.json())
    assert [pair[0].status_code for pair in pairs[:3]] == [200] * 3
    assert [pair[0].status_code for pair in pairs[3:]] == [400, 400, 404, 404, 400, 405, 404]
    assert cards[0] == cards[1]
    events = [
        [_anonymous(json.loads(one[6:])) for one in text.split("\n\n") if one[6:].startswith("{")]
        for text in streams
    ]
    key = lambda one: one["choices"][0]["index"]  # noqa: E731
    assert sorted(events[0], key=key) == sorted(events[1], key=key)
    assert streams[1].endswith("data: [DONE]\n\n")


def _anonymous(value):
    return value | {"id": "", "created": 0} if "id" in value else value
