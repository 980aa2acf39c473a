"""Whole deployments with a host tier behind a small pool: same tokens, same rows, longest hits."""

import asyncio

import pytest
from attrs import evolve
from engine_world import config, greedy, one_rank_tokens, reference_model, request
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_world import (
    Arrivals,
    differing,
    launches,
    prompt_families,
    reference_rows,
    reusable,
    rounds,
)

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.tiers.memory import unit_nbytes

EXAMPLES = max(8, settings.default.max_examples // 20)


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


@given(tiered(), prompt_families())
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
