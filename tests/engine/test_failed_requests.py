"""Logits that are not finite, in a deployment: their request ends with an error that says so, and
nothing else does."""

import asyncio
import shutil

import pytest
import torch
from attrs import evolve
from engine_world import (
    TINY,
    assert_idle,
    config,
    greedy,
    one_rank_tokens,
    request,
    serve_all,
    until,
    world,
)
from safetensors.torch import load_file, save_file

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import KvflowError

BAD = 319
EMBEDDING = "model.embed_tokens.weight"
GOOD = [request(f"good-{n}", range(n, 2 * n), greedy(5)) for n in (9, 30, 41)]


def spoilt(directory, token):
    """The fixture, with an embedding that is no numbers."""
    shutil.copytree(TINY, directory, dirs_exist_ok=True)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    tensors[EMBEDDING][token] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


def launch(directory, token, **changes):
    wide = {"kv_dtype": "float64", "dtype": "float64", "prefill_block": 4, "decode_block": 4}
    wide |= {
        "prefix": PrefixConfig(True, host_nbytes=1 << 22),
        "max_num_batched_tokens": 16,
        "num_drafts": 2,
    }
    return evolve(config(**wide | changes), model=spoilt(directory, token))


async def failure(deployment, one):
    """The tokens that came before, and the error."""
    tokens = []
    try:
        async for output in deployment.generate(one):
            tokens += [output.token]
    except KvflowError as error:
        return tokens, str(error)
    raise AssertionError(f"{one.request_id} has not failed")


async def play(directory, token, bad, **changes):
    """What one of several requests says, twice, and that the others have their tokens."""
    start = launch(directory, token, **changes)
    async with world(start) as deployment:
        said = []
        for _ in range(2):
            found, tokens = await asyncio.gather(
                failure(deployment, bad), serve_all(deployment, GOOD)
            )
            assert tokens == {g.request_id: one_rank_tokens(g, "float64") for g in GOOD}
            said.append(found)
        assert await deployment.healthy()
        if not said[0][0]:
            for engine in deployment.prefills.values():
                chain = engine.kv.of(bad).chain
                assert engine.kv.cache.index.match(chain, len(bad.prompt)).length == 0
                assert engine.tiers.match(chain, 0, len(bad.prompt)) is None
            # nor on the decode engine, which had read what came before
            index = deployment.routing.router.index
            await until(lambda: not index.hits(chain.hashes))
        assert deployment.num_requests == {"finished": 6, "aborted": 0, "failed": 2}
        await assert_idle(deployment, -(-start.decode_kv_tokens // start.decode_block))
    assert said[0] == said[1]
    return said[0]


def test_a_prompt_that_is_no_numbers(tmp_path):
    """Its first chunks are known as a prefix until it has failed, and not behind."""
    bad = request("bad", [*range(100, 140), BAD, *range(140, 147)])
    tokens, why = asyncio.run(play(tmp_path, BAD, bad, pcp=2, dcp=2))
    assert (tokens, why) == ([], "the logits at position 47 are not finite")


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"hisparse": True, "decode_dcp": 2}, marks=pytest.mark.slow)]
)
def test_a_token_that_is_no_numbers_once_it_is_read(changes, tmp_path):
    """The decode engine ends it behind the tokens that came before."""
    bad = request("bad", range(200, 221), greedy(9))
    truth = one_rank_tokens(bad, "float64")
    tokens, why = asyncio.run(play(tmp_path, truth[2], bad, **changes))
    assert tokens == truth[:3]
    assert why == "the logits at position 23 are not finite"
