"""Shared by the tests of operators: layouts, drawn pairs of them, and ways to move bytes."""

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Pool
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing import Attention, Case, bindings, layouts, specs, token_ranges
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.operators import ViaEndpoints, ViaPush
from kvflow.transfers.operators.offload import narrowed

CONFIG = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "index_head_dim": 4,
    "indexer_types": ["full", "shared"],
}
SPEC = KVCacheSpec.from_config(CONFIG)


def bound_to(layout: KVLayout, length: int, extra: int = 1) -> Binding:
    """Block ids descending, so that neighbours in the request are none in the pool."""
    need = layout.num_blocks_for(length)
    tables = {g: list(range(n))[::-1] for g, n in need.items()}
    return Binding.of(layout, tables, {g: n + extra for g, n in need.items()}, length)


@frozen(eq=False)
class Connected:
    """An executor of endpoints that are made for one transfer, all connected to all."""

    push: bool

    def execute(self, bound, sources, targets) -> None:
        fabric = LocalFabric()
        here, there = (
            {rank: LocalEndpoint(cache, fabric) for rank, cache in side.items()}
            for side in (sources, targets)
        )
        active, passive = (here, there) if self.push else (there, here)
        peers = {rank: endpoint.name for rank, endpoint in passive.items()}
        for endpoint in active.values():
            for other in passive.values():
                endpoint.connect(other.export())
        via = (ViaPush if self.push else ViaEndpoints)(active, peers, 10.0, verify=True)
        via.execute(bound, sources, targets)


EXECUTORS = {
    "reference": ReferenceExecutor(),
    "strided": StridedExecutor(),
    "pull": Connected(push=False),
    "push": Connected(push=True),
}


def whole_ranks(layout: KVLayout) -> KVLayout:
    """The layout in which every rank holds all heads of all components."""
    return evolve(layout, head_ranks=(), stages=(), hosts=())


@st.composite
def gather_cases(draw: st.DrawFn) -> Case:
    """Any sharding over ranks 0..n-1 -> replicated over the same ranks."""
    tokens = draw(token_ranges(24))
    spec = draw(specs())
    src = whole_ranks(draw(layouts(spec, tokens, max_shards=4)))
    start = draw(st.integers(0, tokens[0]))
    sharding = draw(st.sampled_from([Replicated(), Replicated(start, tokens[1])]))
    everyone = Placement(sharding, (src.placement.all_ranks,))
    dst = evolve(whole_ranks(draw(layouts(spec, tokens))), placement=everyone)
    sides = [draw(bindings(layout, tokens[1])) for layout in (src, dst)]
    return Case(sides[0], sides[1], tokens)


@st.composite
def tiers(draw: st.DrawFn, layout: KVLayout, spec: KVCacheSpec) -> KVLayout:
    """A host pool for a layout: one of the ranks that hold each shard, pages of rows or blocks."""
    kept = set(layout.ranks)
    for rank in draw(st.permutations(layout.ranks)):
        try:
            narrowed(layout, tuple(kept - {rank}))
        except LayoutError:
            continue
        kept -= {rank}
    groups = tuple(
        CacheGroup(g.name, g.components, Pool(draw(st.sampled_from([1, 1, 2, 3, 8]))))
        for g in layout.groups
    )
    return evolve(narrowed(layout, tuple(kept)), spec=spec, groups=groups)


@st.composite
def tier_cases(draw: st.DrawFn) -> tuple[Case, Binding]:
    """(a device layout -> another one, the tier of the first) for one request."""
    tokens = draw(token_ranges(24))
    spec = draw(specs())
    src, dst = (draw(layouts(spec, tokens, max_shards=4)) for _ in range(2))
    tier = draw(tiers(src, spec))
    bound = [draw(bindings(side, tokens[1])) for side in (src, dst, tier)]
    return Case(bound[0], bound[1], tokens), bound[2]


@st.composite
def problems(draw: st.DrawFn, size: int | None = None) -> Attention:
    """Attention over 0 to 24 tokens dealt to shards in any way; some tokens belong to nobody."""
    size = draw(st.integers(1, 5)) if size is None else size
    q, h, dv = (draw(st.integers(*span)) for span in ((0, 5), (1, 6), (1, 5)))
    shard = draw(st.lists(st.integers(-1, size - 1), max_size=24))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1.0, 30.0, 1000.0]))
    scores = torch.randn(q, h, len(shard), generator=noise, dtype=torch.float64) * scale
    values = torch.randn(len(shard), h, dv, generator=noise, dtype=torch.float64)
    return Attention(scores, values, torch.tensor(shard, dtype=torch.int64), size)
