"""Drawn deployments for the sweep: every option of both engines, and requests in waves."""

import asyncio
import contextlib

import numpy as np
from attrs import evolve, frozen
from engine_world import config, one_rank_tokens, until, world
from hypothesis import strategies as st

from kvflow.engine.access import AccessOptions
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig

VOCAB = 320
MAX_LEN = 64
HELD = ("used_blocks", "quarantined_blocks")
UNIT_NBYTES = 1 << 14
"""About a unit of 4 tokens of the fixture model, in bytes: tiers of a few units."""


@frozen
class Arrival:
    """A request, and after how many tokens its client goes (None: it stays)."""

    request: Request
    cancel_after: int | None = None


@frozen
class Scene:
    """A deployment and waves of requests; those of a wave are served at the same time. `stored_by`
    is a deployment of another layout that serves the first wave, with the same disk tier."""

    launch: LaunchConfig
    waves: tuple[tuple[Arrival, ...], ...]
    stored_by: LaunchConfig | None = None


@st.composite
def samplings(draw):
    """Greedy or seeded, up to 8 tokens."""
    temperature = draw(st.sampled_from([0, 0, 0.5, 1.0, 2.0]))
    top_p = draw(st.sampled_from([1.0, 0.9, 0.3]))
    seed = draw(st.integers(0, 2**63 - 1))
    return SamplingParams(draw(st.integers(1, 8)), temperature, top_p, seed, ignore_eos=True)


def _divisors(n):
    return [d for d in (1, 2, 4, 8) if n % d == 0]


@st.composite
def accesses(draw):
    """How cached context is reached."""
    return AccessOptions(
        attention=draw(st.sampled_from(["auto", "whole", "union", "queries"])),
        index=draw(st.sampled_from(["auto", "keys", "queries"])),
        workspace_tokens=draw(st.sampled_from([16, 33, 1 << 18])),
        overlap=draw(st.booleans()),
    )


@st.composite
def prefill_options(draw):
    """The prefill engine's part of a launch."""
    pcp, tp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 1, 2]))
    if pcp * tp > 8:
        tp = 1
    block = draw(st.integers(1, 12))
    return {
        "pcp": pcp,
        "tp": tp,
        "dcp": draw(st.sampled_from(_divisors(pcp * tp))),
        "interleave": draw(st.integers(1, 20)),
        "prefill_block": block,
        "prefill_kv_tokens": draw(st.sampled_from([MAX_LEN, MAX_LEN + 9, 3 * MAX_LEN])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 17, 40])),
        "access": draw(accesses()),
    }


@st.composite
def decode_options(draw):
    """The decode engine's part of a launch."""
    tp = draw(st.sampled_from([1, 1, 2]))
    dcp = draw(st.sampled_from([1, 1, 2, 4]))
    return {
        "decode_ranks": draw(st.integers(1, 2)),
        "decode_tp": tp,
        "decode_dcp": dcp,
        "decode_interleave": draw(st.integers(1, 20)),
        "decode_block": draw(st.integers(1, 12)),
        "decode_kv_tokens": draw(st.integers(MAX_LEN, 2 * MAX_LEN)),
        "decode_access": draw(accesses()),
        "num_drafts": draw(st.integers(0, 4)),
        "hisparse": draw(st.booleans()),
        "max_num_seqs": draw(st.integers(1, 4)),
    }


@st.composite
def prefixes(draw, block, directory):
    """Whether prefixes are reused, and from which tiers."""
    tier = draw(st.sampled_from(["none", "device", "device", "host", "disk"]))
    if tier == "none":
        return PrefixConfig(enabled=False)
    size = draw(st.sampled_from([None, 4]))
    host = draw(st.sampled_from([4, 30])) * UNIT_NBYTES if tier in ("host", "disk") else 0
    if tier != "disk":
        return PrefixConfig(block_size=size, host_nbytes=host)
    return PrefixConfig(True, 4, host, directory, 60 * UNIT_NBYTES)


def _words(seed, count):
    """Token ids out of a seed: long prompts without a long draw."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@st.composite
def waves(draw):
    """Prompts that begin alike, within a wave and from wave to wave."""
    token = st.integers(0, VOCAB - 1)
    stems = [_words(draw(st.integers(0, 2**32 - 1)), 40) for _ in range(2)]
    drawn = []
    for i in range(draw(st.integers(1, 3))):
        wave = []
        for j in range(draw(st.integers(1, 3))):
            stem = draw(st.sampled_from(stems))
            prompt = [*stem[: draw(st.integers(0, 40))], *draw(st.lists(token, max_size=12))]
            request = Request(f"r{i}.{j}", tuple(prompt or [1]), draw(samplings()))
            wave.append(Arrival(request, draw(st.sampled_from([None, None, None, 1, 3]))))
        drawn.append(tuple(wave))
    if draw(st.booleans()):
        drawn.append(tuple(_again(arrival) for arrival in drawn[0]))
    return tuple(drawn)


def _again(arrival):
    """The same prompt once more, when others may have taken its blocks."""
    name = arrival.request.request_id + " again"
    return Arrival(evolve(arrival.request, request_id=name))


@st.composite
def scenes(draw, directory):
    """`directory()` gives a new directory for a disk tier."""
    prefill = draw(prefill_options())
    prefix = draw(prefixes(prefill["prefill_block"], directory()))
    common = {
        "kv_dtype": draw(st.sampled_from(["fp8", "float64"])),
        "dtype": "float64",
        "max_model_len": MAX_LEN,
        "prefix": prefix,
    }
    launch = config(**prefill, **draw(decode_options()), **common)
    stored_by = None
    if prefix.disk_nbytes:
        stored_by = config(**draw(prefill_options()), **common)
    return Scene(launch, draw(waves()), stored_by)


async def _served(deployment, arrival):
    tokens = []
    async with contextlib.aclosing(deployment.generate(arrival.request)) as outputs:
        async for output in outputs:
            tokens.append(output.token)
            if len(tokens) == arrival.cancel_after:
                break
    return arrival.request.request_id, tokens


async def _waves(launch, waves):
    tokens = {}
    async with world(launch) as deployment:
        for wave in waves:
            tokens.update(await asyncio.gather(*(_served(deployment, a) for a in wave)))
        await _idle(deployment)
        hits = dict(deployment.prefill.kv.num_reused)
    return tokens, hits


async def _idle(deployment):
    """Every block is free, or a prefix that can be evicted, on both sides."""
    for pool in deployment.prefill.pools.values():
        await until(lambda p=pool: p.num_available == p.num_blocks)
    deployment.prefill.audit()
    await until(lambda: not any(_held(deployment, rank) for rank in deployment.decode_ranks))
    assert set(deployment._load.values()) == {0}
    assert not deployment._live


def _held(deployment, rank):
    """Blocks that a decode group still holds, as it last said."""
    gauges = deployment.gauges.get(rank, {})
    return [n for name, n in gauges.items() if name.split(".")[0] in HELD and n]


def serve(scene):
    """Tokens by request, and reused tokens by tier. The first wave is served by `stored_by` too."""
    hits = {}
    if scene.stored_by is not None:
        asyncio.run(_waves(scene.stored_by, scene.waves[:1]))
    tokens, hits = asyncio.run(_waves(scene.launch, scene.waves))
    return tokens, hits


def assert_right(scene, tokens):
    """Every request has the tokens of one rank alone, up to where its client left."""
    for arrival in (a for wave in scene.waves for a in wave):
        alone = one_rank_tokens(arrival.request, scene.launch.kv_dtype)
        got = tokens[arrival.request.request_id]
        stop = min(arrival.cancel_after or len(alone), len(alone))
        assert got == alone[:stop], arrival.request.request_id
