"""Bytes that bring a cached context to the queries of an extend, way by way, at GLM-5.3's sizes.

    python benchmarks/context_gather.py [--ranks P] [--new N] [--cached L] [--layers N] [--svg FILE]

First, one step is carried out on P = W thread ranks: every collective of every layer that a way
makes, with real pages, and each query choosing its top-k at random, independently. The bytes that
each rank receives are counted around the collectives themselves. Attention is not computed: it
moves nothing. Then the cost model plans other lengths, for which nothing moves.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import define
from measure import load
from svgplot import chart, page
from torch import Tensor

from kvflow.comm import Comm, run_ranks
from kvflow.engine.access import PageShard
from kvflow.engine.access.choice import (
    AttentionShape,
    IndexShape,
    StepCounts,
    choose_attention,
    choose_index,
)
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.order import LayerOrder
from kvflow.engine.access.union import Union
from kvflow.engine.access.whole import WholeRanges
from kvflow.engine.memory import StepRequest
from kvflow.kernels.pages import PageView
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import KVDType
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.transfers.executors.base import RankCache

TOPK, BLOCK = 2048, 64
HEADS, ROW, RANK, INDEX_HEADS, INDEX_DIM = 64, 576, 512, 32, 128
PLENTY = 1 << 40


@define(eq=False)
class Counted:
    """A group that counts what this rank receives from others."""

    inner: Comm
    nbytes: int = 0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        out = self.inner.all_gather(rows, counts)
        self._note(out, counts)
        return out

    def all_to_all(
        self, rows: Tensor, counts: Sequence[int], received: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        out, arrived = self.inner.all_to_all(rows, counts, received)
        self._note(out, arrived)
        return out, arrived

    def _note(self, rows: Tensor, counts: Sequence[int]) -> None:
        others = sum(counts) - counts[self.rank]
        self.nbytes += others * rows.shape[1:].numel() * rows.element_size()


def spec_of(kv_dtype: KVDType, num_layers: int) -> KVCacheSpec:
    config = dict(GLM_5_3, num_hidden_layers=num_layers, num_nextn_predict_layers=0)
    return KVCacheSpec.from_config(config, kv_dtype=kv_dtype)


@define(eq=False)
class Step:
    """One request of `cached` tokens and `new` more on one rank. All components of a kind lie in
    the same memory: what bytes say is not what is counted here."""

    comm: Counted
    facts: StepFacts
    shard: PageShard
    order: LayerOrder

    @classmethod
    def on(cls, comm: Comm, kv_dtype: KVDType, num_layers: int, cached: int, new: int) -> "Step":
        spec, size = spec_of(kv_dtype, num_layers), comm.size
        mesh = Mesh((Axis("pcp", size), Axis("dcp", size, ("pcp",))))
        layout = KVLayout.uniform(spec, mesh.place(RoundRobin(size, BLOCK), "dcp"), Paged(BLOCK))
        num = layout.num_blocks_for(cached + new)["kv"]
        deal = Placement.simple(BalancedChunks(size, cached, cached + new))
        table = np.random.default_rng(1).permutation(num).tolist()
        request = StepRequest("a", cached, cached + new, deal, {"kv": table})
        facts, pages = StepFacts(layout, comm.rank, [request], size), {}
        for kind in ("latent", "indexer"):
            record = spec[spec.select(kind=kind)[0]].record
            page = record.page_pitch(BLOCK)
            memory = torch.zeros(num * page, dtype=torch.uint8)
            view = PageView(memory, record, BLOCK, page)
            pages |= dict.fromkeys(spec.select(kind=kind), view)
        shard = PageShard(facts, RankCache(comm.rank, pages))
        return cls(Counted(comm), facts, shard, LayerOrder(spec))

    @property
    def latents(self) -> tuple[str, ...]:
        return self.facts.layout.spec.select(kind="latent")

    @property
    def indexers(self) -> tuple[str, ...]:
        return self.facts.layout.spec.select(kind="indexer")

    def whole(self, components: Sequence[str]) -> None:
        """All-gathers the cached rows of each component."""
        cached = self.facts.requests[0].start
        ranges = WholeRanges(self.facts, self.shard, "attention rows", [(0, 0, cached)])
        for name in components:
            ranges.fetch(name).run(self.comm)

    def union(self) -> None:
        """Per index group one exchange of what is chosen, per layer one of rows."""
        union, rng = None, np.random.default_rng(self.comm.rank)
        for name in self.latents:
            if self.order.indexer(name) or union is None:
                chosen = self.choose(rng)
                union = Union.agree(self.comm, self.facts, self.shard, 0, chosen, Counters())
            union.fetch(name).run(self.comm)

    def choose(self, rng: np.random.Generator) -> Selection:
        """Independent choices of each query among the positions up to its own."""
        request = self.facts.requests[0]
        positions = torch.from_numpy(request.local_positions(self.comm.rank))
        chosen = [
            np.sort(rng.choice(p + 1, min(TOPK, p + 1), replace=False)) for p in positions.tolist()
        ]
        segments = [Segment(0, positions, request.stop)] if len(positions) else []
        rows = [torch.from_numpy(np.array(chosen))] if segments else []
        return Selection.of(rows, segments, TOPK)


def carried(comm: Comm, args: argparse.Namespace) -> dict[str, int]:
    """Bytes that this rank receives in one step, by what moves."""
    received = {}
    packed = Step.on(comm, "fp8", args.layers, args.cached, args.new)
    plain = Step.on(comm, "bfloat16", args.layers, args.cached, args.new)
    for name, step, run in (
        ("whole latent rows, bf16", plain, lambda: plain.whole(plain.latents)),
        ("index keys, bf16", plain, lambda: plain.whole(plain.indexers)),
        ("whole latent rows, packed", packed, lambda: packed.whole(packed.latents)),
        ("index keys, packed", packed, lambda: packed.whole(packed.indexers)),
        ("union of chosen rows, packed", packed, packed.union),
    ):
        step.comm.nbytes = 0
        run()
        received[name] = step.comm.nbytes
    return received


def counts(new: int, cached: int, ranks: int) -> StepCounts:
    deal = BalancedChunks(ranks, cached, cached + new)
    queries = [[int(n)] for n in deal.local_len(cached + new, range(ranks))]
    return StepCounts((cached,), (cached + new,), queries, ranks)


def shapes(num_layers: int) -> tuple[AttentionShape, IndexShape, int, int]:
    """GLM-5.3 with bf16 queries and float32 answers, and its numbers of layers and indexers."""
    spec = spec_of("fp8", num_layers)
    latents, indexers = spec.select(kind="latent"), spec.select(kind="indexer")
    attention = AttentionShape(
        spec[latents[0]].record.nbytes,
        HEADS * ROW * 2,
        HEADS * (RANK + 1) * 4,
        TOPK,
        len(latents) / len(indexers),
    )
    index = IndexShape(
        spec[indexers[0]].record.nbytes, INDEX_HEADS * (INDEX_DIM + 1) * 2, 4 + 4, TOPK
    )
    return attention, index, len(latents), len(indexers)


def planned(new: int, cached: int, ranks: int, num_layers: int) -> dict[str, float]:
    """Bytes that one rank receives in a step, all layers together, by way."""
    attention, index, num_latents, num_indexers = shapes(num_layers)
    step = counts(new, cached, ranks)
    ways = {way: attention.nbytes(way, step) for way in ("whole", "union", "queries")}
    keys = {way: index.nbytes(way, step) for way in ("keys", "queries")}
    best = ways[choose_attention(attention, step, None, PLENTY)]
    best_keys = keys[choose_index(index, step, None, PLENTY)]
    return {
        "whole, keys": (num_latents * ways["whole"] + num_indexers * keys["keys"]) / ranks,
        "union, keys": (num_latents * ways["union"] + num_indexers * keys["keys"]) / ranks,
        "queries, queries": (num_latents * ways["queries"] + num_indexers * keys["queries"])
        / ranks,
        "chosen": (num_latents * best + num_indexers * best_keys) / ranks,
    }


def report_carried(args: argparse.Namespace) -> None:
    results = run_ranks(args.ranks, lambda comm: carried(comm, args), timeout_s=600)
    total = {name: sum(r[name] for r in results) / args.ranks for name in results[0]}
    print(f"{args.new} new tokens on {args.cached}, {args.layers} layers, counted; a rank receives")
    for name, nbytes in total.items():
        print(f"  {name:32} {nbytes / 1e6:10.2f} MB")
    bf16 = total["whole latent rows, bf16"] + total["index keys, bf16"]
    whole = total["whole latent rows, packed"] + total["index keys, packed"]
    union = total["union of chosen rows, packed"] + total["index keys, packed"]
    plan = planned(args.new, args.cached, args.ranks, args.layers)
    print(f"  packed over bf16, index keys included         {whole / bf16:6.3f}")
    print(f"  whole over union, both packed, keys included  {whole / union:6.2f}")
    print(f"  whole over union, as planned                  {_ratio(plan, 'union, keys'):6.2f}")
    print(f"  whole over what the cost model chooses        {_ratio(plan, 'chosen'):6.2f}")


def _ratio(plan: dict[str, float], way: str) -> float:
    return plan["whole, keys"] / plan[way]


def report_planned(args: argparse.Namespace) -> dict[int, dict[int, dict[str, float]]]:
    """{new: {cached: bytes by way}}; prints what is chosen and how much less it moves."""
    attention, index, _, _ = shapes(args.layers)
    news = [64, 256, 713, 2048, 8192]
    contexts = [1 << k for k in range(12, 21)]
    print("\nplanned, independent choices: what the cost model takes, and whole context over it")
    print(f"{'cached':>8}" + "".join(f"{new:>22} new" for new in news))
    table: dict[int, dict[int, dict[str, float]]] = {new: {} for new in news}
    for cached in contexts:
        line = f"{cached:8}"
        for new in news:
            step = counts(new, cached, args.ranks)
            plan = table[new][cached] = planned(new, cached, args.ranks, args.layers)
            ways = (
                f"{choose_attention(attention, step, None, PLENTY)}, "
                f"{choose_index(index, step, None, PLENTY)}"
            )
            line += f"{ways:>18} {_ratio(plan, 'chosen'):6.2f}x"
        print(line)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--cached", type=int, default=32 * TOPK)
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--svg", type=Path, help="draw the planned bytes into this file")
    args = parser.parse_args()
    if min(args.ranks, args.new, args.cached) < 1 or args.layers < 1:
        parser.error("--ranks, --new, --cached and --layers are at least 1")
    torch.set_num_threads(1)
    print(f"P = W = {args.ranks}, GLM-5.3 records (656 B and 132 B), {load()}")
    report_carried(args)
    table = report_planned(args)
    if args.svg:
        charts = [
            chart(
                f"{new} new tokens",
                "bytes a rank receives in a step, all layers",
                {
                    way: [(cached, plan[way]) for cached, plan in table[new].items()]
                    for way in ("whole, keys", "union, keys", "queries, queries", "chosen")
                },
                "cached tokens",
            )
            for new in (64, 713, 8192)
        ]
        args.svg.write_text(page(*charts))


if __name__ == "__main__":
    main()
