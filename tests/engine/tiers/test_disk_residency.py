"""A router knows what files hold, from the moment their deployment has started."""

import asyncio
import threading
from pathlib import Path
from unittest import mock

from engine_world import collect, config, greedy, one_rank_tokens, request, until, world
from test_tier_engine import host_nbytes, settled

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.router.config import EngineInfo, RouterConfig
from kvflow.router.policy import Router
from kvflow.transfers.executors.plain_files import PlainFiles

PROMPT = tuple((11 * j + j * j) % 320 for j in range(40))
ONE = request("a", PROMPT, greedy(2))
BLOCK = 4


def launch(directory, **changes):
    host = host_nbytes("fp8", BLOCK, 20)
    prefix = PrefixConfig(True, BLOCK, host, Path(directory), 1 << 24)
    sizes = {"max_model_len": 64, "prefill_kv_tokens": 64, "decode_kv_tokens": 64}
    values = {"pcp": 2, "dcp": 2, "kv_dtype": "fp8", "dtype": "float64", "prefix": prefix}
    return config(**(sizes | values | changes))


def hashes(deployment, prompt):
    return deployment.routing.hasher.chain(prompt).hashes


def held(deployment, prompt=PROMPT):
    """Blocks by tier of what the deployment's own router knows of a prompt."""
    index = deployment.routing.router.index
    return {name: dict(hit.tiers) for name, hit in index.hits(hashes(deployment, prompt)).items()}


async def served(deployment, one=ONE):
    outputs = await collect(deployment, one)
    assert [o.token for o in outputs] == one_rank_tokens(one, "fp8")
    await until(lambda: not deployment.journeys.live)
    await settled(deployment)
    return outputs[0].cached_tokens


def seen_from_outside(logs):
    """A router over whole deployments that is told what each says it holds."""
    router = Router(RouterConfig(BLOCK))
    for name, log in logs.items():
        router.register(EngineInfo(name, "both", BLOCK, 1 << 20))
        for events in log.snapshot().events:
            router.on_events(name, events)
    return router


def test_a_restarted_deployment_gets_the_prompts_that_its_files_hold(tmp_path):
    """Two deployments; one had the prompt before both were started anew."""

    async def run():
        for name in ("a", "b"):
            async with world(launch(tmp_path / name)) as deployment:
                assert held(deployment) == {}
                if name == "a":
                    await served(deployment)
                    assert deployment.kv_events().num_blocks()["disk"] == 10
        async with world(launch(tmp_path / "a")) as a, world(launch(tmp_path / "b")) as b:
            assert held(a) == {"prefill-0": {"disk": 10}}
            assert held(b) == {}
            router = seen_from_outside({"b": b.kv_events(), "a": a.kv_events()})
            route = router.route("r", hashes(a, PROMPT), len(PROMPT))
            assert (route.decode, route.cached_tokens) == ("a", 39)
            assert await served(a) == 36  # of 39: whole blocks
            reused = {tier: n for tier, n in a.prefill.kv.num_reused.items() if n}
            assert reused == {"disk": 36}
            assert held(a)["prefill-0"] == {"device": 10}

    asyncio.run(run())


def test_the_router_is_told_what_came_to_files_and_went_behind_the_last_step(tmp_path):
    """Files are written when no step runs any more. A reset deletes them."""

    async def run():
        gate, write = threading.Event(), PlainFiles.write

        def late(files, *args):
            assert gate.wait(20)
            write(files, *args)

        async with world(launch(tmp_path)) as deployment:
            router = deployment.routing.router
            with mock.patch.object(PlainFiles, "write", late):
                await collect(deployment, ONE)
                await until(lambda: not deployment.journeys.live)
                await asyncio.sleep(0.1)
                assert router.index.num_blocks("prefill-0", "disk") == 0
                gate.set()
                await settled(deployment)
            assert router.index.num_blocks("prefill-0", "disk") == 10
            assert deployment.kv_events().num_blocks() == {"device": 10, "host": 10, "disk": 10}
            assert deployment.reset_prefix_cache()["disk"] == 10
            assert router.index.num_blocks("prefill-0", "disk") == 0
            assert deployment.kv_events().num_blocks()["disk"] == 0

    asyncio.run(run())
