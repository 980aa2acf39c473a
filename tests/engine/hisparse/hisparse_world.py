"""What the HiSparse tests share: one rank with latents on the host, and one with pages of all."""

import sys
from pathlib import Path

import numpy as np
from attrs import define, field

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from engine_world import reference_model

from kvflow.comm.local import LocalComm
from kvflow.engine.hisparse import HiSparseMemory, HiSparseSizes, hisparse_layout
from kvflow.engine.memory import StepRequest
from kvflow.engine.pagedstep import PagedMemory
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.models.segment import Segment
from kvflow.transfers.executors.base import RankCache

RNG = np.random.default_rng(11)
TEXTS = RNG.integers(2, 320, (8, 512)).tolist()
"""Token ids of the tests' requests."""
TOPK = 16


def model(kv_dtype="float32"):
    return reference_model(kv_dtype, "float64")


def paged_memory(block=8, num_blocks=64, glm=None):
    glm = glm or model()
    layout = KVLayout.uniform(glm.spec, Placement.simple(Replicated()), Paged(block))
    return PagedMemory(layout, RankCache.allocate(layout, 0, {"kv": num_blocks}, 0x5A), LocalComm())


def hisparse_memory(
    sizes=None, block=8, num_blocks=64, num_index_blocks=64, glm=None, **allocation
):
    glm = glm or model()
    layout = hisparse_layout(glm.spec, Placement.simple(Replicated()), block)
    return HiSparseMemory.allocate(
        layout,
        LocalComm(),
        {"latent": num_blocks, "indexer": num_index_blocks},
        sizes or HiSparseSizes(TOPK, 4, TOPK),
        **allocation,
    )


@define(eq=False)
class Blocks:
    """Hands out block ids of every group of a memory, each group in its own random order."""

    memory: object
    num_blocks: dict
    seed: int = 0
    free: dict = field(init=False)

    def __attrs_post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.free = {name: rng.permutation(n).tolist() for name, n in self.num_blocks.items()}

    def take(self, length):
        need = self.memory.layout.num_blocks_for(length)
        return {name: [self.free[name].pop() for _ in range(n)] for name, n in need.items()}

    def give_back(self, tables):
        for name, ids in tables.items():
            self.free[name] += ids


def step(memory, items, glm=None):
    """Computes tokens [start, start + len(tokens)) of some requests in one forward pass, each item
    (name, start, tokens, tables); their MTP rows too, told that token 7 follows. The logits of
    every new position, by request."""
    glm, comm = glm or model(), LocalComm()
    alone = Placement.simple(Replicated())
    requests = [
        StepRequest(name, start, start + len(tokens), replace(alone, start, len(tokens)), tables)
        for name, start, tokens, tables in items
    ]
    kv = memory.open(requests, frozenset(glm.spec.select(part="mtp")))
    segments = [Segment(i, torch.arange(r.start, r.stop), r.stop) for i, r in enumerate(requests)]
    tokens = torch.tensor([t for _, _, tokens, _ in items for t in tokens], dtype=torch.int64)
    hidden = glm.forward(tokens, segments, kv, comm)
    following = [[*tokens[1:], 7] for _, _, tokens, _ in items]
    glm.write_mtp(torch.tensor([t for f in following for t in f]), hidden, segments, kv)
    counts = [len(s) for s in segments]
    return dict(
        zip([r.request_id for r in requests], glm.logits(hidden).split(counts), strict=True)
    )


def replace(placement, start, count):
    """The same ranks, for positions [start, start + count)."""
    return Placement(Replicated(start, start + count), placement.ranks)


def chosen(logits):
    """The greedy token of every position."""
    return logits.argmax(-1).tolist()
