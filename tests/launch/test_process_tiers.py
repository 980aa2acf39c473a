"""Tiers of a deployment of real processes: one host mapping that all ranks share, files by NIXL."""

import asyncio
import os

import pytest
from launch_world import collect, config, ranks_of, until

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.processes import process_deployment
from kvflow.router.config import Load

pytestmark = pytest.mark.processes
GIB = 1 << 30


async def _serve(launch, prompts):
    """Serves prompts one after the other; returns the tokens reused of each, and by tier."""
    async with process_deployment(launch) as deployment:
        cached = []
        for i, (ids, tokens) in enumerate(prompts):
            outputs = await collect(deployment, f"r{i}", ids, len(tokens) or 2)
            assert not tokens or [o.token for o in outputs] == tokens
            assert all(o.transfer is None or o.transfer["verified"] for o in outputs)
            cached.append(outputs[0].cached_tokens)
        tiers = deployment.prefill.tiers
        await until(lambda: not tiers.num_under_way)
        pool = deployment.prefill.pools["kv"]
        await until(lambda: pool.num_available == pool.num_blocks)
        deployment.prefill.audit()
        samples = {m.name: m.samples for m in deployment.metrics()}
        reused = {s.labels["tier"]: s.value for s in samples["kvflow_prefix_reused_tokens_total"]}
        return cached, reused


def test_prefixes_come_from_pools_host_and_files_and_survive_a_restart(tmp_path, prompts):
    """PCP 4 x DCP 4 stores; under pressure the host tier serves; then PCP 2 x DCP 1 with other
    blocks finds the files."""
    shm = set(os.listdir("/dev/shm"))
    prefix = PrefixConfig(
        block_size=8, host_nbytes=GIB // 16, disk_directory=tmp_path / "tier", disk_nbytes=GIB
    )
    launch = config(
        pcp=4,
        dcp=4,
        prefill_block=4,
        decode_block=16,
        max_model_len=96,
        prefill_kv_tokens=96,
        prefix=prefix,
    )
    long, greedy = prompts["p48"]
    pressure = [(tuple(7 * i % 300 for i in range(j, j + 90)), []) for j in (1, 100)]
    served = [(long, greedy), (long, greedy), *pressure, (long, greedy)]
    cached, reused = asyncio.run(_serve(launch, served))
    assert cached == [0, 40, 0, 0, 40]
    assert reused["device"] == 40
    assert reused["host"] == 40
    other = config(pcp=2, dcp=1, prefill_block=16, decode_block=8, prefix=prefix)
    cached, reused = asyncio.run(_serve(other, [(long, greedy), ((*long, greedy[0], 5), [])]))
    assert cached == [40, 48]
    assert reused["disk"] == 40
    assert sum(reused.values()) == 88
    assert ranks_of(os.getpid()) == []
    assert set(os.listdir("/dev/shm")) <= shm


@pytest.mark.slow
def test_a_decode_group_restores_what_a_prefill_group_has_stored(prompts):
    """Processes of two engines map the tier of a third: PCP 4 x DCP 4 stores, a HiSparse group of 2
    takes its prompt from there and computes the rest."""
    ids, greedy = prompts["p48"]
    launch = config(
        pcp=4,
        dcp=4,
        prefill_block=4,
        decode_block=16,
        decode_dcp=2,
        hisparse=True,
        max_model_len=96,
        prefill_kv_tokens=96,
        decode_kv_tokens=96,
        local_prefill_tokens=95,
        prefix=PrefixConfig(block_size=8, host_nbytes=GIB // 16),
    )

    async def run():
        async with process_deployment(launch) as deployment:
            router = deployment.routing.router
            await collect(deployment, "a", ids, len(greedy))
            await collect(deployment, "b", tuple(7 * i % 300 for i in range(85)), 11)
            await until(lambda: not deployment.journeys.live)
            router.on_load("prefill-0", Load(1 << 41))  # no room
            outputs = await collect(deployment, "c", ids, len(greedy))
            await until(lambda: not deployment.prefill.tiers.num_under_way)
            deployment.prefill.audit()
            counters = deployment.counters["decode-0"]
            return [o.token for o in outputs], outputs[0].cached_tokens, counters

    tokens, cached, counters = asyncio.run(run())
    assert tokens == greedy
    assert cached == 40
    assert counters["local_prefills"] == 1
    assert counters["restored_host_tokens"] == 40 - counters["reused_tokens"] > 0
    assert ranks_of(os.getpid()) == []
