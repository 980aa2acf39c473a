"""Whole deployments with a prefix cache: same tokens, same rows, and the hits that must be."""

import asyncio

from engine_world import greedy, one_rank_tokens, request
from hypothesis import given, settings
from prefix_world import (
    Arrivals,
    differing,
    launches,
    prompt_families,
    reference_rows,
    reusable,
    rounds,
)

EXAMPLES = max(4, settings.default.max_examples // 20)


@given(launches(), prompt_families())
@settings(max_examples=EXAMPLES)
def test_tokens_rows_and_hits_are_those_of_no_cache(launch, prompts):
    """One after the other, then all at once: tokens as computed alone; the rows that reach decode
    ranks are those of one rank, the MTP layer's included; hits are as long as they can be."""
    requests = [request(f"r{i}", p, greedy(2)) for i, p in enumerate(prompts)]
    arrivals = Arrivals()
    said, together, reused = asyncio.run(rounds(launch, requests, arrivals))
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
