"""Transfer benchmark: 8 DCP ranks -> 1 decode rank, GLM-5.3 rows, over NIXL between processes.

In every round each method runs once, in turn, so that a busy machine slows all of them alike; what
counts are ratios of medians. Caches are filled and touched, connections and lists are warm, block
tables are random permutations. Digests are compared once, before anything is timed.

    python benchmarks/transfer.py --tokens 5120 --rounds 9
    python benchmarks/transfer.py --cases 2 3 --worlds 5 --skip-naive

The second compares cases with each other: each has a world of processes of its own, and worlds of
one case differ by more than its rounds do, so cases take turns in several.
"""

from kvflow.transfers.executors.nixl import NixlEndpoint, settle_environment

settle_environment()

import argparse  # noqa: E402
import multiprocessing as mp  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from functools import partial  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from attrs import frozen  # noqa: E402

from kvflow.kernels.region import region_memory  # noqa: E402
from kvflow.layouts.layout import Binding, KVLayout  # noqa: E402
from kvflow.layouts.mesh import Placement  # noqa: E402
from kvflow.layouts.paging import Paged  # noqa: E402
from kvflow.layouts.sharding import Replicated, RoundRobin  # noqa: E402
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec  # noqa: E402
from kvflow.transfers.cost import STRATEGIES, Strategy  # noqa: E402
from kvflow.transfers.executors.base import RankCache, TransferReport  # noqa: E402
from kvflow.transfers.executors.nixl_agent import Agent  # noqa: E402
from kvflow.transfers.lower import BoundPlan  # noqa: E402
from kvflow.transfers.planner import plan_transfer  # noqa: E402

W = 8
MIB = 1 << 20
MEMORIES: dict[str, Callable[[int], torch.Tensor]] = {
    "as by torch": lambda nbytes: torch.ones(nbytes, dtype=torch.uint8),
    "huge pages": partial(region_memory, fill=1),
}


@frozen
class Case:
    """Interleave of the source, block sizes of source and target."""

    interleave: int
    blocks: tuple[int, int]

    def __str__(self) -> str:
        return f"I={self.interleave} {self.blocks[0]}->{self.blocks[1]}"


EQUAL, ROWS = Case(64, (64, 64)), Case(1, (64, 64))
CASES = (EQUAL, ROWS, Case(64, (16, 16)), Case(64, (16, 64)))


def layouts(layers: int, case: Case) -> tuple[KVLayout, KVLayout]:
    spec = KVCacheSpec.from_config(dict(GLM_5_3, num_hidden_layers=layers))
    src, dst = (
        KVLayout.uniform(spec, Placement.simple(sharding), Paged(size))
        for sharding, size in zip(
            (RoundRobin(W, case.interleave), Replicated()), case.blocks, strict=True
        )
    )
    return src, dst


def bind(layout: KVLayout, tokens: int, seed: int) -> Binding:
    """A pool that the request fills, in random order."""
    num = layout.num_blocks_for(tokens)
    rng = np.random.default_rng(seed)
    return Binding.of(layout, {g: rng.permutation(n) for g, n in num.items()}, num, tokens)


def fill(memory: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = memory[: len(memory) // 8 * 8].view(torch.int64)
    words.random_(generator=generator)


def source(pipe: Connection, args: argparse.Namespace, case: Case, key: bytes) -> None:
    """The source process: eight ranks, one endpoint each, and one plain region of all the bytes."""
    torch.set_num_threads(1)
    layout, _ = layouts(args.layers, case)
    num = layout.num_blocks_for(args.tokens)
    caches = [RankCache.allocate(layout, rank, num) for rank in range(W)]
    for cache in caches:
        for n, view in enumerate(cache.pages.values()):
            fill(view.memory, cache.rank * 1000 + n)
    endpoints = [NixlEndpoint(cache, key) for cache in caches]
    plain = [make(args.tokens * layout.spec.nbytes_per_token) for make in MEMORIES.values()]
    agent = Agent("plain")
    for memory in plain:
        agent.register(memory.data_ptr(), memory.numel())
    addresses = [memory.data_ptr() for memory in plain]
    pipe.send(([e.export() for e in endpoints], agent.metadata(), addresses))
    while not pipe.poll(0.005):
        agent.take_notifs()
    for endpoint in endpoints:
        endpoint.close()


def wait(flight) -> None:
    while not flight.poll():
        pass


class Raw:
    """The same bytes without a plan, into buffers that are used again: as torch allocates them, and
    on huge pages, as the caches are."""

    def __init__(self, nbytes: int, metadata: bytes, addresses: Sequence[int]) -> None:
        self.nbytes, self.addresses = nbytes, addresses
        self.plain = [make(nbytes) for make in MEMORIES.values()]
        self.copied = torch.ones(nbytes, dtype=torch.uint8)
        self.agent = Agent("plain-reader")
        for memory in self.plain:
            self.agent.register(memory.data_ptr(), nbytes)
        self.peer = self.agent.add_peer(metadata)

    def memcpy(self) -> None:
        self.copied.copy_(self.plain[0])

    def bulk_read(self, kind: int) -> None:
        src, dst = np.array([self.addresses[kind]]), np.array([self.plain[kind].data_ptr()])
        wait(self.agent.read(self.peer, src, dst, self.nbytes))

    @property
    def methods(self) -> "Methods":
        reads = {f"READ, {name}": partial(self.bulk_read, k) for k, name in enumerate(MEMORIES)}
        return {"memcpy": self.memcpy, **reads}


class Target:
    """The decode side of a case and its methods; each returns when all bytes are here."""

    def __init__(self, args: argparse.Namespace, case: Case, key: bytes, exports) -> None:
        src, dst = layouts(args.layers, case)
        plan = plan_transfer(src, dst, (0, args.tokens))
        self.bound = BoundPlan(plan, bind(src, args.tokens, 1), bind(dst, args.tokens, 2))
        self.cache = RankCache.allocate(dst, 0, dst.num_blocks_for(args.tokens), fill=1)
        self.endpoint = NixlEndpoint(self.cache, key)
        self.peers = {r: self.endpoint.connect(blob) for r, blob in enumerate(exports)}

    def pull(self, strategy: Strategy | None = None, verify: bool = False) -> TransferReport:
        return self.endpoint.pull(
            self.bound, 0, self.peers, timeout=120, strategy=strategy, verify=verify
        )

    def naive_rows(self) -> None:
        """One descriptor for every token and piece, as unmerged lists, one per link and layer."""
        door = self.endpoint._door
        for part, rank, runs in self.bound.links_to(0):
            peer = self.endpoint._peers[self.peers[rank]]
            slots = runs.expand()
            for name in part.components:
                a, b = peer.geometries[name], door.geometries[name]
                for piece in a.record.pieces(a.block_size):
                    src, dst = a.address(slots[0], piece), b.address(slots[1], piece)
                    wait(door.agent.read(peer.name, src, dst, piece.nbytes))


Methods = dict[str, Callable[[], object]]


def measure(methods: Methods, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of every round, the methods in turn; a round before warms them."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for i in range(rounds + 1):
        for name, method in methods.items():
            begin = time.perf_counter(), time.process_time()
            method()
            if i:
                ends = time.perf_counter(), time.process_time()
                seconds[name].append((ends[0] - begin[0], ends[1] - begin[1]))
    return seconds


def methods_of(args: argparse.Namespace, raw: Raw, case: Case, target: Target) -> Methods:
    methods = {**raw.methods, f"pull {case}": target.pull}
    for strategy in STRATEGIES if args.each else ():
        methods[f"  {strategy} {case}"] = lambda s=strategy: target.pull(s)
    if case == ROWS and not args.skip_naive:
        methods["naive rows I=1"] = target.naive_rows
    return methods


def show(seconds: dict[str, list[tuple[float, float]]], nbytes: int) -> dict[str, float]:
    """Medians; ratios are medians of each round's ratio to a baseline of the same round; those to
    the READ between torch's buffers are returned. CPU is that of this process, all threads."""
    found, bases = {}, [*[f"READ, {name}" for name in MEMORIES], "memcpy"]
    print(
        f"{'method':18} {'ms':>8} {'GB/s':>6} {'of READ':>8} {'huge':>6} {'of memcpy':>10} "
        f"{'cpu ms':>7} best"
    )
    for name, some in seconds.items():
        wall, cpu = (statistics.median(column) for column in zip(*some, strict=True))
        ratios = [
            statistics.median(a / b for (a, _), (b, _) in zip(seconds[base], some, strict=True))
            for base in bases
        ]
        print(
            f"{name:18} {wall * 1e3:8.1f} {nbytes / wall / 1e9:6.2f} {ratios[0]:8.2f} "
            f"{ratios[1]:6.2f} {ratios[2]:10.2f} {cpu * 1e3:7.1f} {min(some)[0] * 1e3:6.1f}"
        )
        found[name] = ratios[0]
    return found


def run(args: argparse.Namespace, case: Case) -> float:
    """One case in a world of its own: endpoints of other cases would poll beside it. Returns what
    the pull reaches of the bulk READ."""
    key, context = secrets.token_bytes(32), mp.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=source, args=(there, args, case, key))
    child.start()
    exports, metadata, addresses = here.recv()
    target = Target(args, case, key, exports)
    nbytes = target.bound.plan.nbytes
    raw = Raw(nbytes, metadata, addresses)
    report = target.pull(verify=True)
    load = os.getloadavg()[0]
    seconds = measure(methods_of(args, raw, case, target), args.rounds)
    print(
        f"\n{case}: {report.num_descriptors} descriptors, {report.num_links} links, "
        f"{'+'.join(report.strategies)}, {report.num_parts} parts, verified {report.verified}\n"
        f"W={W} -> 1, {nbytes / MIB:.0f} MiB, {args.tokens} tokens, {len(target.cache.pages)} "
        f"components, median of {args.rounds}, load {load:.1f} -> {os.getloadavg()[0]:.1f}"
    )
    found = show(seconds, nbytes)
    target.endpoint.close()
    raw.agent.close()
    here.send(None)
    child.join()
    return found[f"pull {case}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--layers", type=int, default=78, help="main layers; the MTP one is extra")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--each", action="store_true", help="also every forced strategy")
    parser.add_argument("--skip-naive", action="store_true")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)))
    parser.add_argument("--worlds", type=int, default=1, help="of every case, in turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[Case, list[float]] = {CASES[i]: [] for i in args.cases}
    for _ in range(args.worlds):
        for case, ratios in found.items():
            ratios.append(run(args, case))
    for case, ratios in found.items() if args.worlds > 1 else ():
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{case}: {statistics.median(ratios):.2f} of the bulk READ, by world {each}")


if __name__ == "__main__":
    main()
