"""`kvflow router` as a user starts and stops it."""

import asyncio
import contextlib
import signal
import socket
import sys
import time

import httpx
import pytest
from front_servers import FakeServer
from front_world import BLOCK, CachingEngine, until
from launch_world import alive, children

from kvflow import cli

pytestmark = pytest.mark.processes
PROMPT = [5 + n % 200 for n in range(4 * BLOCK)]


@contextlib.asynccontextmanager
async def router(*flags):
    """A started process and the lines that it prints; it is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvflow.cli", "router", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def main(tokenizer, tokenizer_dir, number):
    servers = [FakeServer(CachingEngine(tokenizer.vocab_size), tokenizer) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        urls = [word for server in servers for word in ("--server", server.url)]
        flags = ["--model", str(tokenizer_dir), "--served-model-name", "tiny/scripted"]
        process = await stack.enter_async_context(router(*urls, *flags, "--port", "0"))
        said = b""
        async with asyncio.timeout(60):
            while not said.startswith(b"routing "):
                said = await process.stdout.readline()
        url = said.split(b" on ")[1].split()[0].decode()
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            while len((await client.get("/health")).text.split('"ok"')) != 4:
                await asyncio.sleep(0.02)
            body = {"prompt": PROMPT, "max_tokens": 1}
            answers = [await client.post("/v1/completions", json=body)]
            held = 'tier="device"} 4.0'
            while held not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.02)
            body["prompt"] = PROMPT + [7] * 5
            answers.append(await client.post("/v1/completions", json=body))
        pids = children(process.pid)
        before = time.monotonic()
        process.send_signal(number)
        rest = (await process.stdout.read()).decode()
        code = await process.wait()
        took = time.monotonic() - before
        await until(lambda: not any(alive(pid) for pid in pids))
        return url, answers, code, took, rest


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_two_calls_with_one_prefix_then_ctrl_c(tokenizer, tokenizer_dir, number):
    url, answers, code, took, rest = asyncio.run(main(tokenizer, tokenizer_dir, number))
    homes = [one.headers["x-kvflow-server"] for one in answers]
    assert homes[0] == homes[1]
    usage = [one.json()["usage"]["prompt_tokens_details"] for one in answers]
    assert usage == [{"cached_tokens": 0}, {"cached_tokens": 4 * BLOCK}]
    assert code == 0, rest
    assert took < 5
    assert "Traceback" not in rest
    with socket.socket() as probe:  # the port is free again, at once
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--server", "tcp://a:1"), "server 'tcp://a:1', must be http://host[:port][/path]"),
        (("--health-interval", "0"), "--health-interval = 0.0, must be above 0"),
        (("--model", "none"), "cannot read none/tokenizer.json"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tokenizer_dir, capsys, changed, said):
    flags = ("--model", str(tokenizer_dir), "--server", "http://a:1", "--port", "0", *changed)
    assert cli.main(["router", *flags]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"kvflow router: {said}")
    assert line.count("\n") == 1
