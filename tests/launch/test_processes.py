"""Deployments of real processes: gloo between prefill ranks, NIXL for KV, nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forks
import pytest
from launch_world import alive, collect, config, greedy, ranks_of, until

from kvflow.engine.api import Request
from kvflow.errors import KvflowError
from kvflow.launch.config import LaunchConfig
from kvflow.launch.processes import process_deployment

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _leaves_nothing(monkeypatch):
    """No rank, socket or shared memory outlives a test."""
    forks.context()  # its socket lies elsewhere, and stays
    shm = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="kv-") as place:
        monkeypatch.setattr("tempfile.tempdir", place)
        yield
        assert ranks_of(os.getpid()) == []
        assert list(Path(place).glob("kvflow-*")) == []
        assert set(os.listdir("/dev/shm")) <= shm


async def _exact(deployment, prompts):
    """Serves the three prompts at once; every token and transfer is right."""
    served = await asyncio.gather(
        *(collect(deployment, name, ids, len(out)) for name, (ids, out) in prompts.items())
    )
    for outputs, (name, (_, tokens)) in zip(served, prompts.items(), strict=True):
        assert [o.token for o in outputs] == tokens, name
        (report,) = [o.transfer for o in outputs if o.transfer is not None]
        assert report["verified"] is True
        assert report["nbytes"] > 0
    pool = deployment.prefill.pools["kv"]
    await until(lambda: pool.num_available == pool.num_blocks)
    deployment.prefill.audit()


def _slow(changes):
    """What the shapes that are left do not add to is tried in the slow tier."""
    return pytest.param(changes, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "changes",
    [
        _slow({"pcp": 4, "dcp": 4, "interleave": 1, "prefill_block": 16, "decode_block": 64}),
        _slow({"pcp": 2, "dcp": 1, "interleave": 3, "prefill_block": 4, "decode_block": 8}),
        {"pcp": 2, "dcp": 2, "interleave": 16, "prefill_block": 4, "decode_block": 8},
        _slow({"pcp": 1, "decode_dcp": 2, "decode_interleave": 3, "decode_block": 8}),
        {"pcp": 1, "tp": 2, "dcp": 2, "decode_tp": 2, "hisparse": True, "num_drafts": 3},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_tokens_equal_transformers(changes, prompts):
    async def run():
        launch = config(decode_ranks=2 if changes["pcp"] == 2 else 1, **changes)
        async with process_deployment(launch) as deployment:
            await _exact(deployment, prompts)

    asyncio.run(run())


@pytest.mark.slow
def test_an_abort_frees_both_sides_and_the_rest_goes_on(prompts):
    async def run():
        launch = config(pcp=2, dcp=2, prefill_block=16, decode_block=16)
        async with process_deployment(launch) as deployment:
            ids = prompts["p48"][0]
            generator = deployment.generate(Request("a", ids, greedy(400)))
            for _ in range(5):
                await anext(generator)
            await generator.aclose()
            assert deployment.num_requests["aborted"] == 1
            gauges = deployment.gauges
            await until(lambda: gauges["decode-0"]["used_blocks.kv"] == 0)
            blocks = launch.decode_kv_tokens // launch.decode_block
            left = gauges["decode-0"]["free_blocks.kv"] + gauges["decode-0"]["cached_blocks.kv"]
            assert left == blocks
            await _exact(deployment, {"p12": prompts["p12"]})

    asyncio.run(run())


@pytest.mark.parametrize(
    "victim", [pytest.param("decode-0", marks=pytest.mark.slow), "prefill-0.1"]
)
def test_a_killed_rank_fails_requests_and_health_and_the_block_still_ends(victim, prompts):
    async def run():
        launch = config(pcp=2, dcp=2)
        async with process_deployment(launch) as deployment:
            generator = deployment.generate(Request("a", prompts["p48"][0], greedy(400)))
            for _ in range(3):
                await anext(generator)
            os.kill(_pid_of(victim), signal.SIGKILL)
            with pytest.raises(KvflowError, match=rf"rank '{victim}'"):
                await asyncio.wait_for(_drain(generator), 20)
            assert not await deployment.healthy()
            with pytest.raises(KvflowError, match=victim):
                await collect(deployment, "b", prompts["p12"][0], 4)
            began = time.monotonic()
        assert time.monotonic() - began < 8

    asyncio.run(run())


async def _drain(generator):
    async for _ in generator:
        pass


def _pid_of(name):
    """By the name that multiprocessing gives its child in this process."""
    import multiprocessing

    return next(p.pid for p in multiprocessing.active_children() if p.name == name)


@pytest.mark.parametrize("deep", [False, True])
def test_ranks_end_when_their_parent_is_killed(start, deep):
    """Forked ones, and spawned ones where the fork server's socket would have too long a path."""
    server = start("--pcp", "2", "--dcp", "2", "--kv-dtype", "float32", deep=deep)
    server.url()
    ranks = ranks_of(server.process.pid)
    assert len(ranks) == 3
    server.process.kill()
    server.wait(10)
    end = time.monotonic() + 10
    while any(alive(pid) for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in ranks if alive(pid)] == []


def test_a_rank_that_cannot_start_says_why(tmp_path):
    async def run():
        broken = tmp_path / "model"
        broken.mkdir()
        for name in ("config.json", "generation_config.json"):
            (broken / name).write_bytes((config().model / name).read_bytes())
        launch = LaunchConfig(broken, max_model_len=64)
        with pytest.raises(
            KvflowError, match=r"(?s)rank '(prefill|decode)-0' failed: .*safetensors"
        ):
            async with process_deployment(launch):
                raise AssertionError("it started without weights")

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["pcp=4, dcp=4, decode_ranks=2", "decode_dcp=2"])
def test_a_deployment_that_ends_as_soon_as_it_has_started_says_nothing(changes):
    """No rank is still on its way to one that ends."""
    script = f"""
import asyncio
from kvflow.launch.config import LaunchConfig
from kvflow.launch.processes import process_deployment

async def main():
    async with process_deployment(LaunchConfig({str(config().model)!r}, {changes})):
        pass

if __name__ == "__main__":
    asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


SAY_HOW = """
import shutil, multiprocessing.util
from kvflow.launch.processes import _context

if __name__ == "__main__":
    print(_context().get_start_method())
    shutil.rmtree(multiprocessing.util.get_temp_dir())
    print(_context().get_start_method())
"""


@pytest.mark.parametrize(
    ("other", "said"), [(False, ["forkserver", "spawn"]), (True, ["spawn", "spawn"])]
)
def test_ranks_are_spawned_where_the_fork_server_is_gone_or_of_another_kvflow(
    tmp_path, other, said
):
    script, here = tmp_path / "say_how.py", tmp_path / "here"
    script.write_text(SAY_HOW)
    package = here / "kvflow" / "launch"
    here.mkdir()
    if other:
        package.mkdir(parents=True)
        for path in (package.parent / "__init__.py", package / "__init__.py"):
            path.touch()
        (package / "processes.py").write_text("def _probe(file): raise SystemExit(1)\n")
    run = subprocess.run(
        [sys.executable, script], cwd=here, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.split() == said, run.stderr
