"""A rank of a gloo group that runs collective operators on request: the child of test_gloo."""

import torch
from torch.distributed import TCPStore

from kvflow.comm import connect_gloo, disconnect
from kvflow.layouts.layout import Binding
from kvflow.layouts.wire import layout_from_wire
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators import AllGather, PartialAttention, ReduceScatter
from kvflow.transfers.planner import plan_transfer


def binding_of(side):
    layout, tables, num_blocks, length = side
    return Binding.of(layout_from_wire(layout), tables, num_blocks, length)


def filled(layout, rank, num_blocks, images):
    cache = RankCache.allocate(layout, rank, num_blocks)
    for name, image in images.items():
        cache.pages[name].memory.copy_(torch.frombuffer(bytearray(image), dtype=torch.uint8))
    return cache


def images_of(cache):
    return {name: view.memory.numpy().tobytes() for name, view in cache.pages.items()}


def gather(comm, src, dst, tokens, padded, before, target):
    """This rank's target bytes."""
    src, dst = binding_of(src), binding_of(dst)
    bound = BoundPlan(plan_transfer(src.layout, dst.layout, tokens), src, dst)
    source = filled(src.layout, comm.rank, src.num_blocks, before)
    cache = filled(dst.layout, comm.rank, dst.num_blocks, target)
    stage = AllGather(src.layout, dst.layout, comm, padded=padded)
    stage.execute(bound, {comm.rank: source}, {comm.rank: cache})
    return images_of(cache)


def scatter(comm, axis, counts, base, out, lse):
    """What this rank ends with, as arrays."""
    partial = PartialAttention(torch.from_numpy(out), torch.from_numpy(lse), base)
    mine = ReduceScatter(comm, axis, counts, base).execute(partial)
    return mine.out.numpy(), mine.lse.numpy()


def serve(rank, size, port, pipe):
    """Answers ("gather" or "scatter", arguments) until it is sent None."""
    torch.set_num_threads(1)
    comm = connect_gloo(rank, size, TCPStore("127.0.0.1", port, is_master=False))
    while (asked := pipe.recv()) is not None:
        name, *arguments = asked
        pipe.send({"gather": gather, "scatter": scatter}[name](comm, *arguments))
    disconnect()
