"""Hypothesis strategies that draw lawful layouts, bindings and whole transfer cases."""

from typing import Any

from attrs import evolve, frozen
from hypothesis import strategies as st

from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, Paged, Paging, Pool
from kvflow.layouts.record import Arrangement, KVDType
from kvflow.layouts.sharding import Replicated, RoundRobin, Sharding
from kvflow.layouts.spec import KVCacheSpec

Range = tuple[int, int]


@st.composite
def token_ranges(draw: st.DrawFn, max_tokens: int = 48, max_start: int = 40) -> Range:
    """``(start, stop)``: often empty, short, or behind a prefix."""
    count = draw(st.one_of(st.integers(0, 3), st.integers(0, max_tokens)))
    start = draw(st.one_of(st.just(0), st.integers(0, max_start)))
    return start, start + count


@st.composite
def shardings(draw: st.DrawFn, tokens: Range, max_shards: int = 5) -> Sharding:
    """Any of the four shardings, over a domain that holds `tokens`."""
    start = draw(st.one_of(st.just(tokens[0]), st.integers(0, tokens[0])))
    stop = tokens[1] + draw(st.one_of(st.just(0), st.integers(0, 20)))
    num = draw(st.integers(1, max_shards))
    kind = draw(st.sampled_from(["round_robin", "balanced", "contiguous", "replicated"]))
    if kind == "round_robin":
        return RoundRobin(num, draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16])))
    if kind == "contiguous":
        return Contiguous(num, start, stop)
    if kind == "replicated":
        return Replicated() if draw(st.booleans()) else Replicated(start, stop)
    form = draw(st.sampled_from(["even", "ceil"]))
    return BalancedChunks(num, start, stop, form, draw(st.integers(0, 9)))  # type: ignore[arg-type]


@st.composite
def placements(
    draw: st.DrawFn, tokens: Range, max_shards: int = 5, max_replicas: int = 3
) -> Placement:
    """A sharding with one or more ranks for each shard, rank numbers shuffled."""
    sharding = draw(shardings(tokens, max_shards))
    sizes = [draw(st.integers(1, max_replicas)) for _ in range(sharding.num_shards)]
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return Placement(sharding, tuple(tuple(next(ranks) for _ in range(n)) for n in sizes))


def pagings() -> st.SearchStrategy[Paging]:
    """Paged or host-pool pages of 1 to 16 tokens (Dense needs a capacity: see `layouts`)."""
    sizes = st.sampled_from([1, 2, 3, 4, 5, 8, 16])
    return st.one_of(st.builds(Paged, sizes), st.builds(Pool, sizes))


@st.composite
def specs(draw: st.DrawFn, max_layers: int = 2) -> KVCacheSpec:
    """A small ``glm_moe_dsa`` cache: some layers share an indexer, with or without MTP."""
    num_layers = draw(st.integers(1, max_layers))
    types = ["full"] + [draw(st.sampled_from(["full", "shared"])) for _ in range(num_layers - 1)]
    dtype: KVDType = draw(st.sampled_from(["fp8", "bfloat16", "float32", "float64"]))
    config: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
        "kv_lora_rank": draw(st.sampled_from([4, 5, 130] if dtype == "fp8" else [2, 3])),
        "qk_rope_head_dim": draw(st.sampled_from([1, 2])),
        "index_head_dim": draw(st.sampled_from([3, 4])),
        "indexer_types": types,
    }
    return KVCacheSpec.from_config(config, kv_dtype=dtype, index_arrangement=draw(_arrangements()))


def _arrangements() -> st.SearchStrategy[Arrangement]:
    return st.sampled_from(["row", "planar"])


@st.composite
def rearranged(draw: st.DrawFn, spec: KVCacheSpec) -> KVCacheSpec:
    """A spec of the same content whose pages may be arranged otherwise."""
    arrangement = draw(_arrangements())
    components = tuple(
        evolve(c, record=evolve(c.record, arrangement=arrangement)) if c.kind == "indexer" else c
        for c in spec.components
    )
    return evolve(spec, components=components)


@st.composite
def layouts(draw: st.DrawFn, spec: KVCacheSpec, tokens: Range, max_shards: int = 5) -> KVLayout:
    """One group, or latent and indexer apart, with any paging, Dense among them."""
    placement = draw(placements(tokens, max_shards))
    kinds = {c.kind for c in spec.components}
    if draw(st.booleans()) and len(kinds) == 2:
        members = {"latent": spec.select(kind="latent"), "indexer": spec.select(kind="indexer")}
    else:
        members = {"kv": spec.names}
    groups = []
    for name, components in members.items():
        capacity = tokens[1] + 20  # reaches every token that any shard can hold
        dense = st.builds(Dense, st.integers(capacity, capacity + 3))
        paging = draw(st.one_of(pagings(), pagings(), dense))
        groups.append(CacheGroup(name, components, paging))
    return KVLayout(spec, placement, tuple(groups))


@st.composite
def bindings(draw: st.DrawFn, layout: KVLayout, length: int) -> Binding:
    """A request of `length` valid tokens: block ids permuted, the pool larger than needed."""
    tables, num_blocks = {}, {}
    for group in layout.groups:
        need = layout.num_blocks_for(length)[group.name] + draw(st.integers(0, 1))
        pool = need + draw(st.integers(0, 2)) + (need == 0)
        tables[group.name] = draw(st.permutations(range(pool)))[:need]
        num_blocks[group.name] = pool
    return Binding.of(layout, tables, num_blocks, length)


@frozen(eq=False)
class Case:
    """A transfer: the tokens ``[start, stop)`` from one bound layout to another."""

    src: Binding
    dst: Binding
    tokens: Range

    def __repr__(self) -> str:
        sides = "".join(
            f"\n  {name}: {b.layout}\n    tables {dict(b.tables)} of {dict(b.num_blocks)}"
            for name, b in (("src", self.src), ("dst", self.dst))
        )
        return f"Case(tokens={self.tokens}{sides}\n  {self.src.layout.spec.names})"


@st.composite
def cases(draw: st.DrawFn, max_tokens: int = 48, max_shards: int = 5) -> Case:
    """Any lawful pair of layouts of one drawn spec, bound to pools with holes."""
    tokens = draw(token_ranges(max_tokens))
    spec = draw(specs())
    sides = []
    for side_spec in (spec, draw(rearranged(spec))):
        layout = draw(layouts(side_spec, tokens, max_shards))
        sides.append(draw(bindings(layout, tokens[1])))
    return Case(sides[0], sides[1], tokens)
