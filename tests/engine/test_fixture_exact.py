"""Whole deployments against transformers: tokens and bytes, over the layouts of both sides."""

import asyncio
import itertools

import pytest
from engine_world import (
    Ranks,
    assert_idle,
    collect,
    config,
    differing_cells,
    greedy,
    one_rank_tokens,
    request,
    world,
)

from kvflow.testing import cells

GRID = [
    (pcp, dcp, *rest)
    for pcp in (1, 2, 4)
    for dcp in sorted({1, pcp})
    for rest in itertools.product((1, 3, 16), (4, 16), (8, 64))
]


def _pairs(combination):
    return set(itertools.combinations(enumerate(combination), 2))


def _pairwise(grid):
    """Few of the combinations, with every pair of values of two options that any of them has: each
    time the one with the most new pairs."""
    chosen, missing = [], set().union(*map(_pairs, grid))
    while missing:
        best = max(grid, key=lambda one: len(_pairs(one) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


FEW = _pairwise(GRID)


def test_the_few_combinations_have_every_pair_of_values():
    assert len(FEW) <= 16 < len(GRID)
    pairs = [p for one in GRID for p in itertools.combinations(enumerate(one), 2)]
    assert set(pairs) == {p for one in FEW for p in itertools.combinations(enumerate(one), 2)}


async def _serve(launch, prompts, ranks=None):
    async with world(launch, ranks) as deployment:
        requests = [request(k, ids, greedy(len(out))) for k, (ids, out) in prompts.items()]
        outputs = await asyncio.gather(*(collect(deployment, r) for r in requests))
        await assert_idle(deployment, -(-launch.decode_kv_tokens // launch.decode_block))
    return dict(zip(prompts, outputs, strict=True))


def _assert_exact(outputs, prompts):
    for name, (ids, tokens) in prompts.items():
        assert [o.token for o in outputs[name]] == tokens, name
        assert [o.position for o in outputs[name]] == [len(ids) + i for i in range(len(tokens))]
        assert [o.finish_reason for o in outputs[name]] == [None] * (len(tokens) - 1) + ["length"]
        reports = [o.transfer for o in outputs[name] if o.transfer is not None]
        assert len(reports) == 1
        assert reports[0]["verified"] is True


@pytest.mark.parametrize(
    ("pcp", "dcp", "interleave", "prefill_block", "decode_block"),
    [one if one in FEW else pytest.param(*one, marks=pytest.mark.slow) for one in GRID],
)
def test_tokens_equal_transformers(pcp, dcp, interleave, prefill_block, decode_block, prompts):
    """All prompts on all layouts; every pair of values is tried before the slow tier. All 32
    tokens at interleave 3, the first 8 elsewhere: what a layout does to a request is done once its
    first pages are decoded."""
    if interleave != 3:
        prompts = {name: (ids, out[:8]) for name, (ids, out) in prompts.items()}
    launch = config(
        pcp=pcp,
        dcp=dcp,
        interleave=interleave,
        prefill_block=prefill_block,
        decode_block=decode_block,
    )
    _assert_exact(asyncio.run(_serve(launch, prompts)), prompts)


@pytest.mark.parametrize("kv_dtype", ["fp8", "float32"])
@pytest.mark.parametrize(
    ("pcp", "dcp", "interleave", "prefill_block", "decode_block"),
    [(1, 1, 1, 16, 64), (2, 2, 3, 4, 8), (4, 4, 1, 16, 64), (4, 1, 1, 5, 8), (4, 2, 16, 4, 7)],
)
def test_decode_bytes_equal_prefill_bytes(
    pcp, dcp, interleave, prefill_block, decode_block, kv_dtype, prompts
):
    """Every token, layer and field, found by the oracle's arithmetic when the pull has ended; fp8
    index keys lie in planar pages. Tokens equal one rank's at the same format."""
    launch = config(
        pcp=pcp,
        dcp=dcp,
        interleave=interleave,
        prefill_block=prefill_block,
        decode_block=decode_block,
        kv_dtype=kv_dtype,
        dtype="float64",  # no rounding decides
    )
    few = {name: (prompts[name][0], prompts[name][1][:6]) for name in ("p12", "p48")}
    ranks = Ranks(check=True)
    outputs = asyncio.run(_serve(launch, few, ranks))
    assert ranks.wrong == []
    assert sorted(bound.src.lengths["latent.0"] for bound in ranks.pulls) == [12, 48]
    for name, (ids, tokens) in few.items():
        alone = one_rank_tokens(request(name, ids, greedy(len(tokens))), kv_dtype)
        assert [o.token for o in outputs[name]] == alone


def test_byte_comparison_sees_one_flipped_byte(prompts):
    """The check above fails for one byte of one field of one token."""
    ranks = Ranks()
    few = {"p12": (prompts["p12"][0], prompts["p12"][1][:3])}
    asyncio.run(_serve(config(pcp=2, dcp=2, kv_dtype="fp8"), few, ranks))
    bound, target = ranks.pulls[0], ranks.caches["decode-0"]
    sources = {r: ranks.caches[name] for r, name in enumerate(("prefill-0", "prefill-0.1"))}
    tokens = bound.plan.tokens
    assert differing_cells(bound.src, sources, bound.dst, target, tokens) == []
    scale = next(
        cell
        for cell in cells(bound.dst.layout, bound.dst, (7, 8), ("indexer.4",))
        if cell.field == "scale"
    )
    view = target.pages["indexer.4"]
    view.memory[view.offset + scale.block_id * view.block_stride + scale.at[0]] ^= 1
    wrong = differing_cells(bound.src, sources, bound.dst, target, tokens)
    assert [(w[1:]) for w in wrong] == [("indexer.4", "scale", 7)]
