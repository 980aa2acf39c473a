"""The front before two real deployments of the tiny model, each with engines of its own."""

import asyncio
import contextlib
import json

import httpx
import pytest
import torch
from front_servers import QUICK
from front_world import until
from launch_world import config, model_with_tokenizer

from kvflow.launch.threads import thread_deployment
from kvflow.router.front.app import make_front
from kvflow.router.front.fleet import Fleet
from kvflow.server import load_tokenizer, make_app, serve

BLOCK = 4
SHARED = "def join(self, other):\n    "  # a byte is a token
TURNS = [SHARED + "# one", SHARED + "# two", "class A: pass  # another one"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return model_with_tokenizer(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def deployments(model, count, **changes):
    """URLs of servers, their deployments, and a front before them."""
    tokenizer = load_tokenizer(model)
    settings = {"pcp": 2, "dcp": 2, "prefill_block": BLOCK, "decode_block": 8} | changes
    launch = config(transport="in-process", served_model_name="tiny", **settings)
    async with contextlib.AsyncExitStack() as stack:
        engines, urls = [], []
        for _ in range(count):
            engines.append(await stack.enter_async_context(thread_deployment(launch)))
            app = make_app(engines[-1], tokenizer)
            urls.append((await stack.enter_async_context(serve(app, port=0))).url)
        fleet = Fleet("tiny", urls, QUICK)
        await stack.enter_async_context(fleet.watched())
        front = await stack.enter_async_context(serve(make_front(fleet, tokenizer), port=0))
        client = httpx.AsyncClient(base_url=front.url, timeout=60)
        await stack.enter_async_context(client)
        await until(lambda: len(fleet.rotation) == count, 20)
        yield urls, engines, fleet, client


async def ask(client, prompt, **body):
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True} | body
    return await client.post("/v1/completions", json=body)


def test_turns_go_home_and_tokens_are_those_of_one_server(model):
    async def main():
        async with deployments(model, 2) as (urls, engines, fleet, client):
            answers = [await ask(client, TURNS[0])]
            home = answers[0].headers["x-kvflow-server"]
            held = len(TURNS[0]) // BLOCK
            await until(lambda: fleet.router.index.num_blocks(home, "device") >= held)
            # A prompt is so short that a request still reported as running outweighs it.
            log = engines[urls.index(home)].kv_events()
            await until(lambda: log.load().num_running == 0)
            await until(lambda: fleet.router.account(home).load == log.load())
            answers += [await ask(client, turn) for turn in TURNS[1:]]
            body = {"prompt": TURNS[1], "max_tokens": 3, "stream": True, "temperature": 0}
            streamed = await client.post("/v1/completions", json=body | {"ignore_eos": True})
            other = next(url for url in urls if url != home)
            async with httpx.AsyncClient(base_url=other, timeout=60) as direct:
                alone = [await ask(direct, turn) for turn in TURNS]
            for engine in engines:
                engine.prefill.audit()
            return home, answers, streamed, alone

    home, answers, streamed, alone = asyncio.run(main())
    assert [one.headers["x-kvflow-server"] == home for one in answers] == [True, True, False]
    texts = [one.json()["choices"][0]["text"] for one in answers]
    assert texts == [one.json()["choices"][0]["text"] for one in alone]
    events = [json.loads(one[6:]) for one in streamed.text.split("\n\n") if one[6:7] == "{"]
    assert "".join(one["choices"][0]["text"] for one in events) == texts[1]
    cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert cached[0] == cached[2] == 0
    assert len(SHARED) - BLOCK < cached[1] < len(TURNS[1])


def test_k07_bytes_are_the_plans_and_failures_are_there_as_zeros(model):
    """TP 2, one request: what `/metrics` sums up is what the request's own report says, and that is
    the size of its rows."""

    async def main():
        async with deployments(model, 1, pcp=1, dcp=1, tp=2, kv_dtype="fp8") as world:
            urls, engines, _, client = world
            answer = (await ask(client, TURNS[0], kvflow_report=True)).json()
            spec = engines[0].prefill.layout.spec
            async with httpx.AsyncClient(base_url=urls[0]) as direct:
                await until(lambda: "transfers" in engines[0].counters.get("decode-0", {}))
                return answer, spec, (await direct.get("/metrics")).text

    answer, spec, text = asyncio.run(main())
    report = answer["kvflow"]["choices"][0]["transfer"]
    tokens = answer["usage"]["prompt_tokens"]
    rank = {
        line.split('name="')[1].split('"')[0]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("kvflow_rank_total{")
    }
    assert report["nbytes"] == tokens * spec.nbytes_per_token
    assert rank["transfer_nbytes"] == report["nbytes"]
    assert rank["transfers"] == 1
    assert rank["transfer_failures"] == 0
