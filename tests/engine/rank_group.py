"""A group of prefill ranks that run given steps, without an engine around them."""

import numpy as np
from engine_world import DTYPES, TINY, greedy

from kvflow.comm.threads import run_ranks
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.models.glm import Glm
from kvflow.testing import cells
from kvflow.transfers.executors.base import RankCache

RNG = np.random.default_rng(5)
TOKENS = RNG.integers(0, 320, 64).tolist()
SENTINEL = 0xA5


class Group:
    """`pcp` ranks with one model and cache each; runs steps and notes every collective."""

    def __init__(self, pcp, dcp, interleave=1, block=4, num_blocks=16, kv_dtype="float32"):
        self.models = [
            Glm.load(TINY, kv_dtype=kv_dtype, dtype=DTYPES["float64"], rank=r, size=pcp)
            for r in range(pcp)
        ]
        placement = Mesh((Axis("pcp", pcp), Axis("dcp", dcp, over=("pcp",)))).place(
            RoundRobin(dcp, interleave), "dcp"
        )
        self.layout = KVLayout.uniform(self.models[0].spec, placement, Paged(block))
        self.num_blocks = {"kv": num_blocks}
        self.caches = [
            RankCache.allocate(self.layout, r, self.num_blocks, fill=SENTINEL) for r in range(pcp)
        ]
        self.rows = []

    def run(self, steps):
        """(traces by rank, tokens by request) of steps of items."""
        size = len(self.models)
        traces = [[] for _ in range(size)]

        def rank(comm):
            model = self.models[comm.rank]
            runner = StepRunner.over(model, self.layout, self.caches[comm.rank], comm)
            sampled = {}
            for items in steps:
                sampled.update(runner.run(items))
            return sampled

        results = run_ranks(size, rank, traces=traces)
        return traces, {k: s[0].token for r in results for k, s in r.items()}

    def images(self):
        return [
            {name: view.memory.clone() for name, view in cache.pages.items()}
            for cache in self.caches
        ]

    def cells(self, table, start, stop):
        """Cells of [start, stop) of a request with this block table, by the oracle."""
        binding = Binding.of(self.layout, {"kv": table}, self.num_blocks, stop)
        return list(cells(self.layout, binding, (start, stop), self.layout.spec.names))

    def places(self, cell):
        view = self.caches[cell.rank].pages[cell.component]
        page = view.offset + cell.block_id * view.block_stride
        return [page + i for i in cell.at]


def item(name, start, stop, table, *, last=True, tokens=TOKENS):
    following = None if last else tokens[stop]
    sampling = greedy(1) if last else None
    return StepItem(name, start, tokens[start:stop], following, {"kv": table}, sampling)


def blocks_for(group, length, first=0):
    n = group.layout.num_blocks_for(length)["kv"]
    return list(range(first, first + n))
