"""Whole deployments with tiers behind a small pool: same tokens, same rows, longest hits."""

import asyncio
import tempfile

import pytest
from attrs import evolve
from engine_world import config, greedy, one_rank_tokens, reference_model, request, until, world
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_world import (
    Arrivals,
    differing,
    in_turn,
    launches,
    prompt_families,
    reference_rows,
    reusable,
    rounds,
)

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.tiers.memory import unit_nbytes

EXAMPLES = max(4, settings.default.max_examples // 20)


def host_nbytes(kv_dtype, block, num_units):
    """A host tier of so many units of the fixture model."""
    one = unit_nbytes(reference_model(kv_dtype, "float64").spec, block)
    return num_units * (one + 32) + 4096


@st.composite
def tiered(draw):
    """A pool of one prompt, so that whatever is hit comes from the host tier; and the tier's
    units, few or enough."""
    launch = draw(launches(prefill_kv_tokens=48))
    block, units = draw(st.sampled_from([2, 4, 5])), draw(st.sampled_from([3, 9, 200]))
    size = host_nbytes(launch.kv_dtype, block, units)
    return evolve(launch, prefix=PrefixConfig(block_size=block, host_nbytes=size)), units


@given(tiered(), prompt_families(num=3))
@settings(max_examples=EXAMPLES)
def test_tokens_rows_and_hits_through_the_host_tier(drawn, prompts):
    launch, units = drawn
    requests = [request(f"r{i}", p, greedy(2)) for i, p in enumerate(prompts)]
    arrivals = Arrivals()
    said, together, reused = asyncio.run(rounds(launch, requests, arrivals))
    first = []
    for i, one in enumerate(requests):
        wanted = one_rank_tokens(one, launch.kv_dtype)
        assert said[i][0] == wanted
        assert together["again-" + one.request_id] == wanted
        assert differing(arrivals.rows[i], reference_rows(one, launch.kv_dtype)) == []
        most = reusable(prompts[:i], one.prompt, launch.prefix.block_size, True, first)
        assert said[i][1] == most if units == 200 else said[i][1] <= most
        first.append(wanted[0])
    assert sum(reused.values()) >= sum(cached for _, cached in said)


@pytest.mark.parametrize(("pcp", "dcp"), [(1, 1), (4, 4), (4, 2)])
def test_device_hit_host_hit_and_the_rest_join_in_one_request(pcp, dcp):
    """The pool keeps the first blocks of a prompt, for the last ones are given away first; the host
    tier has them all."""
    prompt = list(range(100, 148))
    requests = [request("a", prompt), request("b", range(200, 232)), request("c", prompt)]
    prefix = PrefixConfig(block_size=4, host_nbytes=host_nbytes("float64", 4, 64))
    launch = config(
        pcp=pcp,
        dcp=dcp,
        prefill_block=4,
        dtype="float64",
        kv_dtype="float64",
        max_model_len=64,
        prefill_kv_tokens=64,
        prefix=prefix,
    )
    said, _, reused = asyncio.run(rounds(launch, requests, Arrivals()))
    assert said[2][0] == one_rank_tokens(requests[2], "float64")
    assert said[2][1] == 44
    assert reused["device"] > 0
    assert reused["host"] > 0


def disked(launch, directory, units=20, block=4):
    """The deployment with few units in front of a disk tier; half of them may wait to
    be written."""
    prefix = PrefixConfig(
        block_size=block,
        host_nbytes=host_nbytes(launch.kv_dtype, block, units),
        disk_directory=directory,
        disk_nbytes=1 << 24,
    )
    return evolve(launch, prefix=prefix)


async def settled(deployment):
    """Waits until nothing is on its way to a file."""
    await until(lambda: not deployment.prefill.tiers.num_under_way)
    deployment.prefill.audit()


@given(launches(prefill_kv_tokens=48), prompt_families(num=3))
@settings(max_examples=EXAMPLES)
def test_tokens_rows_and_hits_through_the_disk_tier(launch, prompts):
    """A tier of files behind small pools; then another engine, of one rank and other blocks, that
    finds the same directory."""
    requests = [request(f"r{i}", p, greedy(2)) for i, p in enumerate(prompts)]
    arrivals = Arrivals()

    async def run(launch):
        async with world(launch, arrivals) as deployment:
            said = []
            for one in requests:
                said += await in_turn(deployment, [one], arrivals)
                await settled(deployment)
            return said, dict(deployment.prefill.kv.num_reused)

    with tempfile.TemporaryDirectory() as directory:
        said, _ = asyncio.run(run(disked(launch, directory)))
        other = evolve(launch, pcp=1, dcp=1, interleave=1, prefill_block=7)
        again, reused = asyncio.run(run(disked(other, directory, units=64)))
    first = []
    for i, one in enumerate(requests):
        wanted = one_rank_tokens(one, launch.kv_dtype)
        assert said[i][0] == again[i][0] == wanted
        for rows in (arrivals.rows[i], arrivals.rows[len(requests) + i]):
            assert differing(rows, reference_rows(one, launch.kv_dtype)) == []
        assert said[i][1] == reusable(prompts[:i], one.prompt, 4, True, first)
        first.append(wanted[0])
    for i, one in enumerate(requests):
        assert again[i][1] == reusable(prompts, one.prompt, 4, True, first)
    assert sum(reused.values()) == sum(cached for _, cached in again)
    assert reused.get("disk") or not any(cached for _, cached in again)
