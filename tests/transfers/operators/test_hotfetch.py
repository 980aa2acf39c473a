"""HotFetch: rows named by position land in hot slots, of several requests, all layers at once."""

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import CONFIG, SPEC

from kvflow.errors import ContentMismatch, LayoutError, PlanError
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.sharding import Replicated, RoundRobin, Sharding
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.testing import LawError, cells, check_fetch
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.operators import (
    DeviceSlots,
    FetchReport,
    HostSlots,
    HotFetch,
    Misses,
    index_groups,
)

GROUP = index_groups(SPEC)[0]


def latents_of(spec: KVCacheSpec) -> KVCacheSpec:
    return KVCacheSpec([spec[name] for name in spec.select(kind="latent")], spec.content)


def pools(sharding: Sharding | None = None, host_block: int = 4, hot_block: int = 1) -> HotFetch:
    """A host pool and a hot buffer dealt alike, for the layers that share the first top-k."""
    spec, placement = latents_of(SPEC), Placement.simple(sharding or Replicated())
    return HotFetch(
        KVLayout.uniform(spec, placement, Pool(host_block)),
        KVLayout.uniform(spec, placement, Paged(hot_block)),
        GROUP,
    )


def request(stage: HotFetch, table: list[int], length: int, num_blocks: int = 64) -> Binding:
    return Binding.of(stage.source, {"kv": table}, {"kv": num_blocks}, length)


@st.composite
def rounds(draw: st.DrawFn):
    """Up to three requests in one pool, and up to three calls that fetch for some of them."""
    sharding = draw(st.sampled_from([Replicated(), RoundRobin(2), RoundRobin(3, 4)]))
    stage = pools(sharding, draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 2, 5])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    free, requests = iter(rng.permutation(64).tolist()), []
    for length in draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)):
        need = stage.source.num_blocks_for(length)["kv"]
        requests.append(request(stage, [next(free) for _ in range(need)], length))
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        slots, misses = iter(rng.permutation(40).tolist()), []
        for each in requests:
            held = each.lengths[GROUP[0]]
            positions = draw(st.lists(st.integers(-1, held - 1), max_size=8))
            lanes = [next(slots) if p >= 0 else int(rng.integers(-1, 99)) for p in positions]
            misses.append(Misses(each, positions, DeviceSlots(lanes)))
        calls.append(misses)
    return stage, calls, {"kv": 64}, {"kv": 40}


@settings(max_examples=30)
@given(case=rounds())
def test_hot_fetch_keeps_the_law(case) -> None:
    check_fetch(*case)


@settings(max_examples=20)
@given(case=rounds())
def test_mirror_is_the_way_back(case) -> None:
    """What a fetch brought goes into an empty host pool: the rows named, and no other byte."""
    stage, calls, num_host, num_hot = case
    for rank in stage.source.ranks:
        filled = RankCache.allocate(stage.source, rank, num_host)
        for i, view in enumerate(filled.pages.values()):
            noise = np.random.default_rng([rank, i]).integers(0, 256, len(view.memory), np.uint8)
            view.memory.copy_(torch.from_numpy(noise))
        hot = RankCache.allocate(stage.target, rank, num_hot)
        for misses in calls:
            once = [_each_once(miss) for miss in misses]
            empty = RankCache.allocate(stage.source, rank, num_host, 0x77)
            wanted = {name: view.memory.clone() for name, view in empty.pages.items()}
            fetched = stage.execute(once, filled, hot)
            for name, at in _bytes_named(stage, once, rank):
                wanted[name][at] = filled.pages[name].memory[at]
            assert stage.mirror(once, empty, hot) == fetched
            for name, view in empty.pages.items():
                assert torch.equal(view.memory, wanted[name]), name


def _each_once(miss: Misses) -> Misses:
    _, first = np.unique(miss.positions, return_index=True)
    return Misses(miss.request, miss.positions[first], DeviceSlots(miss.slots.ids[first]))


def _bytes_named(stage: HotFetch, misses: list[Misses], rank: int):
    """(component, bytes of the host pool) of every cell of a named position, by the oracle."""
    for miss in misses:
        for position in miss.positions[miss.positions >= 0].tolist():
            tokens = (position, position + 1)
            for cell in cells(stage.source, miss.request, tokens, stage.components):
                if cell.rank == rank:
                    nbytes = stage.source.spec[cell.component].record.page_nbytes(
                        stage.source.group_of(cell.component).paging.block_size
                    )
                    yield cell.component, [cell.block_id * nbytes + i for i in cell.at]


def test_two_rows_for_one_place_on_the_host_are_refused() -> None:
    stage = pools()
    host, hot = caches(stage)
    both = Misses(request(stage, [3], 4), [2, 2], DeviceSlots([0, 1]))
    with pytest.raises(LayoutError, match="host slot 14 is named by two lanes"):
        stage.mirror([both], host, hot)
    assert all(bool((view.memory == 1).all()) for view in host.pages.values())


def test_fault_f08_lanes_without_a_position_are_left_alone() -> None:
    """Top-k 8 over a context of 3 tokens: lanes 3 to 7 hold valid-looking slots."""
    stage = pools()
    lanes = Misses(request(stage, [5], 3), [0, 2, 1, *[-1] * 5], DeviceSlots(range(8)))
    check_fetch(stage, [[lanes]], {"kv": 64}, {"kv": 16})
    host, hot = caches(stage)
    assert stage.execute([lanes], host, hot) == FetchReport(
        3 * 2, 3 * 2 * SPEC["latent.0"].record.nbytes
    )


def caches(stage: HotFetch) -> tuple[RankCache, RankCache]:
    return (
        RankCache.allocate(stage.source, 0, {"kv": 64}, 1),
        RankCache.allocate(stage.target, 0, {"kv": 16}, 2),
    )


def test_fault_g01_ids_of_one_pool_are_not_taken_for_those_of_another() -> None:
    """The host hands out pages 4 and 1, the device slots 0 and 3."""
    stage = pools(host_block=2)
    both = request(stage, [4, 1], 4)
    check_fetch(stage, [[Misses(both, [0, 3], DeviceSlots([0, 3]))]], {"kv": 64}, {"kv": 4})
    with pytest.raises(LayoutError, match="hot rows land in DeviceSlots, got HostSlots"):
        Misses(both, [0, 3], HostSlots([0, 3]))
    with pytest.raises(LayoutError, match="hot rows land in DeviceSlots, got ndarray"):
        Misses(both, [0, 3], np.array([0, 3]))


def test_fault_g06_three_requests_interleaved_read_their_own_rows() -> None:
    """100 tokens each, 16 hot rows each, a step of one after a step of the other."""
    stage = pools(host_block=8)
    blocks = np.random.default_rng(0).permutation(64)
    each = [request(stage, blocks[13 * i : 13 * i + 13].tolist(), 100) for i in range(3)]
    rng, calls = np.random.default_rng(1), []
    for step in range(6):
        misses = [
            Misses(r, rng.permutation(100)[:7], DeviceSlots(16 * i + rng.permutation(16)[:7]))
            for i, r in enumerate(each)
            if (step + i) % 2
        ]
        calls.append(misses)
    check_fetch(stage, calls, {"kv": 64}, {"kv": 48})


def test_fault_f04_every_layer_of_a_group_lands_in_its_own_pages() -> None:
    """Four layers behind one indexer, resolved once and moved in one call."""
    layers = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "shared"]}
    spec = latents_of(KVCacheSpec.from_config(CONFIG | layers))
    placement = Placement.simple(Replicated())
    names = tuple(f"latent.{i}" for i in range(4))
    stage = HotFetch(KVLayout.uniform(spec, placement, Pool(4)),
                     KVLayout.uniform(spec, placement, Paged(1)), names)  # fmt: skip
    misses = Misses(request(stage, [9, 2], 8), [7, 0, 3], DeviceSlots([2, 0, 5]))
    check_fetch(stage, [[misses]], {"kv": 64}, {"kv": 6})
    host, hot = caches(stage)
    assert stage.execute([misses], host, hot).num_rows == 3 * 4


def test_index_groups_of_glm_5_3() -> None:
    groups = index_groups(KVCacheSpec.from_config(GLM_5_3))
    assert len(groups) == 22
    assert [len(g) for g in groups] == [1, 1, *[4] * 19, 1]
    assert groups[-1] == ("latent.78",), "the MTP layer has a top-k of its own"
    with pytest.raises(LayoutError, match=r"latent\.0 has no layer with an indexer"):
        index_groups(latents_of(SPEC))


def test_the_law_is_seen_to_fail() -> None:
    stage = pools()
    one = request(stage, [3, 1], 8)
    two = request(stage, [0, 2], 8)
    calls = [[Misses(one, [5, -1], DeviceSlots([2, 0])), Misses(two, [5], DeviceSlots([1]))]]

    def broken(change) -> str:
        with pytest.raises(LawError) as refused:
            check_fetch(stage, calls, {"kv": 64}, {"kv": 4}, execute=change)
        return str(refused.value)

    def swapped(misses, host, hot) -> None:  # each request reads the other's rows
        tables = [two, one]
        stage.execute(
            [evolve(m, request=t) for m, t in zip(misses, tables, strict=True)], host, hot
        )

    def pads(misses, host, hot) -> None:  # lane 1 writes slot 0
        stage.execute(misses, host, hot)
        hot.pages["latent.1"].memory[0] = 0

    def leader_only(misses, host, hot) -> None:
        evolve(stage, components=GROUP[:1]).execute(misses, host, hot)

    assert "token 5, field latent" in broken(swapped)
    assert "latent.1, byte 0 of the region, which no claimed token owns" in broken(pads)
    assert "component latent.1, token 5" in broken(leader_only)


@pytest.mark.parametrize(
    ("positions", "slots", "message"),
    [
        ([0, 1], [3], r"\[2\] positions for \[1\] slots"),
        ([[0]], [[3]], r"\[1, 1\] positions for"),
        ([-2], [3], "position -2 must be at least -1"),
        ([0], [-1], "hot slot -1 of a position must be at least 0"),
    ],
)
def test_misses_that_make_no_sense_are_refused(positions, slots, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Misses(request(pools(), [0], 4), positions, DeviceSlots(slots))


def test_misses_of_no_request_are_refused() -> None:
    with pytest.raises(LayoutError, match="the request is a NoneType, must be a Binding"):
        Misses(None, [0], DeviceSlots([3]))


def test_nothing_moves_if_anything_is_wrong() -> None:
    stage = pools()
    host, hot = caches(stage)
    good, fits = request(stage, [3], 4), DeviceSlots([1])
    elsewhere = pools(host_block=8)
    late, far = Misses(good, [4], DeviceSlots([2])), Misses(good, [1], DeviceSlots([16]))
    twice, first = Misses(good, [0, 1], DeviceSlots([1, 1])), Misses(good, [0], fits)
    foreign = Misses(request(elsewhere, [0], 8), [0], fits)
    for misses, kind, message in [
        ([first, late], PlanError, "position 4 is asked for, the request holds 4"),
        ([first, far], LayoutError, r"latent\.0: hot slot 16, the buffer has 16"),
        ([twice], LayoutError, "hot slot 1 is named by two lanes"),
        ([first, first], LayoutError, "hot slot 1 is named by two lanes"),
        ([foreign], PlanError, "in another host pool: groups"),
    ]:
        with pytest.raises(kind, match=message):
            stage.execute(misses, host, hot)
    assert all(bool((view.memory == 2).all()) for view in hot.pages.values())
    with pytest.raises(PlanError, match="host cache of rank 0, hot buffer of 1"):
        stage.execute([], host, evolve(hot, rank=1))
    some = RankCache(0, {GROUP[0]: hot.pages[GROUP[0]]})
    with pytest.raises(PlanError, match=r"hot buffer of rank 0 has no pages of \['latent\.1'\]"):
        stage.execute([first], host, some)
    with pytest.raises(PlanError, match=r"host cache of rank 0 has no pages of \['latent\.1'\]"):
        stage.execute([first], some, hot)
    assert all(bool((view.memory == 2).all()) for view in hot.pages.values())


def test_nothing_moves_between_pages_of_another_layout() -> None:
    stage = pools(host_block=4)
    host, hot = caches(stage)
    spec = latents_of(KVCacheSpec.from_config(CONFIG | {"kv_lora_rank": 130}))
    wide = KVLayout.uniform(spec, stage.source.placement, Pool(4))
    one = Misses(request(stage, [3], 4), [0], DeviceSlots([1]))
    for move in (stage.execute, stage.mirror):
        with pytest.raises(PlanError, match=r"has pages of 8 .* host cache, the layout's have 4"):
            move([one], caches(pools(host_block=8))[0], hot)
        with pytest.raises(PlanError, match=r"has pages of 2 .* hot buffer, the layout's have 1"):
            move([one], host, caches(pools(hot_block=2))[1])
        with pytest.raises(PlanError, match=r"latent\.0 has records .* the layout's are"):
            move([one], RankCache.allocate(wide, 0, {"kv": 64}), hot)
        with pytest.raises(PlanError, match=r"latent\.0 has records .* the layout's are None"):
            move([], evolve(host, rank=7), evolve(hot, rank=7))  # no rank of the layout
    assert all(bool((view.memory == 1).all()) for view in host.pages.values())
    assert all(bool((view.memory == 2).all()) for view in hot.pages.values())


def test_sides_that_do_not_fit_are_refused_at_construction() -> None:
    good = pools()
    dealt = pools(RoundRobin(2))
    with pytest.raises(LayoutError, match="is not dealt as the host pool"):
        HotFetch(good.source, dealt.target, GROUP)
    for components in ((), ("latent.0", "latent.0")):
        with pytest.raises(LayoutError, match=r"of a fetch, must be one or more, each once"):
            HotFetch(good.source, good.target, components)
    with pytest.raises(LayoutError, match=r"the host pool has no \['latent\.9'\], it has"):
        HotFetch(good.source, good.target, ("latent.0", "latent.9"))
    less = KVCacheSpec([good.target.spec["latent.0"]], good.target.spec.content)
    narrow = KVLayout.uniform(less, good.target.placement, Paged(1))
    with pytest.raises(LayoutError, match=r"the hot buffer has no \['latent\.1'\], it has"):
        HotFetch(good.source, narrow, GROUP)
    content = dict(good.target.spec.content) | {"kv_dtype": "fp4"}
    other = evolve(good.target, spec=evolve(good.target.spec, content=content.items()))
    with pytest.raises(ContentMismatch, match="'kv_dtype': source has 'fp8', target 'fp4'"):
        HotFetch(good.source, other, GROUP)
    names = good.source.spec.names
    apart = KVLayout(good.source.spec, good.source.placement, (
        CacheGroup("a", names[:1], Pool(4)), CacheGroup("b", names[1:], Pool(4))))  # fmt: skip
    with pytest.raises(LayoutError, match=r"the host pool has them in \['a', 'b'\]"):
        HotFetch(apart, good.target, GROUP)
