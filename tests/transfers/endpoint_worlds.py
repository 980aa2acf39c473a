"""Worlds of endpoints for the contract tests: how to make one, and a small bound plan."""

import os
from collections.abc import Callable, Mapping

import numpy as np
import torch

from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.transfers.executors.base import Endpoint, RankCache
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.executors.nixl import NixlEndpoint, settle_environment
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.reassemble import copy_on_hosts
from kvflow.transfers.planner import plan_transfer

settle_environment()
torch.set_num_threads(1)
KEY = bytes(range(32))
SPEC = KVCacheSpec.from_config(
    {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 16,
        "index_head_dim": 32,
        "indexer_types": ["full", "shared"],
    }
)
MakeEndpoint = Callable[[RankCache], Endpoint]


def local_world() -> MakeEndpoint:
    fabric = LocalFabric()
    return lambda cache: LocalEndpoint(cache, fabric)


def nixl_world(**options) -> MakeEndpoint:
    options.setdefault("staging_nbytes", 1 << 16)
    return lambda cache: NixlEndpoint(cache, KEY, **options)


WORLDS: Mapping[str, Callable[[], MakeEndpoint]] = {"local": local_world, "nixl": nixl_world}


def mover(make: MakeEndpoint, **options):
    """A `move` for `check_law`: an endpoint for every rank, every target pulls."""

    def move(bound: BoundPlan, sources, targets) -> None:
        senders = {rank: make(cache) for rank, cache in sources.items()}
        receivers = {rank: make(cache) for rank, cache in targets.items()}
        for rank, receiver in receivers.items():
            peers = {r: receiver.connect(s.export()) for r, s in senders.items()}
            report = receiver.pull(bound, rank, peers, timeout=30, verify=True, **options)
            assert report.verified
            assert receiver.quiesced()
        if any(isinstance(receiver, NixlEndpoint) for receiver in receivers.values()):
            copy_over_nixl(bound, receivers)
        else:
            copy_on_hosts(bound, targets)
        for endpoint in (*receivers.values(), *senders.values()):
            endpoint.close()

    return move


def pusher(make: MakeEndpoint, **options):
    """As `mover`, the other direction: every source rank pushes."""

    def move(bound: BoundPlan, sources, targets) -> None:
        senders = {rank: make(cache) for rank, cache in sources.items()}
        receivers = {rank: make(cache) for rank, cache in targets.items()}
        for rank, sender in senders.items():
            peers = {r: sender.connect(t.export()) for r, t in receivers.items()}
            report = sender.push(bound, rank, peers, timeout=30, verify=True, **options)
            assert report.verified
            assert sender.quiesced()
        copy_on_hosts(bound, targets)
        for endpoint in (*senders.values(), *receivers.values()):
            endpoint.close()

    return move


def copy_over_nixl(bound: BoundPlan, receivers: Mapping[int, NixlEndpoint]) -> None:
    """The second stage: every target pulls from the neighbours that have received."""
    for rank, receiver in receivers.items():
        sides = [src for src, dst in bound.plan.local_links if dst == rank]
        peers = {src: receiver.connect(receivers[src].export()) for src in sides}
        report = receiver.pull(bound, rank, peers, timeout=30, verify=True, stage="copies")
        assert report.num_links == len(sides)


def pair(
    tokens: tuple[int, int] = (0, 200),
    *,
    ranks: int = 4,
    interleave: int = 1,
    blocks: tuple[int, int] = (16, 64),
    seed: int = 0,
) -> BoundPlan:
    """`ranks` dealt ranks to one whole copy, random block tables in pools with three spare ids."""
    rng = np.random.default_rng(seed)
    placements = (Placement.simple(RoundRobin(ranks, interleave)), Placement.simple(Replicated()))
    bindings = []
    for placement, size in zip(placements, blocks, strict=True):
        layout = KVLayout.uniform(SPEC, placement, Paged(size))
        need = layout.num_blocks_for(tokens[1])["kv"]
        table = rng.permutation(need + 3)[:need]
        bindings.append(Binding.of(layout, {"kv": table}, {"kv": need + 3}, tokens[1]))
    src, dst = bindings
    return BoundPlan(plan_transfer(src.layout, dst.layout, tokens), src, dst)


def source_cache(bound: BoundPlan, rank: int) -> RankCache:
    """A cache of random bytes, the same in every process."""
    cache = RankCache.allocate(bound.src.layout, rank, bound.src.num_blocks)
    generator = torch.Generator().manual_seed(1000 + rank)
    for view in cache.pages.values():
        view.memory.random_(0, 256, generator=generator)
    return cache


def target_cache(bound: BoundPlan) -> RankCache:
    return RankCache.allocate(bound.dst.layout, 0, bound.dst.num_blocks, fill=0xA5)


def same_bytes(a: RankCache, b: RankCache) -> bool:
    return all(torch.equal(a.pages[n].memory, b.pages[n].memory) for n in a.pages)


def untouched(cache: RankCache) -> bool:
    return all(bool((v.memory == 0xA5).all()) for v in cache.pages.values())


def num_threads() -> int:
    """Threads of this process as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))
