"""Any deployment with any options of both engines equals one rank computing each request alone.

In float64, where tokens are compared exactly. What the scenes are to reach (hits in every tier,
preemptions, drafts that come true, clients that leave, stop tokens, rows taken from other engines,
prompts that decode computes) is counted, and a sweep that did not reach all of it fails.
"""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from engine_scenes import AIMS, scenes
from engine_world import config, one_rank_tokens, request, serve_all, world
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from scene_play import play

from kvflow.engine.api import SamplingParams

CI = {"any": 16, "tiers": 12, "crowd": 14, "turns": 20}
BATCH = 25
THOROUGH = {"any": 16, "tiers": 6, "crowd": 8, "turns": 12}
"""Batches: 1,050 scenes."""
REACHED = {
    "any": ("device hits", "cancellations", "stops", "accepted drafts"),
    "tiers": ("device hits", "host hits", "disk hits"),
    "crowd": (
        *("preemptions", "accepted drafts", "cancellations", "stops"),
        *(f"preemptions with {way}" for way in ("HiSparse", "DCP", "TP")),
        *(f"accepted drafts with {way}" for way in ("HiSparse", "DCP", "TP", "preemptions")),
    ),
    "turns": ("device hits", "peer hits", "reused_tokens", "local_prefills", "streamed parts"),
}


def sweep(aim, count, draw=lambda test: test):
    """Plays `count` scenes; what they reached together."""
    happened = Counter()

    @draw
    @given(st.data())
    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        print_blob=True,
    )
    def played(data):
        with tempfile.TemporaryDirectory(prefix="kvflow-tier-") as directory:
            happened.update(play(data.draw(scenes(aim, lambda: Path(directory)))))
            happened["scenes"] += 1

    played()
    return happened


def check(aim, count):
    """When a scene of chance did not come, more are drawn: up to three times as many."""
    happened, missed = Counter(), REACHED[aim]
    for _ in range(3):
        if missed:
            happened.update(sweep(aim, count))
            missed = [event for event in REACHED[aim] if not happened[event]]
    print(f"{aim}: {dict(sorted(happened.items()))}")
    assert happened["scenes"] >= count
    assert not missed, f"{happened['scenes']} scenes never reached {missed}: {happened}"


@pytest.mark.timeout(900)  # minutes on a busy machine
@pytest.mark.parametrize("aim", AIMS)
def test_any_engines_equal_one_rank(aim):
    check(aim, CI[aim])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("aim", "batch"), [(a, i) for a, n in THOROUGH.items() for i in range(n)])
def test_any_engines_equal_one_rank_thoroughly(aim, batch):
    """Every batch draws scenes of its own, the same in each run."""
    happened = sweep(aim, BATCH, seed(batch))
    print(f"{aim} {batch}: {dict(sorted(happened.items()))}")
    assert happened["scenes"] == BATCH


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
