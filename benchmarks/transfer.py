"""Transfer benchmark: 8 DCP ranks -> 1 decode rank, GLM-5.3 rows, over NIXL between processes.

In every round each method runs once, in turn, so that a busy machine slows all of them alike; what
counts are ratios of medians. Caches are filled and touched, connections and lists are warm, block
tables are random permutations.

    python benchmarks/transfer.py --tokens 5120 --rounds 9
"""

from kvflow.transfers.executors.nixl import NixlEndpoint, settle_environment

settle_environment()

import argparse  # noqa: E402
import multiprocessing as mp  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvflow.layouts.layout import Binding, KVLayout  # noqa: E402
from kvflow.layouts.mesh import Placement  # noqa: E402
from kvflow.layouts.paging import Paged  # noqa: E402
from kvflow.layouts.sharding import Replicated, RoundRobin  # noqa: E402
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec  # noqa: E402
from kvflow.transfers.cost import STRATEGIES  # noqa: E402
from kvflow.transfers.executors.base import RankCache  # noqa: E402
from kvflow.transfers.executors.nixl_agent import Agent  # noqa: E402
from kvflow.transfers.lower import BoundPlan  # noqa: E402
from kvflow.transfers.planner import plan_transfer  # noqa: E402

W, BLOCK_SIZE = 8, 64
MIB = 1 << 20


def layouts(layers: int, interleave: int) -> tuple[KVLayout, KVLayout]:
    spec = KVCacheSpec.from_config(dict(GLM_5_3, num_hidden_layers=layers))
    dealt, whole = Placement.simple(RoundRobin(W, interleave)), Placement.simple(Replicated())
    paging = Paged(BLOCK_SIZE)
    return KVLayout.uniform(spec, dealt, paging), KVLayout.uniform(spec, whole, paging)


def bind(layout: KVLayout, tokens: int, seed: int) -> Binding:
    """A pool that the request fills, in random order."""
    num = layout.num_blocks_for(tokens)
    rng = np.random.default_rng(seed)
    return Binding.of(layout, {g: rng.permutation(n) for g, n in num.items()}, num, tokens)


def fill(memory: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = memory[: len(memory) // 8 * 8].view(torch.int64)
    words.random_(generator=generator)


def source(pipe: Connection, args: argparse.Namespace, interleave: int, key: bytes) -> None:
    """The source process: eight ranks, one endpoint each, and one plain region of all the bytes."""
    torch.set_num_threads(1)
    layout, _ = layouts(args.layers, interleave)
    num = layout.num_blocks_for(args.tokens)
    caches = [RankCache.allocate(layout, rank, num) for rank in range(W)]
    for cache in caches:
        for n, view in enumerate(cache.pages.values()):
            fill(view.memory, cache.rank * 1000 + n)
    endpoints = [NixlEndpoint(cache, key) for cache in caches]
    plain = torch.ones(args.tokens * layout.spec.nbytes_per_token, dtype=torch.uint8)
    agent = Agent("plain")
    agent.register(plain.data_ptr(), plain.numel())
    pipe.send(([e.export() for e in endpoints], agent.metadata(), plain.data_ptr()))
    while not pipe.poll(0.005):
        agent.take_notifs()
    for endpoint in endpoints:
        endpoint.close()


def wait(flight) -> None:
    while not flight.poll():
        pass


class Target:
    """The decode side and its methods; each returns when all bytes are here."""

    def __init__(self, args: argparse.Namespace, interleave: int, key: bytes, hello) -> None:
        exports, metadata, self.plain_address = hello
        src, dst = layouts(args.layers, interleave)
        plan = plan_transfer(src, dst, (0, args.tokens))
        self.bound = BoundPlan(plan, bind(src, args.tokens, 1), bind(dst, args.tokens, 2))
        self.cache = RankCache.allocate(dst, 0, dst.num_blocks_for(args.tokens), fill=1)
        self.endpoint = NixlEndpoint(self.cache, key)
        self.peers = {r: self.endpoint.connect(blob) for r, blob in enumerate(exports)}
        self.nbytes = plan.nbytes
        self.plain = torch.ones(self.nbytes, dtype=torch.uint8)
        self.copied = torch.ones(self.nbytes, dtype=torch.uint8)
        self.agent = Agent("plain-reader")
        self.agent.register(self.plain.data_ptr(), self.nbytes)
        self.plain_peer = self.agent.add_peer(metadata)

    def memcpy(self) -> None:
        self.copied.copy_(self.plain)

    def bulk_read(self) -> None:
        src, dst = np.array([self.plain_address]), np.array([self.plain.data_ptr()])
        wait(self.agent.read(self.plain_peer, src, dst, self.nbytes))

    def planned(self, strategy: str | None = None) -> None:
        self.endpoint.pull(self.bound, 0, self.peers, timeout=60, strategy=strategy)

    def naive_rows(self) -> None:
        """One descriptor for every token and piece, as unmerged lists, one per link and layer."""
        door = self.endpoint._door
        for part, rank, runs in self.bound.links_to(0):
            peer = self.endpoint._peers[self.peers[rank]]
            slots = runs.expand()
            for name in part.components:
                a, b = peer.geometries[name], door.geometries[name]
                for piece in a.record.pieces(BLOCK_SIZE):
                    src, dst = a.address(slots[0], piece), b.address(slots[1], piece)
                    wait(door.agent.read(peer.name, src, dst, piece.nbytes))


def measure(methods: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    for method in methods.values():
        method()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            begin = time.perf_counter()
            method()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def run(args: argparse.Namespace, interleave: int) -> None:
    key = secrets.token_bytes(32)
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=source, args=(there, args, interleave, key))
    child.start()
    target = Target(args, interleave, key, here.recv())
    report = target.endpoint.pull(target.bound, 0, target.peers, timeout=60, verify=True)
    methods: dict[str, Callable[[], None]] = {
        "memcpy": target.memcpy,
        "one bulk READ": target.bulk_read,
        "planned pull": target.planned,
    }
    for strategy in STRATEGIES if args.each else ():
        methods[f"  only {strategy}"] = lambda s=strategy: target.planned(s)
    if interleave < BLOCK_SIZE:
        methods["naive rows"] = target.naive_rows
    load = os.getloadavg()[0]
    seconds = measure(methods, args.rounds)
    print(
        f"\nW={W} -> 1, I={interleave}, {target.nbytes / MIB:.0f} MiB, {args.tokens} tokens, "
        f"{len(target.cache.pages)} components, median of {args.rounds}, load {load:.1f} -> "
        f"{os.getloadavg()[0]:.1f}\nplanned pull: {report.num_descriptors} descriptors, "
        f"{report.num_links} links, {'+'.join(report.strategies)}, {report.num_parts} parts, "
        f"verified {report.verified}"
    )
    median = {name: statistics.median(s) for name, s in seconds.items()}
    print(
        f"{'method':16} {'ms':>9} {'GB/s':>7} {'of bulk READ':>13} {'of memcpy':>10} {'best ms':>8}"
    )
    for name, s in median.items():
        print(
            f"{name:16} {s * 1e3:9.1f} {target.nbytes / s / 1e9:7.2f} "
            f"{median['one bulk READ'] / s:13.2f} {median['memcpy'] / s:10.2f} "
            f"{min(seconds[name]) * 1e3:8.1f}"
        )
    if "naive rows" in median:
        print(f"planned pull over naive rows: {median['naive rows'] / median['planned pull']:.1f}x")
    target.endpoint.close()
    here.send(None)
    child.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--layers", type=int, default=78, help="main layers; the MTP one is extra")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--interleave", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--each", action="store_true", help="also every forced strategy")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for interleave in args.interleave:
        run(args, interleave)


if __name__ == "__main__":
    main()
