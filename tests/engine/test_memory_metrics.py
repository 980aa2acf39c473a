"""What ranks hold, from the numbers that `/metrics` shows."""

import asyncio

import pytest
from engine_world import config, greedy, one_rank_tokens, request, serve_all, until, world

from kvflow.engine.access import AccessOptions
from kvflow.engine.prefix.config import PrefixConfig

PROMPT = tuple((13 * j + j * j) % 320 for j in range(200))


def _values(deployment, family):
    """Samples of one family by their labels' values."""
    for metric in deployment.metrics():
        if metric.name == family:
            return {tuple(s.labels.values()): s.value for s in metric.samples}
    raise AssertionError(f"no family {family}")


def _served(launch, length, max_tokens=3):
    """Tokens of one request, and the deployment's families of numbers afterwards."""
    one = request("a", PROMPT[:length], greedy(max_tokens))
    families = ("kvflow_prefill_blocks", "kvflow_rank", "kvflow_rank_total")

    async def run():
        async with world(launch) as deployment:
            tokens = (await serve_all(deployment, [one]))["a"]
            pool = deployment.prefill.pools["kv"]
            await until(lambda: pool.num_available == pool.num_blocks)
            await until(lambda: deployment.gauges.get("decode-0", {}).get("used_blocks.kv", 0) == 0)
            return tokens, {f: _values(deployment, f) for f in families}

    tokens, numbers = asyncio.run(run())
    assert tokens == one_rank_tokens(one, launch.kv_dtype)
    return numbers


@pytest.mark.parametrize(("pcp", "dcp"), [(2, 2), (4, 4), (8, 8), (4, 2)])
@pytest.mark.parametrize(("interleave", "block"), [(1, 4), (16, 4), (3, 5)])
def test_a_rank_stores_its_share_of_the_context(pcp, dcp, interleave, block):
    """L tokens over W shards: fewer than L / W + I + B on a rank; the blocks stay as a prefix."""
    launch = config(
        pcp=pcp, dcp=dcp, interleave=interleave, prefill_block=block, prefill_kv_tokens=512,
        kv_dtype="float64", dtype="float64", prefix=PrefixConfig(block_size=1),
    )  # fmt: skip
    blocks = _served(launch, 101, max_tokens=1)["kvflow_prefill_blocks"]
    held = blocks["prefill-0", "kv", "cached"] * block
    assert 101 / dcp - 1 <= held < 101 / dcp + interleave + block


@pytest.mark.parametrize("attention", ["whole", "union", "queries"])
@pytest.mark.parametrize("tokens", [24, pytest.param(64, marks=pytest.mark.slow)])
def test_workspaces_stay_below_their_formula(attention, tokens):
    access = AccessOptions(attention=attention, index="keys", workspace_tokens=tokens)
    launch = config(
        pcp=4, dcp=4, prefill_block=4, max_num_batched_tokens=40, kv_dtype="fp8", dtype="float64",
        access=access,
    )  # fmt: skip
    gauges = _served(launch, 200)["kvflow_rank"]
    for rank in launch.prefill_names:
        assert 0 < gauges[rank, "workspace_peak_nbytes"] <= gauges[rank, "workspace_limit_nbytes"]


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_hisparse_decodes_a_context_many_times_its_device_memory(num_drafts):
    """The device's latent pool is capped; the host holds a context 8 times larger and more. (With
    top-k 16 a query's rows are 16; the cap is what 2 tail pages and the hot rows take.)"""
    rows = 2 * 2 + (num_drafts + 2) * 16
    length = min(8 * rows, 700)
    prompt = tuple((13 * j + j * j) % 320 for j in range(length))
    launch = config(
        decode_block=2, hisparse=True, max_num_seqs=1, num_drafts=num_drafts, max_model_len=768,
        prefill_kv_tokens=768, decode_kv_tokens=768, kv_dtype="fp8", dtype="float64",
    )  # fmt: skip
    one = request("a", prompt, greedy(9))

    async def run():
        async with world(launch) as deployment:
            tokens = (await serve_all(deployment, [one]))["a"]
            await until(lambda: deployment.gauges["decode-0"]["seats_used"] == 0)
            return tokens, _values(deployment, "kvflow_rank"), deployment.prefill.layout.spec

    tokens, gauges, spec = asyncio.run(run())
    assert tokens == one_rank_tokens(one, "fp8")
    per_token = sum(spec[c].record.page_nbytes(1) for c in spec.select(kind="latent"))
    cap = gauges["decode-0", "device_latent_cap_nbytes"]
    assert gauges["decode-0", "device_latent_nbytes"] <= cap == rows * per_token
    assert length * per_token >= 8 * cap
