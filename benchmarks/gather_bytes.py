"""An all-gather that leaves fp8 rows packed, against one of bf16 rows and against DTensor.

    python benchmarks/gather_bytes.py [--ranks W] [--tokens N] [--rounds R]

W processes gather the latent rows of one layer over gloo, from W round-robin shards in pages of 64
into a whole copy in pages on each rank. What each rank receives is counted by the kernel on its TCP
sockets. Below, the same is done for the one case that DTensor can express: contiguous shards become
replicas. DTensor's tensors are plain rows; kvflow reads and writes pages, in random order.
"""

import argparse

import numpy as np
import torch
from group import in_step, received_nbytes, run_group
from measure import MIB, load, ratio

from kvflow.comm import DistComm
from kvflow.layouts.chunks import Contiguous
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import KVDType
from kvflow.layouts.sharding import Replicated, RoundRobin, Sharding
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.operators import AllGather
from kvflow.transfers.operators.protocol import bind

BLOCK_SIZE = 64
LATENT = "latent.0"
ONE_LAYER = dict(GLM_5_3, num_hidden_layers=1, num_nextn_predict_layers=0)
Arguments = tuple[int, int]


def binding(layout: KVLayout, tokens: int, seed: int) -> Binding:
    num = layout.num_blocks_for(tokens)
    rng = np.random.default_rng(seed)
    return Binding.of(layout, {g: rng.permutation(n) for g, n in num.items()}, num, tokens)


def gather(comm: DistComm, sharding: Sharding, kv_dtype: KVDType, tokens: int):
    """The operator and everything it needs on this rank, as a call."""
    spec = KVCacheSpec.from_config(ONE_LAYER, kv_dtype=kv_dtype)
    everyone = Placement(Replicated(), (tuple(range(comm.size)),))
    src = KVLayout.uniform(spec, Placement.simple(sharding), Paged(BLOCK_SIZE))
    dst = KVLayout.uniform(spec, everyone, Paged(BLOCK_SIZE))
    stage = AllGather(src, dst, comm, (LATENT,))
    here, there = binding(src, tokens, 1), binding(dst, tokens, 2)
    bound = bind(stage, here, there, (0, tokens))
    source = RankCache.allocate(src, comm.rank, here.num_blocks, fill=comm.rank + 1)
    target = RankCache.allocate(dst, comm.rank, there.num_blocks)
    return lambda: stage.execute(bound, {comm.rank: source}, {comm.rank: target})


def redistribute(comm: DistComm, tokens: int, row_nbytes: int):
    """DTensor: rows [tokens, row_nbytes] in contiguous shards -> a replica on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (comm.size,))
    local = torch.full((tokens // comm.size, row_nbytes), comm.rank + 1, dtype=torch.uint8)
    rows = DTensor.from_local(local, mesh, [Shard(0)])
    return lambda: rows.redistribute(mesh, [Replicate()]).to_local()


def measure(comm: DistComm, arguments: Arguments):
    """On every rank: bytes received per call, and seconds."""
    tokens, rounds = arguments
    whole = Contiguous(comm.size, 0, tokens)
    calls = {
        "packed fp8 rows": gather(comm, RoundRobin(comm.size), "fp8", tokens),
        "bf16 rows": gather(comm, RoundRobin(comm.size), "bfloat16", tokens),
        "contiguous fp8 rows": gather(comm, whole, "fp8", tokens),
        "DTensor": redistribute(comm, tokens, 656),
    }
    received = {}
    for name, call in calls.items():
        comm.barrier()
        before = received_nbytes()
        call()
        received[name] = received_nbytes() - before
    return received, in_step(comm, calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.ranks < 2 or args.tokens % args.ranks or args.rounds < 1:
        parser.error("--ranks is at least 2 and divides --tokens, --rounds is at least 1")
    print(f"{args.ranks} processes, {args.tokens} tokens of one layer, {load()}")
    results = run_group(args.ranks, measure, (args.tokens, args.rounds))
    (_, seconds) = results[0]
    total = {name: sum(received[name] for received, _ in results) for name in seconds}
    print(f"{'all-gather of':22} {'MiB received':>13} {'of bf16':>8} {'ms':>8} {'of bf16':>8}")
    for name in total:
        median = sorted(seconds[name])[args.rounds // 2]
        print(
            f"{name:22} {total[name] / MIB:13.2f} {total[name] / total['bf16 rows']:8.3f} "
            f"{median * 1e3:8.1f} {ratio(seconds, name, 'bf16 rows'):8.2f}"
        )
    shares = ratio(seconds, "contiguous fp8 rows", "DTensor")
    print(
        f"kvflow pages to pages over DTensor's redistribute of plain rows: {shares:.2f}x its time"
    )


if __name__ == "__main__":
    main()
