"""Engines of one deployment on several hosts, as their ranks said when they joined."""

import asyncio
import contextlib
import functools
from pathlib import Path
from unittest import mock

from engine_world import collect, config, greedy, one_rank_tokens, request, until, world

from kvflow.engine.front.routing import Routing
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig
from kvflow.launch.hosts import engine_hosts, engine_ranks
from kvflow.router.config import Load

IDS = tuple((11 * j + j * j) % 320 for j in range(40))
HOSTS = {"prefill-0": "x", "decode-0": "x", "decode-1": "y", "decode-2": "y"}
NO_ROOM = Load(1 << 41)


def launch(**changes):
    blocks = {"prefill_block": 4, "decode_block": 4, "decode_ranks": 3}
    exact = {"kv_dtype": "float64", "dtype": "float64"}
    return config(**(blocks | exact | changes))


@contextlib.asynccontextmanager
async def on_hosts(launch, hosts=HOSTS, host="x"):
    """As `world`, of a deployment whose ranks joined from these hosts."""
    deployment = functools.partialmethod(LaunchConfig.deployment, hosts=hosts, host=host)
    with mock.patch.object(LaunchConfig, "deployment", deployment):
        async with world(launch) as started:
            yield started


async def num_sources(deployment, name, one):
    """Serves a request on this decode engine; from how many engines that took rows of it."""
    before = deployment.counters.get(name, {}).get("transfers", 0)
    with mock.patch.object(
        Routing, "decode_changed"
    ):  # what they report of their load is not heard
        for other in ("decode-0", "decode-1", "decode-2"):
            load = NO_ROOM if other != name else Load(0)
            deployment.routing.router.on_load(other, load)
        outputs = await collect(deployment, one)
    assert [o.token for o in outputs] == one_rank_tokens(one, "float64")
    await until(lambda: not deployment.journeys.live)
    return deployment.counters[name]["transfers"] - before


def test_an_engine_is_where_all_its_ranks_are():
    two = launch(pcp=2, decode_dcp=2, decode_ranks=1)
    ranks = [name for names in engine_ranks(two).values() for name in names]
    assert ranks == ["prefill-0", "prefill-0.1", "decode-0", "decode-0.1"]
    hosts = dict(zip(ranks, ["b", "a", "c", "c"], strict=True))
    assert engine_hosts(two, hosts) == {"prefill-0": "a, b", "decode-0": "c"}


def test_a_sibling_lends_on_its_own_host_only():
    """decode-1 has the prompt; decode-2 beside it takes it from there, decode-0 elsewhere takes all
    from the prefill engine."""

    async def run():
        async with on_hosts(launch()) as deployment:
            engines = {e.name: e.host for e in deployment.routing.router.engines}
            assert engines == HOSTS
            first = request("a", IDS[:24], greedy(2))
            assert await num_sources(deployment, "decode-1", first) == 1
            away = request("b", (*IDS[:24], 1, 2, 3), greedy(2))
            assert await num_sources(deployment, "decode-0", away) == 1
            near = request("c", (*IDS[:24], 4, 5, 6), greedy(2))
            assert await num_sources(deployment, "decode-2", near) == 2

    asyncio.run(run())


def test_only_decode_engines_of_the_front_s_host_map_its_tiers():
    prefix = PrefixConfig(block_size=4, host_nbytes=1 << 22)

    async def run():
        async with on_hosts(launch(prefix=prefix)) as deployment:
            for i, name in enumerate(("decode-0", "decode-1", "decode-2")):
                await num_sources(deployment, name, request(name, IDS[i : i + 24], greedy(2)))
            maps = Path("/proc/self/maps").read_text().splitlines()
            return sum("kvflow-host-tier" in line and "r--s" in line for line in maps)

    assert asyncio.run(run()) == 1
