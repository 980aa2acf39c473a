"""Hypothesis strategies that draw lawful layouts, bindings and whole transfer cases."""

from itertools import product
from math import gcd
from random import Random
from typing import Any

from attrs import evolve, frozen
from hypothesis import strategies as st

from kvflow.layouts.arrangement import Arrangement, Plane
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout, Stage
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, Paged, Paging, Pool
from kvflow.layouts.record import KVDType, Record
from kvflow.layouts.sharding import Replicated, RoundRobin, Sharding
from kvflow.layouts.spec import KVCacheSpec

Range = tuple[int, int]


@st.composite
def _shuffled(draw: st.DrawFn, number: int) -> list[int]:
    """0..number-1 in some order, the plain one first among them. One number is drawn for all: a
    choice for each place would take longer than the transfer."""
    order, seed = list(range(number)), draw(st.integers(0, 9999))
    if seed:
        Random(seed).shuffle(order)
    return order


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
    kind = draw(st.sampled_from(("round_robin", "balanced", "contiguous", "replicated")))
    if kind == "round_robin":
        return RoundRobin(num, draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16))))
    if kind == "contiguous":
        return Contiguous(num, start, stop)
    if kind == "replicated":
        return Replicated() if draw(st.booleans()) else Replicated(start, stop)
    form = draw(st.sampled_from(("even", "ceil")))
    return BalancedChunks(num, start, stop, form, draw(st.integers(0, 9)))  # type: ignore[arg-type]


@st.composite
def placements(
    draw: st.DrawFn, tokens: Range, max_shards: int = 5, max_replicas: int = 3
) -> Placement:
    """A sharding with one or more ranks for each shard, rank numbers shuffled."""
    sharding = draw(shardings(tokens, max_shards))
    sizes = [draw(st.integers(1, max_replicas)) for _ in range(sharding.num_shards)]
    ranks = iter(draw(_shuffled(sum(sizes))))
    return Placement(sharding, tuple(tuple(next(ranks) for _ in range(n)) for n in sizes))


def pagings() -> st.SearchStrategy[Paging]:
    """Paged or host-pool pages of 1 to 16 tokens (Dense needs a capacity: see `layouts`)."""
    return st.sampled_from(_PAGINGS)


_PAGINGS = tuple(kind(size) for kind in (Paged, Pool) for size in (1, 2, 3, 4, 5, 8, 16))


@st.composite
def specs(draw: st.DrawFn, max_layers: int = 2) -> KVCacheSpec:
    """A small ``glm_moe_dsa`` cache (some layers share an indexer, with or without MTP), or the
    keys and values of attention heads."""
    num_layers = draw(st.integers(1, max_layers))
    if draw(st.integers(0, 2)) == 0:
        return KVCacheSpec.of_attention(
            num_layers,
            num_heads=draw(st.sampled_from((1, 2, 3, 4))),
            head_dim=draw(st.sampled_from((1, 2, 4))),
            kv_dtype=draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        )
    types = ["full"] + [draw(st.sampled_from(("full", "shared"))) for _ in range(num_layers - 1)]
    dtype: KVDType = draw(st.sampled_from(("fp8", "bfloat16", "float32", "float64")))
    config: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
        "kv_lora_rank": draw(st.sampled_from((4, 5, 130) if dtype == "fp8" else (2, 3))),
        "qk_rope_head_dim": draw(st.sampled_from((1, 2))),
        "index_head_dim": draw(st.sampled_from((3, 4))),
        "indexer_types": types,
    }
    arrangement = draw(st.sampled_from(("row", "planar")))
    return KVCacheSpec.from_config(config, kv_dtype=dtype, index_arrangement=arrangement)


@st.composite
def arrangements(draw: st.DrawFn, record: Record, block_size: int = 1) -> Arrangement:
    """Any way to arrange the fields of a record in pages of `block_size`: planes in any number and
    order, digits in any order, tiles that divide, holes, and a page multiple."""
    fields = list(draw(st.permutations([f.name for f in record.fields])))
    planes = []
    while fields:
        taken, fields = fields[: (n := draw(st.integers(1, len(fields))))], fields[n:]
        planes.append(Plane(tuple(taken), draw(_orders(record, taken, block_size))))
    return Arrangement(tuple(planes), draw(st.sampled_from((1, 1, 7, 64))))


@st.composite
def _orders(draw: st.DrawFn, record: Record, fields: list[str], block_size: int) -> tuple[str, ...]:
    elements = [f.num_elements for f in record.fields if f.name in fields]
    order = list(draw(st.permutations(["t", "h", "e"])))
    for axis, steps in (("t", [block_size]), ("e", elements)):
        tile = draw(st.sampled_from([n for n in (1, 2, 3, 4) if not any(k % n for k in steps)]))
        if tile > 1:
            order.insert(draw(st.integers(order.index(axis) + 1, len(order))), f"{axis}{tile}")
    if draw(st.integers(0, 4)) == 0:
        order.insert(draw(st.integers(0, len(order))), f"_{draw(st.integers(2, 3))}")
    if len(fields) > 1:
        order.insert(draw(st.integers(0, order.index("e"))), "f")
    return tuple(order)


@st.composite
def rearranged(draw: st.DrawFn, spec: KVCacheSpec, block_size: int = 1) -> KVCacheSpec:
    """A spec of the same content whose pages may be arranged otherwise."""
    forms: dict[Record, Record] = {}
    for record in dict.fromkeys(c.record for c in spec.components):
        arrangement = draw(arrangements(record, block_size)) if draw(st.booleans()) else None
        forms[record] = Record(record.fields, arrangement or record.arrangement)
    return evolve(spec, components=[evolve(c, record=forms[c.record]) for c in spec.components])


@st.composite
def layouts(draw: st.DrawFn, spec: KVCacheSpec, tokens: Range, max_shards: int = 5) -> KVLayout:
    """Tokens, heads and layers dealt to ranks in any way, replicas and hosts among them; one group
    or one a kind of component, any paging, any arrangement of the pages."""
    sharding = draw(shardings(tokens, max_shards))
    num_heads = max(c.record.num_heads for c in spec.components)
    widths = [t for t in range(1, 5) if t <= num_heads or t % num_heads == 0]
    most = max(1, MAX_RANKS // sharding.num_shards)
    coordinates = draw(st.sampled_from([t for t in widths if t <= most]))
    num_stages = draw(st.sampled_from((1, 1, 2))) if 2 * coordinates <= most else 1
    cells = list(product(range(sharding.num_shards), range(coordinates), range(num_stages)))
    spare = max(0, MAX_RANKS - len(cells))
    replicas = [1 + (spare > i and draw(st.integers(0, 3)) == 0) for i in range(len(cells))]
    ranks = iter(draw(_shuffled(sum(replicas))))
    held = {cell: [next(ranks) for _ in range(n)] for cell, n in zip(cells, replicas, strict=True)}

    def along(axis: int, steps: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(r for cell in cells if cell[axis] == step for r in held[cell])
            for step in range(steps)
        )

    cut = draw(st.integers(0, len(spec.names)))
    parts = [spec.names] if num_stages == 1 else [spec.names[:cut], spec.names[cut:]]
    stages = [Stage(part, group) for part, group in zip(parts, along(2, num_stages), strict=True)]
    groups = draw(_cache_groups(spec, tokens))
    # Tiles must divide the pages of every group.
    block_size = gcd(*(g.paging.block_size for g in groups))
    return KVLayout(
        draw(rearranged(spec, block_size)),
        Placement(sharding, along(0, sharding.num_shards)),
        groups,
        along(1, coordinates) if coordinates > 1 else (),
        tuple(stages) if num_stages > 1 else (),
        draw(_hosts(sorted(r for group in held.values() for r in group))),
    )


MAX_RANKS = 10
"""More ranks than this make a case slow to check byte by byte and show nothing new."""


@st.composite
def _cache_groups(draw: st.DrawFn, spec: KVCacheSpec, tokens: Range) -> tuple[CacheGroup, ...]:
    kinds = sorted({c.kind for c in spec.components})
    if draw(st.booleans()) and len(kinds) > 1:
        members = {str(kind): spec.select(kind=kind) for kind in kinds}
    else:
        members = {"kv": spec.names}
    groups = []
    for name, components in members.items():
        paging = draw(pagings())
        if draw(st.integers(0, 4)) == 0:  # reaches every token that any shard can hold
            paging = Dense(tokens[1] + 20 + draw(st.integers(0, 3)))
        groups.append(CacheGroup(name, components, paging))
    return tuple(groups)


@st.composite
def _hosts(draw: st.DrawFn, ranks: list[int]) -> tuple[tuple[int, ...], ...]:
    """No hosts told, or ranks dealt to up to three of them."""
    if draw(st.booleans()):
        return ()
    dealt: dict[int, list[int]] = {}
    for rank in ranks:
        dealt.setdefault(draw(st.integers(0, 2)), []).append(rank)
    return tuple(tuple(host) for host in dealt.values())


@st.composite
def bindings(draw: st.DrawFn, layout: KVLayout, length: int) -> Binding:
    """A request of `length` valid tokens: block ids permuted, the pool larger than needed."""
    tables, num_blocks = {}, {}
    for group in layout.groups:
        need = layout.num_blocks_for(length)[group.name] + draw(st.integers(0, 1))
        pool = need + draw(st.integers(0, 2)) + (need == 0)
        tables[group.name] = draw(_shuffled(pool))[:need]
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
    for _ in range(2):
        layout = draw(layouts(spec, tokens, max_shards))
        sides.append(draw(bindings(layout, tokens[1])))
    return Case(sides[0], sides[1], tokens)
