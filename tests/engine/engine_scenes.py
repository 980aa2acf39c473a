"""Drawn deployments for the sweep: every option of both engines, and requests in waves.

A scene has an aim: "any" draws every option freely, "tiers" is bent towards prefixes that come
back from host and disk, "crowd" towards decode pools in which two requests begin but do not both
end, and "turns" towards several engines and requests that go on where an earlier one ended.
"""

import numpy as np
from attrs import evolve, frozen
from engine_world import config, reference_model
from hypothesis import strategies as st

from kvflow.engine.access import AccessOptions
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.hisparse import HiSparseSizes
from kvflow.engine.hisparse.sizes import HiSparseBytes
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig

AIMS = ("any", "tiers", "crowd", "turns")
VOCAB = 320
MAX_LEN = 64
TURNS_LEN = 96
"""The most positions of a request where turns follow each other."""
MAX_TOKENS = 14
MAX_STEM, MAX_OWN = 38, 12
UNIT_NBYTES = 1 << 14
"""About a unit of 4 tokens of the fixture model, in bytes: tiers of a few units."""


@frozen
class Arrival:
    """A request, after how many tokens its client goes (None: it stays), and the index of a token
    of it, computed alone, that is to stop it (None: nothing does). `follows`: the arrival whose
    prompt and tokens come before this one's own prompt."""

    request: Request
    cancel_after: int | None = None
    stop_at: int | None = None
    follows: "Arrival | None" = None


@frozen
class Scene:
    """A deployment and waves of requests; those of a wave are served at the same time. `stored_by`
    is a deployment of another layout that serves the first wave, with the same disk tier. Drafts
    that the model makes become those that come true in `right_of_8` places of 8, or stay (None)."""

    launch: LaunchConfig
    waves: tuple[tuple[Arrival, ...], ...]
    stored_by: LaunchConfig | None = None
    right_of_8: int | None = None


@st.composite
def samplings(draw, low):
    """Greedy or seeded, with and without log-probabilities."""
    temperature = draw(st.sampled_from([0, 0, 0.5, 1.0, 2.0]))
    top_p = draw(st.sampled_from([1.0, 0.9, 0.3]))
    seed = draw(st.integers(0, 2**63 - 1))
    logprobs = draw(st.sampled_from([None, None, 0, 3]))
    count = draw(st.integers(low, MAX_TOKENS))
    return SamplingParams(count, temperature, top_p, seed, ignore_eos=True, num_logprobs=logprobs)


def _divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


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
def prefill_options(draw, aim):
    """The prefill engine's part of a launch: of 1 to 8 ranks where they are the aim."""
    pcp = draw(st.integers(1, 8)) if aim == "any" else draw(st.integers(1, 3))
    tp = draw(st.sampled_from([1, 1, 2])) if pcp <= 4 and aim != "crowd" else 1
    sizes = [MAX_LEN, MAX_LEN + 9] if aim == "tiers" else [MAX_LEN, MAX_LEN + 9, 3 * MAX_LEN]
    sizes = [TURNS_LEN, 3 * TURNS_LEN] if aim == "turns" else sizes
    return {
        "pcp": pcp,
        "tp": tp,
        "dcp": draw(st.sampled_from(_divisors(pcp * tp))),
        "interleave": draw(st.integers(1, 20)),
        "prefill_block": draw(st.integers(1, 12)),
        "prefill_kv_tokens": draw(st.sampled_from(sizes if aim != "crowd" else [3 * MAX_LEN])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 17, 40] if aim != "crowd" else [64])),
        "access": draw(accesses()),
        **draw(between(aim, pcp * tp)),
    }


@st.composite
def between(draw, aim, prefill_size):
    """What goes on between the engines."""
    most = 1 if aim == "crowd" else 3 if aim == "turns" and prefill_size <= 2 else 2
    streaming = draw(st.booleans())
    return {
        "prefill_engines": draw(st.integers(1, most)) if prefill_size <= 3 else 1,
        "streaming": streaming,
        "loans": draw(st.sampled_from([True, True, False])),
        "local_prefill_tokens": draw(st.sampled_from([0, 0, 8, 40])),
        "stream_layers": draw(st.sampled_from([0, 0, 1, 2])) if streaming else 0,
        "transfer": draw(st.sampled_from(["pull", "push"])),
    }


@st.composite
def decode_options(draw, aim, kv_dtype):
    """The decode engine's part of a launch."""
    dcp = draw(st.sampled_from([1, 1, 2, 2, 3, 4, 4, 8] if aim == "any" else [1, 2, 2, 2, 3, 4]))
    crowd, low = aim == "crowd", TURNS_LEN if aim == "turns" else MAX_LEN
    tp = draw(st.sampled_from([1, crowd + 1, 2])) if dcp != 3 else 1
    options = {
        "decode_ranks": 1 if crowd or dcp == 8 else draw(st.integers(1, 2 + (dcp * tp == 1))),
        "decode_tp": tp,
        "decode_dcp": dcp,
        "decode_interleave": draw(st.integers(1, 2 if crowd else 20)),
        "decode_block": draw(st.integers(1, 2 if crowd else 12)),
        "decode_kv_tokens": draw(st.integers(low, MAX_LEN + 2 if crowd else 2 * low)),
        "decode_access": draw(accesses()),
        "num_drafts": draw(st.integers(1 if crowd else 0, 4)),
        "hisparse": draw(st.sampled_from([False, True, crowd])),
        "max_num_seqs": draw(st.integers(3 if crowd else 1, 4)),
    }
    if options["hisparse"] and draw(st.booleans()):
        options["hisparse_device_nbytes"] = _latent_pool_nbytes(options, kv_dtype)
    return options


def _latent_pool_nbytes(options, kv_dtype):
    """The least that the hot part of HiSparse can be given."""
    launch = config(**options, max_model_len=MAX_LEN, prefill_kv_tokens=MAX_LEN)
    model = reference_model(kv_dtype, "float64")
    layout = launch.decode_layout(model.spec)
    sizes = HiSparseSizes.for_drafts(
        model.config.index_topk, launch.max_num_seqs, launch.num_drafts
    )
    blocks = layout.num_blocks_for(launch.decode_kv_tokens)
    return HiSparseBytes.of(layout, blocks, sizes).latent_pool


@st.composite
def prefixes(draw, aim, directory):
    """Whether prefixes are reused, and from which tiers."""
    tiers = {"tiers": ["host", "disk"], "turns": ["device", "device", "host"]}.get(
        aim, ["none", "device", "device", "host", "disk"]
    )
    tier = draw(st.sampled_from(tiers))
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
def waves(draw, aim):
    """Prompts that begin alike, within a wave and from wave to wave."""
    stems = [_words(draw(st.integers(0, 2**32 - 1)), MAX_STEM) for _ in range(2)]
    drawn, crowd = [], aim == "crowd"
    for i in range(1 if crowd else draw(st.integers(1, 2))):
        count = draw(st.integers(3, 4) if crowd else st.integers(1, 3))
        drawn.append(tuple(draw(arrivals(aim, f"r{i}.{j}", stems)) for j in range(count)))
    if aim == "turns":
        drawn.append(tuple(draw(next_turns(drawn[-1], "second"))))
        drawn.append(tuple(draw(next_turns(drawn[-1], "third"))))
    elif aim == "tiers" or (not crowd and draw(st.booleans())):
        drawn.append(tuple(_again(arrival) for arrival in drawn[0]))
    return tuple(drawn)


@st.composite
def next_turns(draw, before, name):
    """What the clients of earlier requests say next; each may ask twice."""
    turns = []
    for arrival in before:
        for i in range(draw(st.sampled_from([0, 1, 1, 2]))):
            own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_OWN // 2))
            sampling = evolve(draw(samplings(1)), max_tokens=draw(st.integers(1, MAX_TOKENS // 2)))
            base = arrival.request
            request = Request(
                f"{base.request_id} {name} {i}", tuple(own), sampling, base.cache_salt
            )
            turns.append(Arrival(request, draw(st.sampled_from([None, None, 2])), None, arrival))
    return turns


@st.composite
def arrivals(draw, aim, name, stems):
    """A request, of a tenant or another, and its end."""
    crowd = aim == "crowd"
    low, high = {
        "any": (0, MAX_STEM),
        "tiers": (9, MAX_STEM),
        "crowd": (20, 24),
        "turns": (4, MAX_STEM),
    }[aim]
    own = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2 if crowd else MAX_OWN))
    prompt = [*draw(st.sampled_from(stems))[: draw(st.integers(low, high))], *own] or [1]
    sampling = draw(samplings(13 if crowd else 1))
    salt = draw(st.sampled_from([None, None, None, "one", "other"]))
    stays = [None] * (8 if crowd else 3)
    cancelled = draw(st.sampled_from([*stays, 1, 3]))
    stop_at = draw(st.sampled_from([*stays, 2, 7]))
    return Arrival(Request(name, tuple(prompt), sampling, salt), cancelled, stop_at)


def _again(arrival):
    """The same prompt once more, when others may have taken its blocks."""
    name = arrival.request.request_id + " again"
    return evolve(arrival, request=evolve(arrival.request, request_id=name))


@st.composite
def scenes(draw, aim, directory):
    """`directory()` gives a new directory for a disk tier."""
    kv_dtype = draw(st.sampled_from(["fp8", "float64"]))
    common = {
        "kv_dtype": kv_dtype,
        "dtype": "float64",
        "max_model_len": TURNS_LEN if aim == "turns" else MAX_LEN,
        "prefix": draw(prefixes(aim, directory())),
    }
    launch = config(**draw(prefill_options(aim)), **draw(decode_options(aim, kv_dtype)), **common)
    stored_by = None
    if launch.prefix.disk_nbytes:
        stored_by = config(**draw(prefill_options(aim)), **common)
    right = draw(st.sampled_from([None, 3, 5, 8]))
    return Scene(launch, draw(waves(aim)), stored_by, right)
