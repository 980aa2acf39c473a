"""Any deployment equals one rank computing each request alone, over drawn configurations."""

import asyncio

from attrs import frozen
from engine_world import assert_idle, config, one_rank_tokens, serve_all, world
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.engine.api import Request, SamplingParams
from kvflow.launch.config import LaunchConfig

EXAMPLES = max(15, settings.default.max_examples // 20)
VOCAB = 320


@frozen
class Scene:
    """A deployment and the requests it serves at the same time."""

    launch: LaunchConfig
    requests: tuple[Request, ...]


@st.composite
def samplings(draw):
    """Greedy or seeded, up to 5 tokens."""
    temperature = draw(st.sampled_from([0, 0.5, 1.0, 2.0]))
    top_p = draw(st.sampled_from([1.0, 0.9, 0.3]))
    seed = draw(st.integers(0, 2**63 - 1))
    return SamplingParams(draw(st.integers(1, 5)), temperature, top_p, seed, ignore_eos=True)


@st.composite
def scenes(draw):
    """Prompts of 1 to 30 tokens, often shorter than the number of chunks."""
    pcp = draw(st.sampled_from([1, 2, 4, 8]))
    launch = config(
        pcp=pcp,
        dcp=draw(st.sampled_from([d for d in (1, 2, 4, 8) if pcp % d == 0])),
        interleave=draw(st.integers(1, 20)),
        decode_ranks=draw(st.integers(1, 2)),
        prefill_block=draw(st.integers(1, 20)),
        decode_block=draw(st.integers(1, 20)),
        kv_dtype=draw(st.sampled_from(["fp8", "float64"])),
        dtype="float64",
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_model_len=40,
        prefill_kv_tokens=draw(st.integers(40, 80)),
        decode_kv_tokens=draw(st.integers(40, 80)),
    )
    token = st.integers(0, VOCAB - 1)
    prompts = st.one_of(
        st.lists(token, min_size=1, max_size=4), st.lists(token, min_size=1, max_size=30)
    )
    drawn = [(draw(prompts), draw(samplings())) for _ in range(draw(st.integers(1, 4)))]
    return Scene(launch, tuple(Request(f"r{i}", p, s) for i, (p, s) in enumerate(drawn)))


async def _serve(scene):
    async with world(scene.launch) as deployment:
        tokens = await serve_all(deployment, scene.requests)
        await assert_idle(
            deployment, -(-scene.launch.decode_kv_tokens // scene.launch.decode_block)
        )
    return tokens


@given(scenes())
@settings(max_examples=EXAMPLES)
def test_any_deployment_equals_one_rank(scene):
    tokens = asyncio.run(_serve(scene))
    for one in scene.requests:
        assert tokens[one.request_id] == one_rank_tokens(one, scene.launch.kv_dtype)


def test_tokens_do_not_depend_on_company(prompts):
    """A seeded request among others, twice in one batch, equals itself alone."""
    one = SamplingParams(12, 1.3, 0.95, seed=77, ignore_eos=True)
    other = SamplingParams(12, 1.3, 0.95, seed=78, ignore_eos=True)
    ids = prompts["p12"][0]
    requests = [Request("a", ids, one), Request("b", prompts["p48"][0], one)]
    requests += [Request("c", ids, one), Request("d", ids, other)]
    launch = config(pcp=2, dcp=2, dtype="float64", kv_dtype="float64", max_num_batched_tokens=7)
    tokens = asyncio.run(_serve(Scene(launch, tuple(requests))))
    assert tokens["a"] == tokens["c"] == one_rank_tokens(requests[0], "float64")
    assert tokens["b"] == one_rank_tokens(requests[1], "float64")
    assert tokens["d"] != tokens["a"]
