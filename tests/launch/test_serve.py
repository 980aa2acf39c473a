"""examples/serve_glm.py as a user starts and stops it."""

import os
import signal
import threading
import time

import httpx
import pytest
from launch_world import alive, children, complete, ranks_of

pytestmark = pytest.mark.processes
SMALL = ("--pcp", "2", "--dcp", "2", "--kv-dtype", "float32", "--verify-transfers")
STOP_S = 5.0


def _end_within(server, seconds, pids):
    began = time.monotonic()
    code = server.wait(seconds)
    while any(alive(pid) for pid in pids) and time.monotonic() - began < seconds:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []
    assert server.leftovers() == []
    return code


def _no_nixl(directory):
    """Packages that stand before the real ones and cannot be imported."""
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("raise ImportError('blocked')\n")
    return directory


@pytest.mark.parametrize(
    "busy",
    [pytest.param(False, marks=pytest.mark.slow, id="idle"), pytest.param(True, id="streaming")],
)
def test_ctrl_c_ends_every_process_in_time(start, busy):
    """As a terminal does it: the signal reaches the whole process group."""
    server = start(*SMALL)
    url = server.url()
    first = complete(url, prompt="def main", ignore_eos=True)
    assert first.status_code == 200, first.text
    assert first.json()["usage"]["completion_tokens"] == 8
    if busy:
        body = {"prompt": "x", "max_tokens": 240, "stream": True, "ignore_eos": True}
        streaming = threading.Event()

        def read():
            try:
                with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
                    for _ in response.iter_lines():
                        streaming.set()
            except httpx.HTTPError:
                pass

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert streaming.wait(30)
    pids = children(server.process.pid)
    assert len(ranks_of(server.process.pid)) == 3
    os.killpg(server.process.pid, signal.SIGINT)
    assert _end_within(server, STOP_S, pids) == 0, server.output()
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_ctrl_c_while_ranks_start(start):
    server = start(*SMALL)
    end = time.monotonic() + 60
    while not ranks_of(server.process.pid):
        assert time.monotonic() < end
        time.sleep(0.02)
    pids = children(server.process.pid)
    os.killpg(server.process.pid, signal.SIGINT)
    assert _end_within(server, STOP_S, pids) == 130, server.output()


def test_in_process_transport_when_asked_for_by_name(start, tmp_path):
    """Without NIXL, too; it says what it does."""
    server = start(*SMALL, "--transport", "in-process", path=[_no_nixl(tmp_path / "blocked")])
    url = server.url()
    assert "transport: in-process" in server.output()
    assert ranks_of(server.process.pid) == []
    answer = complete(url, prompt=[5, 6, 7, 8, 9], max_tokens=6, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 6
    server.interrupt()
    assert _end_within(server, STOP_S, []) == 0, server.output()


def test_k10_without_nixl_the_server_refuses_and_says_what_to_do(start, tmp_path):
    server = start(*SMALL, path=[_no_nixl(tmp_path / "blocked")])
    assert server.wait(60) == 1
    said = server.output().splitlines()[-1]
    assert said.startswith("serve_glm: NIXL is not installed")
    assert "kvflow[nixl]" in said
    assert "--transport in-process" in said
    assert "Traceback" not in server.output()
    assert server.leftovers() == []


def test_values_that_make_no_deployment_are_refused_in_one_line(start):
    server = start("--pcp", "4", "--dcp", "3")
    assert server.wait(60) == 1
    assert server.output() == "serve_glm: dcp 3 must divide pcp 4 x tp 1: it adds no ranks\n"
