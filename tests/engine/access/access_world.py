"""Groups of ranks that run the same steps with a given access, and one rank that runs them."""

import functools

import numpy as np
import torch
from attrs import define, field, frozen
from engine_world import DTYPES, TINY

from kvflow.comm import LocalComm, run_ranks
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.memory import StepRequest, balanced_deal
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.models.glm import Glm
from kvflow.models.segment import Segment
from kvflow.transfers.executors.base import RankCache

SENTINEL = 0xA5
TOKENS = np.random.default_rng(11).integers(0, 320, (8, 400))


@functools.lru_cache
def model(kv_dtype, rank=0, size=1, dtype="float64"):
    return Glm.load(TINY, kv_dtype=kv_dtype, dtype=DTYPES[dtype], rank=rank, size=size)


@frozen
class Chunk:
    """New tokens [start, stop) of request `request`."""

    request: int
    start: int
    stop: int


@define(eq=False)
class World:
    """`pcp` ranks over `dcp` shards. `deal` says who computes what."""

    pcp: int
    dcp: int
    interleave: int = 1
    block: int = 4
    kv_dtype: str = "fp8"
    options: AccessOptions = field(factory=AccessOptions)
    deal: object = None
    num_blocks: int = 220
    dtype: str = "float64"
    memories: dict = field(init=False, factory=dict)
    traces: list = field(init=False, factory=list)
    limits: dict = field(init=False, factory=dict)

    @property
    def layout(self):
        mesh = Mesh((Axis("pcp", self.pcp), Axis("dcp", self.dcp, over=("pcp",))))
        placement = mesh.place(RoundRobin(self.dcp, self.interleave), "dcp")
        return KVLayout.uniform(model(self.kv_dtype).spec, placement, Paged(self.block))

    def tables(self, chunks):
        """Block ids by request: enough for its whole length, the blocks of others in between."""
        last = {}
        for step in chunks:
            for c in step:
                last[c.request] = max(last.get(c.request, 0), c.stop)
        needs = {r: self.layout.num_blocks_for(n)["kv"] for r, n in last.items()}
        ids = np.random.default_rng(3).permutation(self.num_blocks).tolist()
        return {r: {"kv": [ids.pop() for _ in range(n)]} for r, n in needs.items()}

    def run(self, steps):
        """{(request, position): hidden state} of all steps."""
        self.traces = [[] for _ in range(self.pcp)]
        tables = self.tables(steps)
        results = run_ranks(
            self.pcp, lambda comm: self._rank(comm, steps, tables), traces=self.traces
        )
        return {key: row for part in results for key, row in part.items()}

    def _rank(self, comm, steps, tables):
        glm, layout = model(self.kv_dtype, comm.rank, comm.size, self.dtype), self.layout
        cache = RankCache.allocate(layout, comm.rank, {"kv": self.num_blocks}, fill=SENTINEL)
        memory = self.memories[comm.rank] = PagedMemory(layout, cache, comm, self.options)
        deal = self.deal or balanced_deal([(r,) for r in range(comm.size)])
        return drive(glm, memory, comm, steps, tables, deal, self.limits)


def drive(glm, memory, comm, steps, tables, deal, limits=None):
    hidden = {}
    for chunks in steps:
        requests = [
            StepRequest(f"r{c.request}", c.start, c.stop, placement, tables[c.request])
            for c, placement in zip(chunks, deal(chunks), strict=True)
        ]
        kv = memory.open(requests, frozenset(memory.layout.spec.select(part="mtp")))
        mine = [torch.from_numpy(r.local_positions(comm.rank)) for r in requests]
        segments = [Segment(i, p, chunks[i].stop) for i, p in enumerate(mine) if len(p)]
        rows = [(chunks[s.request_idx].request, p) for s in segments for p in s.positions.tolist()]
        tokens = torch.tensor([TOKENS[r][p] for r, p in rows], dtype=torch.int64)
        memory.counters.workspace_peak_nbytes = 0
        out = glm.forward(tokens, segments, kv, comm)
        glm.write_mtp(torch.zeros(len(tokens), dtype=torch.int64), out, segments, kv)
        hidden.update(zip(rows, out, strict=True))
        if limits is not None:
            limits.setdefault(comm.rank, []).append(
                (memory.counters.workspace_peak_nbytes, kv.workspace_limit_nbytes)
            )
        assert memory.counters.workspace_nbytes == 0
    return hidden


@functools.lru_cache(maxsize=256)
def alone(steps, kv_dtype, dtype="float64"):
    """The same steps on one rank that holds everything."""
    glm = model(kv_dtype, dtype=dtype)
    layout = KVLayout.uniform(glm.spec, Placement.simple(Replicated()), Paged(16))
    last = {}
    for step in steps:
        for c in step:
            last[c.request] = max(last.get(c.request, 0), c.stop)
    tables, first = {}, 0
    for r, n in last.items():
        num = layout.num_blocks_for(n)["kv"]
        tables[r] = {"kv": list(range(first, first + num))}
        first += num
    cache = RankCache.allocate(layout, 0, {"kv": first})
    memory = PagedMemory(layout, cache, LocalComm())
    return drive(glm, memory, LocalComm(), steps, tables, balanced_deal([(0,)]))


def tokens_of(hidden, kv_dtype):
    """The greedy token after every position."""
    keys = sorted(hidden)
    logits = model(kv_dtype).logits(torch.stack([hidden[k] for k in keys]))
    return dict(zip(keys, logits.argmax(-1).tolist(), strict=True))
