"""Decode groups: several ranks that share a request's KV, and requests that are preempted."""

import asyncio

import pytest
from engine_world import (
    Ranks,
    assert_idle,
    config,
    greedy,
    one_rank_tokens,
    request,
    serve_all,
    until,
    world,
)

from kvflow.engine.api import SamplingParams

PROMPTS = [tuple((7 * i + 3 * j) % 320 for j in range(n)) for i, n in enumerate((23, 9, 1, 16))]


def _requests(max_tokens=6):
    seeded = SamplingParams(max_tokens, 1.1, 0.9, seed=5, ignore_eos=True)
    return [
        request(f"r{i}", p, seeded if i % 2 else greedy(max_tokens)) for i, p in enumerate(PROMPTS)
    ]


def _serve(launch, requests, ranks=None):
    async def run():
        async with world(launch, ranks) as deployment:
            tokens = await serve_all(deployment, requests)
            blocks = -(-launch.decode_kv_tokens // launch.decode_dcp // launch.decode_block)
            await assert_idle(deployment, blocks)
            counters = dict(deployment.counters)
        return tokens, counters

    return asyncio.run(run())


@pytest.mark.parametrize(("dcp", "interleave", "block"), [(2, 1, 4), (4, 3, 4), (2, 16, 5)])
def test_a_group_that_shares_the_cache_equals_one_rank(dcp, interleave, block):
    launch = config(
        pcp=2,
        dcp=2,
        decode_dcp=dcp,
        decode_interleave=interleave,
        decode_block=block,
        kv_dtype="float64",
        dtype="float64",
    )
    ranks = Ranks()
    launch_requests = _requests()

    async def run():
        async with world(launch, ranks) as deployment:
            tokens = await serve_all(deployment, launch_requests)
            await until(lambda: deployment.prefill.pools["kv"].num_free > 0)
            deployment.prefill.audit()
        return tokens

    tokens = asyncio.run(run())
    for one in launch_requests:
        assert tokens[one.request_id] == one_rank_tokens(one, "float64")
    # every rank of the group pulled its own shard of every request
    assert len(ranks.pulls) == dcp * len(PROMPTS)


@pytest.mark.parametrize("kv_tokens", [28, 36, 44])
def test_preempted_requests_go_on_with_the_same_tokens(kv_tokens):
    """The pool holds one or two of four growing requests: the others are preempted and computed
    again from their tokens."""
    launch = config(
        decode_block=4,
        decode_kv_tokens=kv_tokens,
        max_model_len=28,
        kv_dtype="float64",
        dtype="float64",
        max_num_batched_tokens=9,
    )
    requests = [request(f"r{i}", PROMPTS[1][: 9 - i], greedy(18)) for i in range(4)]
    tokens, counters = _serve(launch, requests)
    for one in requests:
        assert tokens[one.request_id] == one_rank_tokens(one, "float64")
    assert counters["decode-0"]["preemptions"] > 0
    assert counters["decode-0"]["recomputed_tokens"] >= counters["decode-0"]["preemptions"]
