"""Rows that a prefill rank moves while it computes: a part that is asked for during a step is over,
and whoever waits for it knows, before that step ends; what is left at the end is the last chunk."""

import asyncio
import threading
import time

import pytest
from engine_world import assert_idle, collect, config, greedy, one_rank_tokens, request, world

from kvflow.engine.runner import StepRunner
from kvflow.transfers.executors.local import LocalEndpoint
from kvflow.transfers.executors.nixl import NixlEndpoint, settle_environment
from kvflow.transfers.planner import plan_transfer

settle_environment()
KEY = bytes(range(32))
CHUNK, LENGTH = 16, 56
ENDPOINTS = {
    "in process": LocalEndpoint,
    "nixl": lambda cache, fabric: NixlEndpoint(cache, KEY, staging_nbytes=1 << 16),
}


class Steps:
    """Every prefill step ends only after all rows of the steps before it have moved."""

    def __init__(self, monkeypatch):
        self.deployment, self.moved = None, []
        step = StepRunner.step

        def held(runner, items):
            tokens = step(runner, items)
            if threading.current_thread().name.startswith("prefill"):
                self.wait(items[0].start)
            return tokens

        monkeypatch.setattr(StepRunner, "step", held)

    def wait(self, start):
        end = time.monotonic() + 20
        while self.arrived() < start:
            assert time.monotonic() < end, f"{self.arrived()} of {start} rows have moved"
            time.sleep(0.002)
        self.moved.append(start)

    def arrived(self):
        return self.deployment.gauges.get("decode-0", {}).get("kv_tokens", 0)


@pytest.mark.parametrize("world_of", ENDPOINTS)
@pytest.mark.parametrize("transfer", ["push", pytest.param("pull", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream_layers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_at_the_end_the_last_chunk_is_left(world_of, transfer, stream_layers, monkeypatch):
    """A rank that took up a part, or answered it, only between steps would wait for ever."""
    launch = config(
        pcp=2,
        dcp=2,
        kv_dtype="float64",
        dtype="float64",
        prefill_block=4,
        max_num_batched_tokens=CHUNK,
        transfer=transfer,
        stream_layers=stream_layers,
    )
    steps = Steps(monkeypatch)
    one = request("a", range(7, 7 + LENGTH), greedy(5))

    async def run():
        async with world(launch, endpoint=ENDPOINTS[world_of]) as deployment:
            steps.deployment = deployment
            outputs = await collect(deployment, one)
            assert [o.token for o in outputs] == one_rank_tokens(one, "float64")
            await assert_idle(deployment, -(-launch.decode_kv_tokens // launch.decode_block))
            layouts = deployment.prefill.layout, deployment.prefill.target
            return next(o.transfer for o in outputs if o.transfer), layouts

    report, layouts = asyncio.run(run())
    whole, last = (plan_transfer(*layouts, tokens).nbytes for tokens in ((0, LENGTH), (48, LENGTH)))
    assert steps.moved == [start for start in range(0, LENGTH, CHUNK) for _ in range(2)]
    assert report["nbytes"] == whole
    assert report["verified"] is True
    if stream_layers:
        assert report["late_nbytes"] <= last
    else:
        assert report["late_nbytes"] == last
