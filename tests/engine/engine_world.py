"""What the engine tests share: the fixture model, whole worlds of threads, a one-rank reference,
and the byte-by-byte comparison of a transfer's two sides."""

import asyncio
import contextlib
import functools
import json
import threading
from pathlib import Path

import torch
from attrs import define, field

from kvflow.comm.local import LocalComm
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.launch.config import LaunchConfig
from kvflow.launch.threads import thread_deployment
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.models.glm import Glm
from kvflow.testing import cells
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint

TINY = Path(__file__).parent.parent / "fixtures" / "tiny_glm_scaled"
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def fixture_prompts():
    """Prompts and 32 greedy ids of transformers, by name."""
    prompts = json.loads((TINY / "reference.json").read_text())["prompts"]
    return {name: (tuple(p["ids"]), list(p["greedy"])) for name, p in prompts.items()}


def config(**changes):
    """A small deployment in process: one rank a side, float32, unless changed."""
    sizes = {"max_model_len": 256, "prefill_kv_tokens": 512, "decode_kv_tokens": 512}
    values = {"kv_dtype": "float32", "max_num_batched_tokens": 64, "transport": "in-process"}
    return LaunchConfig(TINY, **(values | sizes | {"verify_transfers": True} | changes))


def greedy(max_tokens, **changes):
    return SamplingParams(max_tokens, **({"temperature": 0, "ignore_eos": True} | changes))


def request(name, prompt, sampling=None):
    return Request(name, tuple(prompt), sampling or greedy(4))


async def collect(deployment, one):
    """Every output of one request."""
    return [output async for output in deployment.generate(one)]


async def serve_all(deployment, requests):
    """The tokens of requests that are served at the same time, by id."""
    outputs = await asyncio.gather(*(collect(deployment, r) for r in requests))
    return {r.request_id: [o.token for o in out] for r, out in zip(requests, outputs, strict=True)}


async def until(holds, seconds=60.0):
    """Waits until ``holds()``."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def free_blocks(deployment, rank):
    """What a decode rank last said of its pool: (free or cached, quarantined)."""
    gauges = deployment.gauges.get(rank, {})
    if "free_blocks.kv" not in gauges:
        return -1.0, -1.0
    free = gauges["free_blocks.kv"] + gauges["cached_blocks.kv"]
    return free, gauges["quarantined_blocks.kv"]


async def assert_idle(deployment, decode_blocks):
    """Waits until every block is back on both sides, and audits the prefill pools."""
    for engine in deployment.prefills.values():
        pool = engine.pools["kv"]
        await until(lambda p=pool: p.num_available == p.num_blocks)
        engine.audit()
    for rank in deployment.decode_ranks:
        # a rank that has done nothing yet has told nothing yet
        await until(lambda r=rank: free_blocks(deployment, r) in ((decode_blocks, 0), (-1, -1)))
    await assert_nothing_in_flight(deployment)


async def assert_nothing_in_flight(deployment):
    """The front has forgotten every request, and so has its router: as soon as engines have told
    their loads, which they do behind the last token and behind an abort."""
    assert not deployment.journeys.live
    assert not deployment.journeys.lenders.num_running
    router = deployment.routing.router
    accounts = [router.account(engine.name) for engine in router.engines]
    await until(lambda: not any(account.num_requests for account in accounts))


@define(eq=False)
class Ranks:
    """Endpoint factory of a world: remembers every rank's cache, and holds or checks its pulls.

    gate: passed to the endpoints of decode ranks. check: compare the two sides of each pull byte
    by byte at the moment it has ended; `wrong` collects what differs."""

    gate: object = None
    check: bool = False
    caches: dict = field(factory=dict)
    endpoints: dict = field(factory=dict)
    pulls: list = field(factory=list)
    wrong: list = field(factory=list)

    def make(self, cache, fabric):
        name = threading.current_thread().name
        self.caches[name] = cache
        gate = self.gate if name.startswith("decode") else None
        self.endpoints[name] = WatchedEndpoint(cache, fabric, gate, self)
        return self.endpoints[name]

    def compare(self, bound, peers, target):
        by_name = {e.name: self.caches[rank] for rank, e in self.endpoints.items()}
        sources = {r: by_name[name] for r, name in peers.items()}
        names = [name for part in bound.plan.parts for name in part.components]
        tokens = bound.plan.tokens
        self.wrong += differing_cells(bound.src, sources, bound.dst, target, tokens, names)


class WatchedEndpoint(LocalEndpoint):
    """A `LocalEndpoint` that shows its pulls to the `Ranks` of its world."""

    def __init__(self, cache, fabric, gate, ranks):
        super().__init__(cache, fabric, gate)
        self.ranks = ranks

    def pull(self, bound, dst_rank, peers, *, timeout, verify=False):
        report = super().pull(bound, dst_rank, peers, timeout=timeout, verify=verify)
        self.ranks.pulls.append(bound)
        if self.ranks.check:
            self.ranks.compare(bound, peers, self.cache)
        return report


def differing_cells(src, sources, dst, target, tokens=None, names=None):
    """(component, field, token) of every cell of these tokens that the target rank holds otherwise
    than some source replica, by the oracle's arithmetic, which deals tokens one by one."""
    names = names or src.layout.spec.names
    tokens = tokens or (0, src.lengths[names[0]])
    here = {}
    for cell in cells(dst.layout, dst, tokens, names):
        if cell.rank != target.rank:
            continue
        here[cell.component, cell.field, cell.token] = _read(target, cell)
    seen, wrong = set(), []
    for cell in cells(src.layout, src, tokens, names):
        key = cell.component, cell.field, cell.token
        seen.add(key)
        if key in here and _read(sources[cell.rank], cell) != here[key]:
            wrong.append((cell.rank, *key))
    return wrong + [("missing", key) for key in set(here) - seen]


def _read(cache, cell):
    view = cache.pages[cell.component]
    page = view.offset + cell.block_id * view.block_stride
    return bytes(view.memory[[page + i for i in cell.at]].numpy())


@contextlib.asynccontextmanager
async def world(launch, ranks=None, endpoint=LocalEndpoint):
    """A started deployment of threads."""
    make = ranks.make if ranks is not None else endpoint
    async with thread_deployment(launch, make_endpoint=make) as deployment:
        yield deployment


@functools.lru_cache
def reference_model(kv_dtype, dtype):
    return Glm.load(TINY, kv_dtype=kv_dtype, dtype=DTYPES[dtype])


def one_rank_tokens(one, kv_dtype, dtype="float64"):
    """The tokens of `one_rank_sampled`."""
    return [sampled.token for sampled in one_rank_sampled(one, kv_dtype, dtype)]


def one_rank_sampled(one, kv_dtype, dtype="float64"):
    """What a request samples alone on one rank: the prompt in one step, no transfer, contiguous
    blocks, nothing ends it before max_tokens."""
    model = reference_model(kv_dtype, dtype)
    n, total = len(one.prompt), len(one.prompt) + one.sampling.max_tokens
    layout = KVLayout.uniform(model.spec, Placement.simple(Replicated()), Paged(total))
    cache = RankCache.allocate(layout, 0, {"kv": 1})
    runner, table, name = StepRunner.over(model, layout, cache, LocalComm()), {"kv": [0]}, "alone"
    item = StepItem(name, 0, list(one.prompt), None, table, one.sampling)
    sampled = runner.run([item])[name]
    while len(sampled) < one.sampling.max_tokens:
        last = sampled[-1]
        item = StepItem(name, n + len(sampled) - 1, [last.token], None, table, one.sampling)
        sampled += runner.run([item])[name]
    return sampled
