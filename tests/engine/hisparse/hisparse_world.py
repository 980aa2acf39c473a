"""What the HiSparse tests share: memories with latents on the host or with pages of everything,
forward passes of the fixture model over them, and passes of a bare KV cache with made-up rows."""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
from attrs import define, field, frozen

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_world import reference_model

from kvflow.comm.local import LocalComm
from kvflow.engine.access import PagedMemory
from kvflow.engine.hisparse import HiSparseMemory, HiSparseSizes, hisparse_layout
from kvflow.engine.memory import StepRequest
from kvflow.kernels.codec import (
    decode_index_key,
    decode_latent,
    encode_index_key,
    encode_latent,
    latent_rank,
)
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.indexer import first_positions
from kvflow.models.kvstep import IndexQueries
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.hotfetch import index_groups
from kvflow.transfers.planner import plan_transfer

TEXTS = np.random.default_rng(11).integers(2, 320, (8, 512)).tolist()
"""Token ids of the tests' requests."""
TOPK = 16
ALONE = Placement.simple(Replicated())


def model():
    return reference_model("float32", "float64")


# --- memories -------------------------------------------------------------------------------------


def paged_memory(spec=None, block=8, num_blocks=64):
    spec = spec or model().spec
    layout = KVLayout.uniform(spec, ALONE, Paged(block))
    return PagedMemory(layout, RankCache.allocate(layout, 0, {"kv": num_blocks}, 0x5A), LocalComm())


def hisparse_memory(sizes=None, spec=None, block=8, num_blocks=64, **allocation):
    """`num_blocks` in both groups, unless it is a dict."""
    spec = spec or model().spec
    if not isinstance(num_blocks, dict):
        num_blocks = {"latent": num_blocks, "indexer": num_blocks}
    layout = hisparse_layout(spec, ALONE, block)
    sizes = sizes or HiSparseSizes(TOPK, 4, TOPK)
    return HiSparseMemory.allocate(layout, LocalComm(), num_blocks, sizes, **allocation)


@define(eq=False)
class Blocks:
    """Hands out block ids of every group of a memory, each group in its own random order."""

    memory: object
    seed: int = 0
    num_blocks: dict = field(init=False)
    free: dict = field(init=False)

    def __attrs_post_init__(self):
        rng, layout = np.random.default_rng(self.seed), self.memory.layout
        pages = self.memory.cache.pages
        self.num_blocks = {g.name: pages[g.components[0]].num_blocks for g in layout.groups}
        self.free = {name: rng.permutation(n).tolist() for name, n in self.num_blocks.items()}

    def take(self, length):
        need = self.memory.layout.num_blocks_for(length)
        return {name: [self.free[name].pop() for _ in range(n)] for name, n in need.items()}

    def give_back(self, tables):
        for name, ids in tables.items():
            self.free[name] += ids

    def bind(self, tables, length):
        return Binding.of(self.memory.layout, tables, self.num_blocks, length)


def pull(source, source_tables, target, target_tables, length):
    """Positions [0, length) of a request, by a derived plan; each side is `Blocks`."""
    here, there = source.memory, target.memory
    plan = plan_transfer(here.layout, there.layout, (0, length))
    bound = BoundPlan(plan, source.bind(source_tables, length), target.bind(target_tables, 0))
    StridedExecutor().execute(bound, {0: here.cache}, {0: there.cache})


# --- the fixture model ----------------------------------------------------------------------------


def request_of(name, start, count, tables, home=(0,)):
    """Positions [start, start + count), all computed by the ranks of a home."""
    queries = Placement(Replicated(start, start + count), (home,))
    return StepRequest(name, start, start + count, queries, tables)


def step(memory, items):
    """Computes tokens [start, start + len(tokens)) of some requests in one forward pass, each item
    (name, start, tokens, tables); their MTP rows too, told that token 7 follows. The logits of
    every new position, by request."""
    glm, comm = model(), LocalComm()
    requests = [request_of(name, start, len(t), tables) for name, start, t, tables in items]
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


@frozen(eq=False)
class Prefilled:
    """Requests of which a paged memory holds a prompt: blocks, tables and prompt by number."""

    blocks: Blocks
    tables: dict
    prompts: dict
    first: dict
    """The token behind each prompt."""


@functools.lru_cache
def prefilled(*lengths, room=48):
    """Text i, `lengths[i]` tokens of it, with blocks for `room` more."""
    blocks = Blocks(paged_memory(num_blocks=sum(-(-(n + room) // 8) for n in lengths)), 1)
    tables = {i: blocks.take(n + room) for i, n in enumerate(lengths)}
    prompts = {i: TEXTS[i][:n] for i, n in enumerate(lengths)}
    first = {}
    for i, prompt in prompts.items():
        for start in range(0, len(prompt), 128):
            part = prompt[start : start + 128]
            first[i] = best(step(blocks.memory, [(i, start, part, tables[i])])[i])[-1]
    return Prefilled(blocks, tables, prompts, first)


def best(logits):
    """The greedy token of every position."""
    return logits.argmax(-1).tolist()


def pulled(source, memory, names=None, room=48, seed=0):
    """(blocks, tables) of a memory that has taken over requests of a `Prefilled`."""
    blocks = Blocks(memory, seed)
    tables = {}
    for i in source.prompts if names is None else names:
        n = len(source.prompts[i])
        tables[i] = blocks.take(n + room)
        pull(source.blocks, source.tables[i], blocks, tables[i], n)
    return blocks, tables


def greedy_tokens(memory, tables, source, num_tokens, names=None):
    """Decodes requests of a `Prefilled` together, one token each a step."""
    tokens = {i: [source.first[i]] for i in (source.prompts if names is None else names)}
    for n in range(num_tokens - 1):
        items = [(i, len(source.prompts[i]) + n, t[-1:], tables[i]) for i, t in tokens.items()]
        for i, logits in step(memory, items).items():
            tokens[i].append(best(logits)[-1])
    return tokens


# --- a bare KV cache ------------------------------------------------------------------------------


LATENT_RANK, ROPE_DIM, INDEX_DIM = 16, 4, 8


def small_spec(kv_dtype="fp8"):
    """Index groups of two, two and one layer (the MTP layer), as small as can be."""
    config = {
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": LATENT_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "index_head_dim": INDEX_DIM,
        "indexer_types": ["full", "shared", "full", "shared"],
    }
    return KVCacheSpec.from_config(config, kv_dtype=kv_dtype)


def width_of(record):
    """Values of a latent row or an index key."""
    row = torch.zeros(1, record.nbytes, dtype=torch.uint8)
    is_key = record.fields[0].name == "key"
    return (decode_index_key if is_key else decode_latent)(record, row).shape[1]


def made_up_rows(spec, name, rng, n):
    """Packed rows of a component, uint8 [n, nbytes]."""
    record = spec[name].record
    values = torch.from_numpy(rng.standard_normal((n, width_of(record))))
    if spec[name].kind == "indexer":
        return encode_index_key(record, values)
    rank = latent_rank(record)
    return encode_latent(record, values[:, :rank], values[:, rank:])


def bare_step(memory, requests, topk, seed):
    """One pass over every layer with made-up rows and queries, functions of the seed; the MTP
    layer's included. The attention of every layer, by component; of the queries of the memory's
    rank where there are several."""
    spec, rng, rank = memory.layout.spec, np.random.default_rng(seed), memory.comm.rank
    kv = memory.open(requests, frozenset())
    local = [torch.from_numpy(r.local_positions(rank)) for r in requests]
    places = zip(local, requests, strict=True)
    segments = [Segment(i, at, r.stop) for i, (at, r) in enumerate(places) if len(at)]
    n = sum(r.stop - r.start for r in requests)
    ends = np.cumsum([r.stop - r.start for r in requests])
    mine = torch.cat([at + int(e) - r.stop for at, r, e in zip(local, requests, ends, strict=True)])
    mine, outs = mine.numpy(), {}
    for group in index_groups(spec):
        indexer = f"indexer.{spec[group[0]].layer_id}"
        for latent in group:
            kv.publish(latent, made_up_rows(spec, latent, rng, n)[mine])
            if latent == group[0]:
                kv.publish(indexer, made_up_rows(spec, indexer, rng, n)[mine])
                width = width_of(spec[indexer].record)
                selection = _select(kv, indexer, segments, topk, rng, n, mine, width)
            width = width_of(spec[latent].record)
            queries = torch.from_numpy(rng.standard_normal((n, 2, width)))[mine]
            outs[latent] = kv.attend(latent, queries, selection)
            kv.release(latent)
    return outs


def _select(kv, indexer, segments, topk, rng, n, mine, width):
    queries = rng.standard_normal((n, 4, width))[mine]
    weights = rng.standard_normal((n, 4))[mine]
    if kv.max_context_len <= topk:
        chosen = [first_positions(s.positions, min(topk, s.context_len)) for s in segments]
    else:
        asked = IndexQueries(torch.from_numpy(queries), torch.from_numpy(weights), topk)
        chosen = kv.topk(indexer, asked, segments)
    return Selection.of(chosen, segments, topk)
