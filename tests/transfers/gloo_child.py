"""A rank of a gloo group that runs all-gathers on request: the child of test_gloo_gather."""

import torch
from torch.distributed import TCPStore

from kvflow.comm import connect_gloo, disconnect
from kvflow.layouts.layout import Binding
from kvflow.layouts.wire import layout_from_wire
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators import AllGather
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


def serve(rank, size, port, pipe):
    """Answers (src, dst, tokens, source bytes, target bytes) with this rank's target bytes."""
    torch.set_num_threads(1)
    comm = connect_gloo(rank, size, TCPStore("127.0.0.1", port, is_master=False))
    while (asked := pipe.recv()) is not None:
        src, dst, tokens, before, target = asked
        src, dst = binding_of(src), binding_of(dst)
        bound = BoundPlan(plan_transfer(src.layout, dst.layout, tokens), src, dst)
        source = filled(src.layout, rank, src.num_blocks, before)
        cache = filled(dst.layout, rank, dst.num_blocks, target)
        AllGather(src.layout, dst.layout, comm).execute(bound, {rank: source}, {rank: cache})
        pipe.send(images_of(cache))
    disconnect()
