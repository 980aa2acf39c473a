"""Whole deployments with a prefix cache: same tokens, same rows, and the hits that must be."""

import asyncio

from attrs import evolve
from engine_world import assert_idle, config, greedy, one_rank_tokens, request, serve_all, world
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_world import Arrivals, differing, in_turn, reference_rows, reusable

from kvflow.engine.prefix.config import PrefixConfig

EXAMPLES = max(8, settings.default.max_examples // 20)
VOCAB = 320


@st.composite
def prompt_families(draw, num=4, most=32):
    """Prompts that share beginnings of drawn lengths."""
    token = st.integers(0, VOCAB - 1)
    stems = [draw(st.lists(token, min_size=most, max_size=most)) for _ in range(2)]
    prompts = []
    for _ in range(num):
        stem = draw(st.sampled_from(stems))
        keep = draw(st.integers(1, most))
        tail = draw(st.lists(token, max_size=min(6, most - keep)))
        prompts.append(tuple(stem[:keep] + tail))
    return prompts


@st.composite
def launches(draw, **changes):
    """Deployments of drawn shape whose prefill pool is small enough for evictions."""
    pcp = draw(st.sampled_from([1, 2, 4]))
    drawn = {
        "pcp": pcp,
        "dcp": draw(st.sampled_from([d for d in (1, 2, 4) if pcp % d == 0])),
        "interleave": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "prefill_block": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "decode_block": 8,
        "kv_dtype": draw(st.sampled_from(["fp8", "float64"])),
        "dtype": "float64",
        "max_num_batched_tokens": draw(st.sampled_from([7, 16, 64])),
        "max_model_len": 48,
        "prefill_kv_tokens": draw(st.sampled_from([48, 96, 400])),
        "decode_kv_tokens": 96,
        "prefix": PrefixConfig(block_size=draw(st.sampled_from([None, 2, 4, 5]))),
    }
    return config(**(drawn | changes))


async def _rounds(launch, requests, arrivals):
    async with world(launch, arrivals) as deployment:
        said = await in_turn(deployment, requests)
        await assert_idle(deployment, -(-launch.decode_kv_tokens // launch.decode_block))
        again = [evolve(one, request_id="again-" + one.request_id) for one in requests]
        together = await serve_all(deployment, again)
        await assert_idle(deployment, -(-launch.decode_kv_tokens // launch.decode_block))
        return said, together, dict(deployment.prefill.num_reused)


@given(launches(), prompt_families())
@settings(max_examples=EXAMPLES)
def test_tokens_rows_and_hits_are_those_of_no_cache(launch, prompts):
    """One after the other, then all at once: tokens as computed alone; the rows that reach decode
    ranks are those of one rank, the MTP layer's included; hits are as long as they can be."""
    requests = [request(f"r{i}", p, greedy(2)) for i, p in enumerate(prompts)]
    arrivals = Arrivals()
    said, together, reused = asyncio.run(_rounds(launch, requests, arrivals))
    block = launch.prefix.block_size or launch.prefill_block
    first = []
    for i, one in enumerate(requests):
        wanted = one_rank_tokens(one, launch.kv_dtype)
        assert said[i][0] == wanted
        assert together["again-" + one.request_id] == wanted
        assert differing(arrivals.rows[i], reference_rows(one, launch.kv_dtype)) == []
        most = reusable(prompts[:i], one.prompt, block, True, first)
        assert said[i][1] == most if launch.prefill_kv_tokens == 400 else said[i][1] <= most
        first.append(wanted[0])
    assert reused["device"] >= sum(cached for _, cached in said)
