"""Heads, layers and hosts dealt to ranks: against the oracle's cells, and what a layout refuses."""

from collections import defaultdict

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout, Stage
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing import cells, layouts, specs

LENGTH = 24


def gqa(num_heads: int, num_layers: int = 1) -> KVCacheSpec:
    return KVCacheSpec.of_attention(num_layers, num_heads=num_heads, head_dim=2)


def ranks_of(*groups: tuple[int, ...], deal: int = 1) -> Placement:
    """The ranks of all groups; with `deal` > 1 each group's tokens go to its ranks in turn."""
    flat = [r for group in groups for r in group]
    sharding = RoundRobin(deal) if deal > 1 else Replicated()
    turns = {r: i % deal for group in groups for i, r in enumerate(group)}
    return Placement(sharding, tuple(tuple(r for r in flat if turns[r] == s) for s in range(deal)))


def tp(num_heads: int, *groups: tuple[int, ...], deal: int = 1, **more: object) -> KVLayout:
    """A GQA cache whose heads are dealt to groups of ranks, one group a TP coordinate."""
    spec, placement = gqa(num_heads), ranks_of(*groups, deal=deal)
    return evolve(KVLayout.uniform(spec, placement, Paged(4)), head_ranks=groups, **more)


def heads_by_rank(layout: KVLayout, component: str = "key.0") -> dict[int, tuple[int, int]]:
    return {r: shard.heads for r in layout.ranks if (shard := layout.head_shard_of(component, r))}


@settings(max_examples=max(100, settings().max_examples))
@given(specs(), st.data())
def test_ranks_hold_what_the_oracle_deals_them(spec: KVCacheSpec, data: st.DataObject) -> None:
    layout = data.draw(layouts(spec, (0, LENGTH)))
    blocks = layout.num_blocks_for(LENGTH)
    tables = {name: range(n) for name, n in blocks.items()}
    binding = Binding.of(layout, tables, dict.fromkeys(blocks, LENGTH + 20), LENGTH)
    heads, holders = defaultdict(set), defaultdict(set)
    for cell in cells(layout, binding, (0, LENGTH), spec.names):
        heads[cell.rank, cell.component].add(cell.head)
        holders[cell.component, cell.head, cell.token].add(cell.rank)
    for name in spec.names:
        shards = layout.head_shards(name)
        covered = [h for shard in shards for h in range(*shard.heads)]
        assert covered == list(range(spec[name].record.num_heads)), "each head once, in order"
        for shard in shards:
            owner = shard.placement.sharding.owner(range(LENGTH)).tolist()
            for token, s in enumerate(owner):
                if (name, shard.heads[0], token) in holders:
                    for head in range(*shard.heads):
                        told = set(shard.placement.ranks[s])
                        assert told == holders[name, head, token]
    for rank in layout.ranks:
        told = layout.components_of(rank)
        assert told == tuple(n for n in spec.names if layout.head_shard_of(n, rank))
        for name in spec.names:
            held = sorted(heads[rank, name])
            if held:  # a rank of a short request may own no token
                shard = layout.head_shard_of(name, rank)
                assert shard is not None
                assert list(range(*shard.heads)) == held
                assert layout.local_record(name, rank).num_heads == len(held)
                assert name in told


@pytest.mark.parametrize(
    ("num_heads", "coordinates", "dealt"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (4, 3, [(0, 2), (2, 3), (3, 4)]),  # uneven: the first ones hold more
        (5, 3, [(0, 2), (2, 4), (4, 5)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),  # replicas, neighbours share
        (2, 6, [(0, 1)] * 3 + [(1, 2)] * 3),
        (1, 3, [(0, 1)] * 3),
        (3, 1, [(0, 3)]),
    ],
)
def test_heads_are_dealt_contiguously_and_shared_where_they_are_few(
    num_heads: int, coordinates: int, dealt: list[tuple[int, int]]
) -> None:
    layout = tp(num_heads, *((10 + c,) for c in range(coordinates)))
    assert heads_by_rank(layout) == {10 + c: heads for c, heads in enumerate(dealt)}
    shards = layout.head_shards("value.0")
    assert [s.heads for s in shards] == sorted(set(dealt))
    for shard in shards:
        assert shard.placement.ranks == (
            tuple(10 + c for c, heads in enumerate(dealt) if heads == shard.heads),
        )


def test_without_tp_every_rank_holds_all_heads() -> None:
    layout = evolve(tp(4, (0,), (1,)), head_ranks=())
    assert heads_by_rank(layout) == {0: (0, 4), 1: (0, 4)}
    assert layout.local_record("key.0", 1) == layout.spec["key.0"].record
    one = tp(4, (0, 1))
    assert heads_by_rank(one) == {0: (0, 4), 1: (0, 4)}


@pytest.mark.parametrize(("coordinates", "num_heads"), [(3, 2), (5, 2), (5, 4), (7, 3)])
def test_coordinates_that_are_no_multiple_of_the_heads_are_refused(
    coordinates: int, num_heads: int
) -> None:
    with pytest.raises(
        LayoutError, match=f"{coordinates} TP coordinates share {num_heads} heads: must be"
    ):
        tp(num_heads, *((c,) for c in range(coordinates)))


def test_dcp_over_the_replicas_of_a_head() -> None:
    """1 < W < T: 8 ranks, 2 KV heads, so 4 replicas a head; DCP 2 deals the tokens of each head to
    two pairs of them, DCP 4 leaves none."""
    groups = tuple((r,) for r in range(8))
    for deal, pairs in ((2, ((0, 2), (1, 3))), (4, ((0,), (1,), (2,), (3,)))):
        turns = tuple(tuple(r for r in range(8) if r % deal == s) for s in range(deal))
        placement = Placement(RoundRobin(deal, 4), turns)
        layout = evolve(KVLayout.uniform(gqa(2), placement, Paged(4)), head_ranks=groups)
        first, second = layout.head_shards("key.0")
        assert (first.heads, second.heads) == ((0, 1), (1, 2))
        assert first.placement == Placement(RoundRobin(deal, 4), pairs)
        assert second.placement.ranks == tuple(tuple(r + 4 for r in p) for p in pairs)


def test_a_coordinate_may_have_several_ranks() -> None:
    layout = tp(2, (0, 1, 2, 3), (4, 5, 6, 7), deal=2)
    assert heads_by_rank(layout) == {r: (r // 4, r // 4 + 1) for r in range(8)}
    assert layout.head_shards("key.0")[1].placement.ranks == ((4, 6), (5, 7))


def test_a_rank_stores_the_record_of_its_heads() -> None:
    layout = tp(5, (0,), (1,), (2,))
    record = layout.spec["key.0"].record
    for rank, num_heads in ((0, 2), (1, 2), (2, 1)):
        local = layout.local_record("key.0", rank)
        assert local == record.with_heads(num_heads)
        assert local.nbytes * 5 == record.nbytes * num_heads


def test_mla_rows_have_one_head_and_are_replicated_over_tp() -> None:
    spec = KVCacheSpec.from_config(
        {"num_hidden_layers": 1, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "index_head_dim": 4}
    )
    placement = ranks_of((0, 1, 2, 3, 4))
    layout = evolve(
        KVLayout.uniform(spec, placement, Paged(4)), head_ranks=tuple((r,) for r in range(5))
    )
    (shard,) = layout.head_shards("latent.0")
    assert (shard.heads, shard.placement) == ((0, 1), placement)


def staged(*stages: Stage, **more: object) -> KVLayout:
    spec, placement = gqa(2, 2), Placement(RoundRobin(2), ((0, 2), (1, 3)))
    return KVLayout(spec, placement, (CacheGroup("kv", spec.names, Paged(4)),), stages=stages,
                    **more)  # type: ignore[arg-type]  # fmt: skip


FIRST, SECOND = ("key.0", "value.0"), ("key.1", "value.1")


def test_stages_deal_components_to_ranks() -> None:
    layout = staged(Stage(FIRST, (0, 1)), Stage(SECOND, (2, 3)))
    assert [layout.components_of(r) for r in range(4)] == [FIRST, FIRST, SECOND, SECOND]
    assert layout.head_shards("key.1")[0].placement == Placement(RoundRobin(2), ((2,), (3,)))
    assert layout.head_shard_of("key.1", 0) is None
    with pytest.raises(LayoutError, match=r"rank 0 holds nothing of key\.1"):
        layout.local_record("key.1", 0)
    with pytest.raises(LayoutError, match=r"rank 9 holds nothing of key\.1"):
        layout.local_record("key.1", 9)
    with pytest.raises(LayoutError, match=r"no component 'key\.7'"):
        layout.local_record("key.7", 0)
    assert layout.local_record("key.1", 2).num_heads == 2
    shared = staged(Stage(FIRST, (0, 1, 2, 3)), Stage(SECOND, (3, 2)))
    assert [len(shared.components_of(r)) for r in range(4)] == [2, 2, 4, 4]


def test_stages_and_heads_multiply() -> None:
    spec, placement = gqa(2, 2), Placement(Replicated(), ((0, 1, 2, 3),))
    stages = (Stage(FIRST, (0, 1)), Stage(SECOND, (2, 3)))
    groups = (CacheGroup("kv", spec.names, Paged(4)),)
    layout = KVLayout(spec, placement, groups, ((0, 2), (1, 3)), stages)
    held = {r: [(c, layout.head_shard_of(c, r).heads) for c in layout.components_of(r)]
            for r in range(4)}  # type: ignore[union-attr]  # fmt: skip
    assert held == {r: [(c, (r % 2, r % 2 + 1)) for c in (FIRST, SECOND)[r // 2]] for r in range(4)}


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        ([Stage(FIRST, (0, 1))], "stages must place every component once.*key.1"),
        ([Stage((*FIRST, *SECOND), (0, 1)), Stage(FIRST, (2, 3))], "stages must place.*key.0"),
        ([Stage((*FIRST, *SECOND, "x"), (0, 1))], "stages must place every component once.*'x'"),
        (
            [Stage(FIRST, (0, 2)), Stage(SECOND, (1, 3))],
            r"shard 1 of round_robin\(2,i=1\) lies on ranks \(1, 3\), none of \[0, 2\]",
        ),
        ([Stage((*FIRST, *SECOND), (0, 1, 9))], r"stage ranks \[9\] are not of the layout"),
    ],
)
def test_unlawful_stages_are_refused(stages: list[Stage], rule: str) -> None:
    with pytest.raises(LayoutError, match=rule):
        staged(*stages)


def test_a_head_whose_tokens_nobody_holds_is_refused() -> None:
    """Ranks 0 and 1 hold shard 0, but both are TP coordinate 0."""
    placement = Placement(RoundRobin(2), ((0, 1), (2, 3)))
    layout = KVLayout.uniform(gqa(2), placement, Paged(4))
    with pytest.raises(LayoutError, match=r"shard 1 .* lies on ranks \(2, 3\), none of \[0, 1\]"):
        evolve(layout, head_ranks=((0, 1), (2, 3)))
    assert heads_by_rank(evolve(layout, head_ranks=((0, 2), (1, 3)))) == {
        0: (0, 1), 2: (0, 1), 1: (1, 2), 3: (1, 2),
    }  # fmt: skip


@pytest.mark.parametrize("groups", [((0,),), ((0,), (1,), (2,)), ((0, 1), (1,))])
def test_every_rank_has_one_tp_coordinate(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LayoutError, match="head_ranks must place every rank once; not so for"):
        evolve(tp(4, (0,), (1,)), head_ranks=groups)


def test_hosts_group_ranks() -> None:
    layout = tp(2, (0, 1), (2, 3), hosts=((0, 2), (1,)))
    assert [layout.host_of(r) for r in range(4)] == [(0, 2), (1,), (0, 2), (3,)]
    assert evolve(layout, hosts=()).host_of(2) == (2,)
    for bad in (((0, 1), (1, 2)), ((0, 4),), ((0, 0),)):
        with pytest.raises(LayoutError, match=r"hosts .* must group ranks of \(0, 1, 2, 3\), each"):
            evolve(layout, hosts=bad)


def test_text_says_how_ranks_are_used() -> None:
    layout = staged(Stage(FIRST, (0, 1)), Stage(SECOND, (2, 3)))
    assert str(layout) == "round_robin(2,i=1) on 0,2|1,3 stages/2 kv:paged(4)[4]"
    assert str(layout.stages[0]) == "2 components on 0,1"
    assert str(tp(2, (0,), (1,))) == "replicated(0:) on 0,1 heads/2 kv:paged(4)[2]"


def test_some_ranks_of_a_placement() -> None:
    placement = Placement(RoundRobin(2, 4), ((0, 2, 4), (1, 3, 5)))
    assert placement.on([5, 4, 3, 2]) == Placement(RoundRobin(2, 4), ((2, 4), (3, 5)))
    assert placement.on(range(9)) == placement
    for ranks, shard, lost in (([0, 2], 1, r"\(1, 3, 5\)"), ([5], 0, r"\(0, 2, 4\)")):
        with pytest.raises(
            LayoutError, match=rf"shard {shard} of .* lies on ranks {lost}, none of "
        ):
            placement.on(ranks)
