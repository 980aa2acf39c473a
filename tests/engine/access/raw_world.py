"""Ranks that publish, choose and attend without a model, and an oracle that knows no ranks.

Rows, queries and weights are small integers drawn by name (component, request, position), so that
scores are exact and ties are many: which position wins is a matter of the rule alone.
"""

import functools
import zlib

import numpy as np
import torch
from attrs import define, field, frozen

from kvflow.comm import LocalComm, run_ranks
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.memory import StepRequest, balanced_deal
from kvflow.kernels.codec import encode_index_key, encode_latent
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.kvstep import IndexQueries
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.transfers.executors.base import RankCache

R, DR, DI, INDEX_HEADS, TOPK = 6, 2, 4, 3, 5
SPEC = KVCacheSpec.from_config(
    {
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": R,
        "qk_rope_head_dim": DR,
        "index_head_dim": DI,
        "index_topk_freq": 3,
        "index_skip_topk_offset": 2,
    },
    kv_dtype="float64",
)
LAYERS = [(i, f"indexer.{i}" in SPEC.names) for i in range(5)]


@functools.lru_cache(1 << 16)
def draw(shape, *name):
    """Integers in [-3, 3], the same for the same name."""
    seed = zlib.crc32(repr(name).encode())
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float64)


@frozen
class Part:
    """New tokens [start, stop) of a request, computed by all groups of ranks or by one (`home`)."""

    request: int
    start: int
    stop: int
    home: int | None = None


@define(eq=False)
class Raw:
    """pcp * tp ranks (tp fastest) over dcp shards; `tp` ranks have `heads` heads each."""

    pcp: int
    tp: int
    dcp: int
    interleave: int = 1
    block: int = 4
    options: AccessOptions = field(factory=AccessOptions)
    heads: int = 2
    num_blocks: int = 200
    traces: list = field(init=False, factory=list)
    memories: dict = field(init=False, factory=dict)
    sizes: list = field(init=False, factory=list)

    @property
    def size(self):
        return self.pcp * self.tp

    @property
    def layout(self):
        axes = (Axis("pcp", self.pcp), Axis("tp", self.tp), Axis("dcp", self.dcp, ("pcp", "tp")))
        placement = Mesh(axes).place(RoundRobin(self.dcp, self.interleave), "dcp")
        return KVLayout.uniform(SPEC, placement, Paged(self.block))

    def deal(self, parts):
        groups = [tuple(range(g * self.tp, (g + 1) * self.tp)) for g in range(self.pcp)]
        everyone = balanced_deal(groups)(parts)
        return [
            whole if p.home is None else Placement(Replicated(p.start, p.stop), (groups[p.home],))
            for p, whole in zip(parts, everyone, strict=True)
        ]

    def run(self, steps):
        """{(step, layer, request, position, head): (chosen, out)} of all ranks."""
        self.traces = [[] for _ in range(self.size)]
        tables = self._tables(steps)
        results = run_ranks(self.size, lambda c: self._rank(c, steps, tables), traces=self.traces)
        return {key: value for part in results for key, value in part.items()}

    def _tables(self, steps):
        last = {}
        for parts in steps:
            for p in parts:
                last[p.request] = max(last.get(p.request, 0), p.stop)
        ids = np.random.default_rng(3).permutation(self.num_blocks).tolist()
        need = {r: self.layout.num_blocks_for(n)["kv"] for r, n in last.items()}
        return {r: {"kv": [ids.pop() for _ in range(n)]} for r, n in need.items()}

    def _rank(self, comm, steps, tables):
        torch.set_num_threads(1)
        layout = self.layout
        cache = RankCache.allocate(layout, comm.rank, {"kv": self.num_blocks}, fill=0xA5)
        memory = self.memories[comm.rank] = PagedMemory(layout, cache, comm, self.options)
        found = {}
        for n, parts in enumerate(steps):
            deals = self.deal(parts)
            requests = [
                StepRequest(f"r{p.request}", p.start, p.stop, d, tables[p.request])
                for p, d in zip(parts, deals, strict=True)
            ]
            memory.counters.workspace_peak_nbytes = 0
            kv = memory.open(requests, frozenset(SPEC.select(part="mtp")))
            first_head = comm.rank % self.tp * self.heads
            found.update(drive(n, kv, comm.rank, parts, requests, first_head, self.heads))
            self.sizes.append((memory.counters.workspace_peak_nbytes, kv.workspace_limit_nbytes))
            assert memory.counters.workspace_nbytes == 0
        return found


def packed(component, keys):
    """Packed rows of (request, position) keys."""
    record = SPEC[component].record
    if component.startswith("indexer"):
        rows = [draw((DI,), component, *k) for k in keys]
        return encode_index_key(record, torch.from_numpy(np.array(rows).reshape(-1, DI)))
    rows = np.array([draw((R + DR,), component, *k) for k in keys]).reshape(-1, R + DR)
    both = torch.from_numpy(rows)
    return encode_latent(record, both[:, :R].contiguous(), both[:, R:].contiguous())


def drive(n, kv, rank, parts, requests, first_head, heads):
    """One forward pass over a KVStep, layer by layer as the model does it."""
    mine = [torch.from_numpy(r.local_positions(rank)) for r in requests]
    segments = [Segment(i, p, requests[i].stop) for i, p in enumerate(mine) if len(p)]
    keys = [(parts[s.request_idx].request, p) for s in segments for p in s.positions.tolist()]
    found, selection = {}, None
    for layer, full in LAYERS:
        latent, indexer = f"latent.{layer}", f"indexer.{layer}"
        kv.publish(latent, packed(latent, keys))
        if full:
            kv.publish(indexer, packed(indexer, keys))
            if kv.max_context_len > TOPK:
                q = [draw((INDEX_HEADS, DI), "iq", layer, *k) for k in keys]
                w = [draw((INDEX_HEADS,), "iw", layer, *k) for k in keys]
                q = torch.from_numpy(np.array(q).reshape(-1, INDEX_HEADS, DI))
                w = torch.from_numpy(np.array(w).reshape(-1, INDEX_HEADS))
                chosen = kv.topk(indexer, IndexQueries(q, w, TOPK), segments)
            else:
                columns = [torch.arange(min(TOPK, s.context_len)) for s in segments]
                chosen = [
                    torch.where(c <= s.positions[:, None], c, 0)
                    for c, s in zip(columns, segments, strict=True)
                ]
            selection = Selection.of(chosen, segments, TOPK)
        q = [draw((heads, R + DR), "q", layer, first_head, *k) for k in keys]
        q = torch.from_numpy(np.array(q).reshape(-1, heads, R + DR)) / 4
        out = kv.attend(latent, q, selection)
        rows = [row.tolist() for c in selection.chosen for row in c]
        for i, (request, position) in enumerate(keys):
            for head in range(heads):
                key = n, layer, request, position, first_head + head
                found[key] = rows[i][: position + 1], out[i, head].numpy()
        kv.release(latent)
        if full:
            kv.release(indexer)
    for name in SPEC.select(part="mtp"):
        kv.publish(name, packed(name, keys))
        kv.release(name)
    return found


def oracle(steps, tp, heads):
    """The same by the definition: every query alone, over rows by name."""
    found = {}
    for n, parts in enumerate(steps):
        for p in parts:
            for position in range(p.start, p.stop):
                key = p.request, position
                for layer, full in LAYERS:
                    if full:
                        chosen = _best(layer, key)
                    rows = np.array(
                        [draw((R + DR,), f"latent.{layer}", p.request, t) for t in chosen]
                    )
                    for first in range(0, tp * heads, heads):
                        queries = draw((heads, R + DR), "q", layer, first, *key) / 4
                        for head in range(heads):
                            scores = rows @ queries[head]
                            weights = np.exp(scores - scores.max())
                            out = (weights / weights.sum()) @ rows[:, :R]
                            found[n, layer, *key, first + head] = chosen, out
    return found


def _best(layer, key):
    """Score descending, position ascending; then in order of position."""
    request, position = key
    q, w = draw((INDEX_HEADS, DI), "iq", layer, *key), draw((INDEX_HEADS,), "iw", layer, *key)
    scores = [
        float(w @ np.maximum(q @ draw((DI,), f"indexer.{layer}", request, t), 0))
        for t in range(position + 1)
    ]
    order = sorted(range(position + 1), key=lambda t: (-scores[t], t))
    return sorted(order[:TOPK])


def alone(steps, tp, heads):
    """The same on one rank that holds everything, head group by head group."""
    found = {}
    for first in range(tp):
        layout = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(8))
        last = {}
        for parts in steps:
            for p in parts:
                last[p.request] = max(last.get(p.request, 0), p.stop)
        tables, num = {}, 0
        for r, length in last.items():
            blocks = layout.num_blocks_for(length)["kv"]
            tables[r] = {"kv": list(range(num, num + blocks))}
            num += blocks
        memory = PagedMemory(layout, RankCache.allocate(layout, 0, {"kv": num}), LocalComm())
        for n, parts in enumerate(steps):
            requests = [
                StepRequest(
                    f"r{p.request}",
                    p.start,
                    p.stop,
                    Placement.simple(Replicated(p.start, p.stop)),
                    tables[p.request],
                )
                for p in parts
            ]
            kv = memory.open(requests, frozenset(SPEC.select(part="mtp")))
            found.update(drive(n, kv, 0, parts, requests, first * heads, heads))
    return found
