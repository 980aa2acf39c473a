"""How close moves within one process come to the speed of memory.

    python benchmarks/copies.py [--tokens N] [--rows N] [--layers L] [--rounds R] [--threads T ...]

StridedExecutor between caches of one process, whose block tables are random permutations, and a
random gather of 656-byte rows into a reused buffer. (DTensor: see gather_bytes.py.) All calls take
turns, on one thread with times of the process (CPU), on several with times by the clock; the copies
they are compared with have one thread in either case. The last columns are medians over the rounds
of the time of a copy of the same bytes in the same round, over the time of the call:

- copy: torch's `copy_` between two reused, touched buffers, as the caches are allocated;
- memcpy: the C library's, which beyond 48 MiB or so bypasses the cache with streaming stores. No
  copy of single pages can do that, so it is the harder comparison.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from measure import MIB, in_turns, load, ratio
from planning import layout, tables

from kvflow.kernels.region import region_memory
from kvflow.kernels.rows import PageView, gather_rows, scatter_rows
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.record import latent_record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

BLOCK_SIZE = 64
Calls = dict[str, Callable[[], object]]


class Copy:
    """The same bytes, contiguous, between reused and touched buffers."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = (region_memory(nbytes, x) for x in (1, 2))

    def copy(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.target.copy_(self.source)
        torch.set_num_threads(threads)

    def memcpy(self) -> None:
        np.copyto(self.target.numpy(), self.source.numpy())


def report(name: str, nbytes: int, calls: Calls, rounds: int) -> None:
    """One table: every call beside the copies of the same bytes."""
    copies = Copy(nbytes)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = in_turns({"copy": copies.copy, "memcpy": copies.memcpy, **calls}, rounds, clock)
    print(f"\n{name}, {nbytes / MIB:.0f} MiB")
    print(f"{'':34} {'ms':>8} {'GB/s':>6} {'of copy':>8} {'of memcpy':>10}")
    for call, times in seconds.items():
        median = sorted(times)[rounds // 2]
        shares = [1 / ratio(seconds, call, other) for other in ("copy", "memcpy")]
        print(
            f"{call:34} {median * 1e3:8.1f} {nbytes / median / 1e9:6.2f} "
            f"{shares[0]:8.2f} {shares[1]:10.2f}"
        )


def executor_calls(pairs: dict[str, tuple[KVLayout, KVLayout]], tokens: int) -> tuple[Calls, int]:
    """A call per pair of layouts, and the bytes that each moves."""
    calls: Calls = {}
    for name, (src, dst) in pairs.items():
        here, there = tables(src, tokens, 1)(), tables(dst, tokens, 2)()
        bound = BoundPlan(plan_transfer(src, dst, (0, tokens)), here, there)
        sources, targets = (
            {
                rank: RankCache.allocate(side, rank, binding.num_blocks, fill=fill)
                for rank in side.placement.all_ranks
            }
            for side, binding, fill in ((src, here, 1), (dst, there, 2))
        )
        calls[name] = partial(StridedExecutor().execute, bound, sources, targets)
        nbytes = bound.plan.nbytes
    return calls, nbytes


def executor_table(tokens: int, layers: int, rounds: int) -> None:
    def dealt(num_ranks: int, interleave: int, block_size: int = BLOCK_SIZE) -> KVLayout:
        return layout(RoundRobin(num_ranks, interleave), block_size, layers)

    one, small = (layout(Replicated(), size, layers) for size in (BLOCK_SIZE, 16))
    calls, nbytes = executor_calls(
        {
            "64-row pages, 1 rank -> 1": (one, one),
            "64-row pages, DCP8 I=64 -> 1": (dealt(8, 64), one),
            "16-row pages -> 64-row pages": (small, one),
            "DCP8 I=16 -> 1": (dealt(8, 16), one),
            "DCP8 I=1 -> 1": (dealt(8, 1), one),
            "DCP8 I=1 -> DCP6 I=1": (dealt(8, 1), dealt(6, 1)),
        },
        tokens,
    )
    components = len(one.spec.components)
    report(f"StridedExecutor, {tokens} tokens, {components} components", nbytes, calls, rounds)


def row_table(num_rows: int, rounds: int) -> None:
    record = latent_record("fp8", latent_rank=512, rope_dim=64)
    num_blocks = 2 * num_rows // BLOCK_SIZE
    page = record.page_nbytes(BLOCK_SIZE)
    memory = region_memory(num_blocks * page, 1)
    pages = PageView(memory, record, BLOCK_SIZE, page)
    out = region_memory(num_rows * record.nbytes, 2).view(num_rows, -1)
    rows = torch.randperm(pages.num_slots)[:num_rows]
    blocks = torch.randperm(num_blocks)[: num_rows // BLOCK_SIZE, None]
    runs = (blocks * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)
    calls: Calls = {
        "gather random rows": partial(gather_rows, pages, rows, out),
        "gather 64-row pages": partial(gather_rows, pages, runs, out),
        "scatter random rows": partial(scatter_rows, pages, rows, out),
        "scatter 64-row pages": partial(scatter_rows, pages, runs, out),
    }
    report(f"656-byte rows, {num_rows} of {pages.num_slots}", out.numel(), calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=1 << 17)
    parser.add_argument("--layers", type=int, default=26, help="main layers; the MTP one is extra")
    parser.add_argument("--rounds", type=int, default=7)
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    args = parser.parse_args()
    if (
        min(*args.threads, args.tokens, args.layers, args.rounds) < 1
        or args.rows % BLOCK_SIZE
        or args.rows < 1
    ):
        parser.error(f"every number is at least 1, and --rows a multiple of {BLOCK_SIZE}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread(s), medians of {args.rounds} rounds, {load()}")
        executor_table(args.tokens, args.layers, args.rounds)
        row_table(args.rows, args.rounds)


if __name__ == "__main__":
    main()
