"""Clients that leave, servers that stop, and what is counted."""

import asyncio
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import ScriptedEngine, served, wait_until, with_httpx

from kvflow.engine.api import Metric, Sample
from kvflow.errors import KvflowError
from kvflow.server import make_app, serve
from kvflow.server.metrics import Histogram, exposition

BODY = {"prompt": "a", "max_tokens": 400, "n": 3, "seed": 1}


def engine_of(tokenizer, **kwargs):
    return ScriptedEngine(tokenizer.vocab_size, **kwargs)


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text, name, **labels):
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_every_choice(tokenizer, stream):
    engine = engine_of(tokenizer, delay_s=0.02)

    async def scenario(url):
        async with httpx.AsyncClient(base_url=url) as client:
            async with (
                client.stream("POST", "/v1/completions", json=BODY | {"stream": stream}, timeout=20)
                if stream
                else leaving(client) as response
            ):
                await wait_until(lambda: len(engine.live) == 3)
                if stream:
                    await anext(response.aiter_lines())
            left = time.monotonic()
            await wait_until(lambda: not engine.live)
            took = time.monotonic() - left
            return took, (await client.get("/metrics")).text

    took, text = served(engine, tokenizer, scenario)
    assert len(engine.aborted) == 3
    assert took < 1.0
    labels = {"endpoint": "completions", "outcome": "aborted"}
    assert value(text, "kvflow_http_requests_total", **labels) == 1
    assert value(text, "kvflow_choices_total", finish_reason="aborted") == 3
    assert value(text, "kvflow_choices_running") == 0


class leaving:  # noqa: N801
    """A request that does not stream, abandoned when the block ends."""

    def __init__(self, client):
        self.client = client

    async def __aenter__(self):
        self.task = asyncio.create_task(self.client.post("/v1/completions", json=BODY))

    async def __aexit__(self, *error):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_a_client_that_reads_nothing_holds_the_engine_back_and_can_leave(tokenizer):
    engine = engine_of(tokenizer, max_model_len=10**6)

    async def stalled():
        before = -1
        while before != (before := engine.num_outputs):
            await asyncio.sleep(0.25)

    async def scenario(url):
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        reader, writer = await asyncio.open_connection(sock=narrow)
        body = b'{"prompt":"a","max_tokens":200000,"stream":true,"logprobs":20}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.read(10)
        await asyncio.wait_for(stalled(), 20)
        assert 0 < engine.num_outputs < 200_000
        writer.transport.abort()
        await wait_until(lambda: not engine.live)

    served(engine, tokenizer, scenario)
    assert len(engine.aborted) == 1


def test_half_a_request_is_no_request(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(url):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=url) as client:
            await asyncio.sleep(0.05)
            return (await client.get("/metrics")).text

    text = served(engine, tokenizer, scenario)
    labels = {"endpoint": "completions", "outcome": "aborted"}
    assert value(text, "kvflow_http_requests_total", **labels) == 1
    assert engine.seen == []


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_takes_less_than_two_seconds_and_ends_what_runs(tokenizer, stream, caplog):
    engine = engine_of(tokenizer, delay_s=0.05)

    async def main():
        async with httpx.AsyncClient() as client:
            async with serve(make_app(engine, tokenizer), port=0) as running:
                url = f"{running.url}/v1/completions"
                task = asyncio.create_task(client.post(url, json=BODY | {"stream": stream}))
                await wait_until(lambda: len(engine.live) == 3)
                leaving_at = time.monotonic()
            took = time.monotonic() - leaving_at
            return took, await task

    took, response = asyncio.run(main())
    assert took < 2.0
    assert response.status_code == (200 if stream else 503)
    assert '"message":"the server is stopping"' in response.text
    assert not stream or response.text.endswith("data: [DONE]\n\n")
    assert caplog.text == ""
    assert engine.live == set()
    assert len(engine.aborted) == 3


def test_running_calls_may_finish_while_stopping(tokenizer):
    engine = engine_of(tokenizer, delay_s=0.05)

    async def main():
        async with httpx.AsyncClient() as client:
            async with serve(make_app(engine, tokenizer), port=0) as running:
                url = f"{running.url}/v1/completions"
                task = asyncio.create_task(client.post(url, json=BODY | {"max_tokens": 6}))
                await wait_until(lambda: len(engine.live) == 3)
            return await task

    assert asyncio.run(main()).status_code == 200
    assert engine.aborted == []


def test_ports_are_free_again_and_taken_ports_are_an_error(tokenizer):
    app = make_app(engine_of(tokenizer), tokenizer)

    async def main():
        async with serve(app, port=0) as first:
            with pytest.raises(OSError, match="in use"):
                async with serve(app, port=first.port):
                    pass
        async with serve(app, port=first.port) as second:
            assert second.port == first.port
            assert second.url == f"http://127.0.0.1:{first.port}"
            async with httpx.AsyncClient(base_url=second.url) as client:
                response = await client.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 200
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", first.port)

    asyncio.run(main())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6(tokenizer):
    async def main():
        async with (
            serve(make_app(engine_of(tokenizer), tokenizer), "::1", 0) as running,
            httpx.AsyncClient() as client,
        ):
            return (await client.get(f"{running.url}/health")).status_code

    assert asyncio.run(main()) == 200


def test_metrics_count_what_happened(tokenizer):
    engine = engine_of(tokenizer, script=(5, 6, 0))

    async def scenario(client):
        await client.post("/v1/completions", json={"prompt": [5, 6, 7, 8], "n": 2})
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
        await client.post("/v1/chat/completions", json=body)
        await client.post("/v1/completions", json={"prompt": ""})
        engine.capacity = 0
        await client.post("/v1/completions", json={"prompt": "a"})
        return await client.get("/metrics")

    response = with_httpx(engine, tokenizer, scenario)
    text = response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    outcomes = {("completions", "ok"): 1, ("completions", "refused"): 1, ("chat", "ok"): 1}
    outcomes |= {("completions", "overloaded"): 1}
    for (endpoint, outcome), count in outcomes.items():
        labels = {"endpoint": endpoint, "outcome": outcome}
        assert value(text, "kvflow_http_requests_total", **labels) == count
    assert value(text, "kvflow_choices_total", finish_reason="stop") == 2
    assert value(text, "kvflow_choices_total", finish_reason="length") == 1
    assert value(text, "kvflow_choice_generated_tokens_total") == 3 + 3 + 2
    chat_len = len(engine.seen[2].prompt)
    assert value(text, "kvflow_choice_prompt_tokens_total") == 8 + chat_len
    assert value(text, "kvflow_choice_cached_prompt_tokens_total") == 4 + chat_len // 2
    assert value(text, "kvflow_choice_time_to_first_token_seconds_count") == 3
    assert value(text, "kvflow_choice_inter_token_latency_seconds_count") == 2 + 2 + 1
    assert value(text, "kvflow_free_blocks", pool='a"b\\n\nd') == 3


def test_histogram_buckets_are_cumulative():
    histogram = Histogram("h_seconds", "h", (0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(seconds)
    samples = families(exposition([histogram.metric()]))["h_seconds"].samples
    buckets = [(s.labels["le"], s.value) for s in samples if s.name == "h_seconds_bucket"]
    assert buckets == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert samples[-2].value == pytest.approx(7.65)


def test_two_families_of_one_name_are_refused():
    twice = [Metric("a", "help", "gauge", [Sample(float("inf"))])] * 2
    assert exposition(twice[:1]).endswith("a +Inf\n")
    with pytest.raises(KvflowError, match="two metrics"):
        exposition(twice)
