"""Predicted against measured: every strategy on a handful of plans, over NIXL between processes.

The constants are measured first, on other plans, as `kvflow calibrate` does, unless a file of them
is given. All strategies of a plan run once per round, in turn; medians are compared.

    python benchmarks/strategies.py --tokens 2048 --rounds 5
"""

from kvflow.transfers.executors.nixl import NixlEndpoint, settle_environment

settle_environment()

import argparse  # noqa: E402
import multiprocessing as mp  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import statistics  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from attrs import frozen  # noqa: E402
from transfer import bind, measure  # noqa: E402

from kvflow import calibrate  # noqa: E402
from kvflow.layouts.layout import KVLayout  # noqa: E402
from kvflow.layouts.mesh import Placement  # noqa: E402
from kvflow.layouts.paging import Paged  # noqa: E402
from kvflow.layouts.sharding import Replicated, RoundRobin  # noqa: E402
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec  # noqa: E402
from kvflow.transfers.cost import STRATEGIES, Costs, Strategy  # noqa: E402
from kvflow.transfers.executors.base import RankCache  # noqa: E402
from kvflow.transfers.lower import BoundPlan  # noqa: E402
from kvflow.transfers.planner import plan_transfer  # noqa: E402
from kvflow.transfers.predict import LinkCost, predict, total  # noqa: E402


@frozen
class World:
    """`replicas` copies of every source shard; the last `tail` tokens move (default: all)."""

    name: str
    ranks: int = 8
    interleave: int = 64
    blocks: tuple[int, int] = (64, 64)
    replicas: int = 1
    tail: int | None = None

    def layouts(self, spec: KVCacheSpec) -> tuple[KVLayout, KVLayout]:
        ids = range(self.ranks * self.replicas)
        holders = tuple(tuple(ids[i :: self.ranks]) for i in range(self.ranks))
        source = Placement(RoundRobin(self.ranks, self.interleave), holders)
        whole = Placement.simple(Replicated())
        src, dst = (
            KVLayout.uniform(spec, placement, Paged(size))
            for placement, size in zip((source, whole), self.blocks, strict=True)
        )
        return src, dst


WORLDS = (
    World("I=64, 64->64"),
    World("I=1, 64->64", interleave=1),
    World("I=64, 16->64", blocks=(16, 64)),
    World("I=64, 64->16", blocks=(64, 16)),
    World("I=1, 4 shards twice", ranks=4, interleave=1, replicas=2),
    World("I=1, last 40 tokens", interleave=1, tail=40),
)


def serve(pipe: Connection, key: bytes, spec: KVCacheSpec, tokens: int) -> None:
    """The source process: one world after the other."""
    torch.set_num_threads(1)
    for world in WORLDS:
        layout, _ = world.layouts(spec)
        num = layout.num_blocks_for(tokens)
        caches = [RankCache.allocate(layout, rank, num, fill=1) for rank in layout.ranks]
        endpoints = [NixlEndpoint(cache, key) for cache in caches]
        pipe.send([e.export() for e in endpoints])
        pipe.recv()
        for endpoint in endpoints:
            endpoint.close()


class Target:
    """The pulling side of a world."""

    def __init__(
        self, world: World, spec: KVCacheSpec, tokens: int, key: bytes, exports: list[bytes]
    ) -> None:
        src, dst = world.layouts(spec)
        start = 0 if world.tail is None else tokens - world.tail
        plan = plan_transfer(src, dst, (start, tokens))
        self.bound = BoundPlan(plan, bind(src, tokens, 1), bind(dst, tokens, 2))
        cache = RankCache.allocate(dst, 0, dst.num_blocks_for(tokens), fill=1)
        self.endpoint = NixlEndpoint(cache, key)
        self.peers = {r: self.endpoint.connect(blob) for r, blob in enumerate(exports)}

    def pull(self, strategy: Strategy) -> None:
        self.endpoint.pull(self.bound, 0, self.peers, timeout=120, strategy=strategy)


def show(
    world: World, links: tuple[LinkCost, ...], seconds: dict[Strategy, list[tuple[float, float]]]
) -> None:
    by_strategy, _ = total(links)
    chosen = {way for link in links for way in link.chosen}
    nbytes = sum(link.nbytes for link in links)
    print(f"\n{world.name}: {nbytes / (1 << 20):.1f} MiB, {len(links)} links x kinds of components")
    print(f"  {'':10} {'descriptors':>11} {'predicted':>10} {'measured':>10}  ratio")
    for strategy, price in by_strategy.items():
        measured = statistics.median(wall for wall, _ in seconds[strategy])
        alike = set(STRATEGIES).intersection(*(link.same_as(strategy) for link in links))
        note = f"  the same as {', '.join(sorted(alike))}" if alike else ""
        print(
            f"{'*' if strategy in chosen else ' '} {strategy:10} {price.num_descriptors:11} "
            f"{price.seconds * 1e3:7.1f} ms {measured * 1e3:7.1f} ms "
            f"{price.seconds / measured:6.2f}{note}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=78, help="main layers; the MTP one is extra")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--costs", type=Path, help="constants that `kvflow calibrate` wrote")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = Costs.from_json(args.costs.read_text()) if args.costs else calibrate.measure()
    print(calibrate.as_text(costs))
    spec = KVCacheSpec.from_config(dict(GLM_5_3, num_hidden_layers=args.layers))
    key, context = secrets.token_bytes(32), mp.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=serve, args=(there, key, spec, args.tokens))
    child.start()
    print(f"{args.tokens} tokens, medians of {args.rounds}, load {os.getloadavg()[0]:.1f}")
    print("* taken by the cost model")
    for world in WORLDS:
        target = Target(world, spec, args.tokens, key, here.recv())
        methods = {s: lambda t=target, s=s: t.pull(s) for s in STRATEGIES}
        show(world, predict(target.bound, costs), measure(methods, args.rounds))
        target.endpoint.close()
        here.send("next")
    print(f"load {os.getloadavg()[0]:.1f}")
    child.join()


if __name__ == "__main__":
    main()
