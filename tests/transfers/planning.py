"""Shared by the tests of transfers: short ways to say a layout, and plans read token by token."""

from typing import Any

from attrs import evolve

from kvflow.layouts.layout import Binding, KVLayout, Stage
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin, Sharding
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing import deal
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns

CONFIG = {
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "index_head_dim": 4,
    "indexer_types": ["full", "shared"],
}
SPEC = KVCacheSpec.from_config(CONFIG)


def layout(where: Sharding | Placement, block_size: int = 4, spec: KVCacheSpec = SPEC) -> KVLayout:
    placement = where if isinstance(where, Placement) else Placement.simple(where)
    return KVLayout.uniform(spec, placement, Paged(block_size))


def dcp(num_ranks: int, interleave: int = 1, block_size: int = 4) -> KVLayout:
    return layout(RoundRobin(num_ranks, interleave), block_size)


def whole(block_size: int = 4) -> KVLayout:
    return layout(Replicated(), block_size)


def bound(side: KVLayout, length: int, extra: int = 1) -> Binding:
    """Block ids descending, so that neighbours in the request are none in the pool."""
    need = side.num_blocks_for(length)
    tables = {g: list(range(n))[::-1] for g, n in need.items()}
    return Binding.of(side, tables, {g: n + extra for g, n in need.items()}, length)


Move = tuple[int, int, int, int, int]
"""(source rank, source local, target rank, target local, token)."""


def moves(runs: TransferRuns) -> list[Move]:
    """Every token that the runs move, one by one."""
    still = [0] * len(runs)
    columns = (
        (runs.src_rank, still),
        (runs.src_local, runs.src_stride),
        (runs.dst_rank, still),
        (runs.dst_local, runs.dst_stride),
        (runs.token, runs.token_stride),
    )
    out = []
    for i, count in enumerate(runs.count.tolist()):
        steps = [(int(a[i]), int(b[i])) for a, b in columns]
        out += [tuple(at + k * step for at, step in steps) for k in range(count)]
    return out


def held(placement: Placement, stop: int) -> dict[tuple[int, int], int]:
    """(rank, local index) -> position, by dealing."""
    hands = deal(placement.sharding, stop)
    return {
        (rank, i): t
        for hand, ranks in zip(hands, placement.ranks, strict=True)
        for rank in ranks
        for i, t in enumerate(hand)
    }


def with_runs(plan: Plan, runs: TransferRuns) -> Plan:
    """The plan with other runs in its first part."""
    first: PlanPart = evolve(plan.parts[0], runs=runs)
    return Plan(plan.src, plan.dst, (first, *plan.parts[1:]), plan.absent)


def gqa(num_heads: int, num_layers: int = 1) -> KVCacheSpec:
    return KVCacheSpec.of_attention(num_layers, num_heads=num_heads, head_dim=2)


def tp(
    num_heads: int, width: int, deal: int = 1, block_size: int = 4, interleave: int = 1,
    spec: KVCacheSpec | None = None, **more: Any,
) -> KVLayout:  # fmt: skip
    """TP ranks 0..width-1, one a coordinate; tokens are dealt to every `deal` neighbours in turn
    (so `deal` must divide the replicas of a head), or whole on each rank."""
    sharding = RoundRobin(deal, interleave) if deal > 1 else Replicated()
    turns = tuple(tuple(r for r in range(width) if r % deal == s) for s in range(deal))
    layout = KVLayout.uniform(spec or gqa(num_heads), Placement(sharding, turns), Paged(block_size))
    return evolve(layout, head_ranks=tuple((r,) for r in range(width)), **more)


FIRST, SECOND = ("key.0", "value.0"), ("key.1", "value.1")


def staged(ranks: tuple[tuple[int, ...], ...], width: int = 4) -> KVLayout:
    spec = gqa(2, 2)
    layout = KVLayout.uniform(spec, Placement(Replicated(), (tuple(range(width)),)), Paged(4))
    return evolve(layout, stages=(Stage(FIRST, ranks[0]), Stage(SECOND, ranks[1])))
