"""Any deployment with any options of both engines equals one rank computing each request alone."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from engine_scenes import assert_right, scenes, serve
from engine_world import config, one_rank_tokens, request, serve_all, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.engine.api import SamplingParams

CI = max(40, settings.default.max_examples // 20)
THOROUGH = 500


def _check(scene):
    tokens, hits = serve(scene)
    assert_right(scene, tokens)
    return hits


@given(st.data())
@settings(max_examples=CI, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_engines_equal_one_rank(data):
    with tempfile.TemporaryDirectory(prefix="kvflow-tier-") as directory:
        _check(data.draw(scenes(lambda: Path(directory))))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=THOROUGH, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_engines_equal_one_rank_thoroughly(data):
    with tempfile.TemporaryDirectory(prefix="kvflow-tier-") as directory:
        _check(data.draw(scenes(lambda: Path(directory))))


def test_tokens_do_not_depend_on_company(prompts):
    """A seeded request among others, twice in one batch, equals itself alone."""
    one = SamplingParams(12, 1.3, 0.95, seed=77, ignore_eos=True)
    other = SamplingParams(12, 1.3, 0.95, seed=78, ignore_eos=True)
    ids = prompts["p12"][0]
    requests = [request("a", ids, one), request("b", prompts["p48"][0], one)]
    requests += [request("c", ids, one), request("d", ids, other)]
    launch = config(pcp=2, dcp=2, dtype="float64", kv_dtype="float64", max_num_batched_tokens=7)

    async def run():
        async with world(launch) as deployment:
            return await serve_all(deployment, requests)

    tokens = asyncio.run(run())
    assert tokens["a"] == tokens["c"] == one_rank_tokens(requests[0], "float64")
    assert tokens["b"] == one_rank_tokens(requests[1], "float64")
    assert tokens["d"] != tokens["a"]
