"""What serving systems of today refuse, row by row of the list of facts: the rows about engines,
each with a figure."""

import asyncio

import pytest
from engine_world import config, greedy, one_rank_tokens, request, serve_all, until, world

from kvflow.engine.access import AccessOptions
from kvflow.engine.prefix.config import PrefixConfig

LONG = tuple((11 * j + j * j) % 320 for j in range(150))


def _launch(**changes):
    return config(kv_dtype="fp8", dtype="float64", **changes)


def _serve(launch, waves):
    """Tokens by request, of waves served one after the other; and the deployment's numbers."""

    async def run():
        tokens = {}
        async with world(launch) as deployment:
            for wave in waves:
                tokens |= await serve_all(deployment, wave)
            pool = deployment.prefill.pools["kv"]
            await until(lambda: pool.num_available == pool.num_blocks)
            await until(lambda: "decode-0" in deployment.gauges)
            kv = deployment.prefill.kv
            units = kv.tiers.units() if kv.tiers is not None else {}
            numbers = deployment.gauges | {}, deployment.counters | {}
        return tokens, dict(kv.num_reused), units, numbers

    return asyncio.run(run())


def _check(launch, waves, tokens):
    for one in (r for wave in waves for r in wave):
        assert tokens[one.request_id] == one_rank_tokens(one, launch.kv_dtype)


# --- row 2: HiSparse with W > 1 -------------------------------------------------------------------


def test_row_2_hisparse_over_sharded_decode_ranks():
    """150 tokens decode over 2 ranks whose device holds 44 latent rows a layer each: 2 tail pages
    of 4, and hot rows for two queries of 16 + one of room (the figure: 1.7x a rank's share of the
    context at W = 2, whatever the context's length)."""
    launch = _launch(decode_dcp=2, decode_block=4, hisparse=True, max_num_seqs=1)
    waves = [[request("a", LONG, greedy(12))]]
    tokens, _, _, (gauges, counters) = _serve(launch, waves)
    _check(launch, waves, tokens)
    for rank in ("rank0", "rank1"):
        assert gauges["decode-0"][f"{rank}.device_latent_nbytes"] > 0
        assert counters["decode-0"][f"{rank}.hisparse_misses"] > 0


# --- row 10: a portable tier without copies of replicas -------------------------------------------


@pytest.mark.parametrize(("pcp", "dcp", "interleave"), [(4, 1, 1), (4, 2, 3), (2, 2, 16)])
def test_row_10_the_tier_holds_a_prefix_once(pcp, dcp, interleave):
    """The figure: 1 copy of each token, where P replicas would store P/W."""
    prefix = PrefixConfig(block_size=10, host_nbytes=1 << 22)
    launch = _launch(pcp=pcp, dcp=dcp, interleave=interleave, prefill_block=5, prefix=prefix)
    waves = [[request("a", LONG, greedy(2))]]
    tokens, _, units, _ = _serve(launch, waves)
    _check(launch, waves, tokens)
    assert sum(units["host"].values()) - units["host"]["free"] == 150 // 10


# --- row 13: packed rows, and only those that are read --------------------------------------------


def _attention_bytes(attention, waves):
    access = AccessOptions(attention=attention, index="keys")
    launch = _launch(
        pcp=2, dcp=2, access=access, prefill_block=8, prefix=PrefixConfig(block_size=8)
    )
    tokens, _, _, (_, counters) = _serve(launch, waves)
    _check(launch, waves, tokens)
    return counters["prefill-0"]["access_received_nbytes.attention_rows"]


def test_row_13_gathers_move_packed_rows_and_only_chosen_ones():
    """4 new tokens on 144 cached ones, of which each reads 16. The figure: chosen rows are less
    than half of the packed context, and packed rows are what a record says, no upconverted ones."""
    waves = [[request("a", LONG[:144], greedy(2))], [request("b", LONG[:148], greedy(2))]]
    whole, union = (
        _attention_bytes(way, waves) - _attention_bytes(way, waves[:1])
        for way in ("whole", "union")
    )
    assert 0 < union < 0.5 * whole


# --- row 14: hits at the granularity of a block ---------------------------------------------------


@pytest.mark.parametrize("drafted", [0, 3])
def test_row_14_a_hit_ends_at_any_block(drafted):
    """Blocks of 4 over 4 shards: a virtual block is 16. The figure: 148 of 150 tokens reused,
    where whole virtual blocks give 144."""
    launch = _launch(pcp=4, dcp=4, prefill_block=4, num_drafts=drafted)
    waves = [[request("a", LONG, greedy(3))], [request("b", LONG, greedy(3))]]
    tokens, reused, _, _ = _serve(launch, waves)
    _check(launch, waves, tokens)
    assert reused["device"] == 148


# --- row 15: what the MTP layer loses of a hit ----------------------------------------------------


def test_row_15_the_draft_layer_costs_one_token_not_a_unit():
    """Two prompts equal in 100 tokens and different in the next. The figure: 99 tokens reused,
    where a dropped unit of 16 leaves 80. The token before the fork is computed anew: its MTP row
    depends on the one behind."""
    other = (*LONG[:100], 7, 8, 9)
    assert other[100] != LONG[100]
    launch = _launch(pcp=4, dcp=4, prefill_block=4, num_drafts=2)
    waves = [[request("a", LONG, greedy(2))], [request("b", other, greedy(6))]]
    tokens, reused, _, _ = _serve(launch, waves)
    _check(launch, waves, tokens)
    assert reused["device"] == 99
