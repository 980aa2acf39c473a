"""What the prefix and tier tests share: rows as they arrive at a decode rank, the rows that one
rank alone computes, and how many tokens a prompt may reuse."""

import asyncio
import threading

import numpy as np
import torch
from attrs import define, evolve, field
from engine_world import assert_idle, collect, config, reference_model, serve_all, world
from hypothesis import strategies as st

from kvflow.comm.local import LocalComm
from kvflow.engine.messages import StepItem
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.runner import StepRunner
from kvflow.kernels.rows import gather_rows
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint

VOCAB = 320


def rows_of(binding, cache, length, rank=0):
    """Packed rows of every component at positions [0, length) in one rank's cache."""
    rows = {}
    for name in binding.layout.spec.names:
        group = binding.layout.group_of(name).name
        slots = binding.slots(group, np.arange(length), rank)
        rows[name] = gather_rows(cache.pages[name], torch.from_numpy(slots)).clone()
    return rows


def reference_rows(one, kv_dtype):
    """The rows of a prompt and its first token, computed in one step on one rank."""
    model = reference_model(kv_dtype, "float64")
    n = len(one.prompt)
    layout = KVLayout.uniform(model.spec, Placement.simple(Replicated()), Paged(n))
    cache = RankCache.allocate(layout, 0, {"kv": 1})
    runner = StepRunner.over(model, layout, cache, LocalComm())
    runner.run([StepItem("alone", 0, list(one.prompt), None, {"kv": [0]}, one.sampling)])
    slots = torch.arange(n)
    return {name: gather_rows(cache.pages[name], slots) for name in layout.spec.names}


@define(eq=False)
class Arrivals:
    """Endpoint factory of a world: keeps the rows of the request that a decode rank has pulled
    last, those included that it had already; `take` puts them into `rows`."""

    rows: list = field(factory=list)
    last: dict | None = None
    caches: dict = field(factory=dict)

    def make(self, cache, fabric):
        name = threading.current_thread().name
        self.caches[name] = cache
        if name.startswith("decode"):
            return _Watched(cache, fabric, self)
        return LocalEndpoint(cache, fabric)

    def take(self):
        """A request has ended that was alone."""
        self.rows.append(self.last)
        self.last = None


class _Watched(LocalEndpoint):
    def __init__(self, cache, fabric, arrivals):
        super().__init__(cache, fabric)
        self.arrivals = arrivals

    def pull(self, bound, dst_rank, peers, *, timeout, verify=False):
        report = super().pull(bound, dst_rank, peers, timeout=timeout, verify=verify)
        self.arrivals.last = rows_of(bound.dst, self.cache, bound.plan.tokens[1])
        return report


def differing(mine, reference):
    """(component, positions) that differ."""
    assert mine.keys() == reference.keys()
    wrong = []
    for name, rows in mine.items():
        bad = (rows != reference[name]).any(1).nonzero().flatten().tolist()
        if bad:
            wrong.append((name, bad))
    return wrong


def reusable(prompts, prompt, block, shifted, sampled):
    """How many tokens of `prompt` an engine may reuse that has computed `prompts` (a list of
    tuples), each followed by its token of `sampled`, token by token."""
    best = 0
    for before, token in zip(prompts, sampled, strict=True):
        text = (*before, token)
        same = 0
        while same < min(len(before), len(prompt) - 1) and before[same] == prompt[same]:
            same += 1
        whole = same // block * block
        if shifted and whole and text[whole] != prompt[whole]:
            whole -= 1
        best = max(best, whole)
    return best


async def in_turn(deployment, requests, arrivals):
    """(tokens, cached tokens) of requests that are served one after the other."""
    said = []
    for one in requests:
        outputs = await collect(deployment, one)
        arrivals.take()
        said.append(([o.token for o in outputs], outputs[0].cached_tokens))
        await asyncio.sleep(0)
    return said


@st.composite
def prompt_families(draw, num=4, most=32):
    """Prompts that share beginnings of drawn lengths."""
    token = st.integers(0, VOCAB - 1)
    stems = [draw(st.lists(token, min_size=most, max_size=most)) for _ in range(2)]
    prompts = []
    for _ in range(num):
        stem = draw(st.sampled_from(stems))
        keep = draw(st.integers(1, most))
        tail = draw(st.lists(token, max_size=min(6, most - keep)))
        prompts.append(tuple(stem[:keep] + tail))
    return prompts


@st.composite
def launches(draw, **changes):
    """Deployments of drawn shape whose prefill pool is small enough for evictions."""
    pcp = draw(st.sampled_from([1, 2, 4]))
    drawn = {
        "pcp": pcp,
        "dcp": draw(st.sampled_from([d for d in (1, 2, 4) if pcp % d == 0])),
        "interleave": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "prefill_block": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "decode_block": 8,
        "kv_dtype": draw(st.sampled_from(["fp8", "float64"])),
        "dtype": "float64",
        "max_num_batched_tokens": draw(st.sampled_from([7, 16, 64])),
        "max_model_len": 48,
        "prefill_kv_tokens": draw(st.sampled_from([48, 96, 400])),
        "decode_kv_tokens": 96,
        "prefix": PrefixConfig(block_size=draw(st.sampled_from([None, 2, 4, 5]))),
    }
    return config(**(drawn | changes))


async def rounds(launch, requests, arrivals):
    """What a deployment answers to requests one after the other, then to all of them at once, and
    the tokens it says it reused, by tier."""
    async with world(launch, arrivals) as deployment:
        said = await in_turn(deployment, requests, arrivals)
        await assert_idle(deployment, -(-launch.decode_kv_tokens // launch.decode_block))
        again = [evolve(one, request_id="again-" + one.request_id) for one in requests]
        together = await serve_all(deployment, again)
        await assert_idle(deployment, -(-launch.decode_kv_tokens // launch.decode_block))
        return said, together, dict(deployment.prefill.kv.num_reused)
