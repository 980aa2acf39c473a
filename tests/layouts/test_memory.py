"""Memory orders: pages lie where they are said to, inside their region, and never share a byte."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts import memory
from kvflow.layouts.catalogue import Shape, entry
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.memory import (
    MemoryOrder,
    Pages,
    Region,
    block_outermost,
    layer_outermost,
    pages_are_apart,
)
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import GLM_5_3, Component, KVCacheSpec
from kvflow.testing import cases, check_law, page_cells
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.strided import StridedExecutor

ONE = Placement.simple(Replicated())
ROWS = Record((Field("latent", "uint8", 6), Field("rope", "uint8", 2)))


def rows_layout(num_layers: int, block_size: int = 4, record: Record = ROWS) -> KVLayout:
    spec = KVCacheSpec([Component("latent", layer, record) for layer in range(num_layers)])
    return KVLayout.uniform(spec, ONE, Paged(block_size))


# --- constructors ---------------------------------------------------------------------------------


def test_layer_outermost_gives_each_component_a_region():
    order = layer_outermost(rows_layout(3), 0, {"kv": 5})
    assert [(r.name, r.nbytes) for r in order.regions] == [
        (f"latent.{layer}", 160) for layer in range(3)
    ]
    assert [p.begin(4) for p in order.pages] == [128, 128, 128]
    assert (order.nbytes, order.num_blocks) == (480, {"kv": 5})


def test_layer_outermost_in_one_region():
    order = layer_outermost(rows_layout(3), 0, {"kv": 5}, region="pool")
    assert order.regions == (Region("pool", 480),)
    assert [(p.base, p.block_stride) for p in order.pages] == [(0, 32), (160, 32), (320, 32)]


def test_block_outermost_packs_the_layers_of_a_block():
    order = block_outermost(rows_layout(3), 0, {"kv": 5})
    assert order.regions == (Region("kv", 480),)
    assert [(p.base, p.block_stride) for p in order.pages] == [(0, 96), (32, 96), (64, 96)]
    rounded = block_outermost(rows_layout(3), 0, {"kv": 5}, multiple=64)
    assert {p.block_stride for p in rounded.pages} == {128}
    assert rounded.nbytes == 4 * 128 + 96
    odd = rows_layout(1, block_size=1, record=Record((Field("latent", "uint8", 7),)))
    assert block_outermost(odd, 0, {"kv": 2}).pages[0].block_stride == 7
    for wrong in (0, -64, 1.5):
        with pytest.raises(LayoutError, match="multiple"):
            block_outermost(rows_layout(3), 0, {"kv": 5}, multiple=wrong)


def test_a_block_of_glm_5_3():
    """79 latent pages of 41,984 bytes and 22 indexer pages of 8,448, in the order of layers."""
    spec = KVCacheSpec.from_config(GLM_5_3, kv_dtype="fp8")
    layout = KVLayout.uniform(spec, ONE, Paged(64))
    order = block_outermost(layout, 0, {"kv": 15_539})
    assert {p.block_stride for p in order.pages} == {3_502_592}
    assert order.nbytes == 15_539 * 3_502_592
    assert [order.pages_of(name).base for name in spec.names[:5]] == [
        0, 41_984, 41_984 + 8_448, 2 * 41_984 + 8_448, 2 * (41_984 + 8_448),
    ]  # fmt: skip
    last = order.pages_of("indexer.78")
    assert last.begin(15_538) + 8_448 == order.nbytes > 2**35


def test_hisparse_host_pages_of_glm_5_3():
    """48 GiB hold 15,539 pages of 79 latent layers: 994,496 tokens."""
    spec = KVCacheSpec.from_config(GLM_5_3, kv_dtype="fp8")
    latent = KVCacheSpec([spec[name] for name in spec.select(kind="latent")])
    layout = KVLayout.uniform(latent, ONE, Pool(64))
    order = block_outermost(layout, 0, {"kv": (48 << 30) // 3_316_736})
    assert order.pages[0].block_stride == 3_316_736
    assert order.num_blocks["kv"] == 15_539
    assert order.num_blocks["kv"] * 64 == 994_496


def test_a_rank_places_the_components_and_heads_it_holds():
    fields = {k: Field(k, "uint8", 2, num_heads=4) for k in ("key", "value")}
    spec = KVCacheSpec([Component(k, 0, Record((f,), "h t e")) for k, f in fields.items()])
    placement = Placement(Replicated(), ((0, 1),))
    groups = (CacheGroup("kv", spec.names, Paged(4)),)
    layout = KVLayout(spec, placement, groups, head_ranks=((0,), (1,)))
    order = layer_outermost(layout, 1, {"kv": 3})
    assert order.nbytes == 3 * 2 * (2 * 4 * 2)


# --- what is refused ------------------------------------------------------------------------------


def place(*places: tuple[int, int], **more) -> MemoryOrder:
    layout = rows_layout(len(places))
    by_name = {f"latent.{i}": ("r", *p) for i, p in enumerate(places)}
    return MemoryOrder.placed(layout, 0, {"kv": 3}, by_name, **more)


def test_f03_layers_of_one_allocation_are_disjoint():
    """3 layers behind each other; one that begins at the region's first byte, or one layer too
    late by a byte, is refused before anything is written."""
    assert place((0, 32), (96, 32), (192, 32)).nbytes == 288
    for wrong in ((0, 32), (95, 32), (223, 32)):
        with pytest.raises(LayoutError, match=r"latent\.[012] .* and latent\.[012] .* overlap"):
            place((0, 32), wrong, (192, 32))


def test_f03_each_layer_reads_its_own_scales():
    order = layer_outermost(rows_layout(3), 0, {"kv": 2}, region="pool")
    check_own_bytes(RankCache.on(order), 8)


@pytest.mark.parametrize("num_layers", [4, 7])
def test_f04_packed_layers_keep_their_offset(num_layers):
    """Resident pages of packed layers, and the same layers packed in a pool of their own: layer l
    reads l in both. Without the offset of each layer the order is refused."""
    shape = Shape(num_layers=num_layers, num_blocks=3, block_size=2, full_layers=(0, 1, 2))
    resident = entry("vllm.hisparse_device").order(shape)
    cache = RankCache.on(resident)
    for group in resident.layout.groups:
        only = RankCache(0, {name: cache.pages[name] for name in group.components})
        check_own_bytes(only, 6)
    hot = block_outermost(rows_layout(num_layers), 0, {"kv": 3})
    check_own_bytes(RankCache.on(hot), 12)
    with pytest.raises(LayoutError, match="overlap"):
        place(*[(0, 32 * num_layers)] * num_layers)


def check_own_bytes(cache: RankCache, num_slots: int) -> None:
    """Every component, written full of its own number, reads it back."""
    slots = torch.arange(num_slots)
    for i, view in enumerate(cache.pages.values()):
        rows = torch.full((num_slots, view.record.nbytes), i + 1, dtype=torch.uint8)
        scatter_rows(view, slots, rows)
    for i, view in enumerate(cache.pages.values()):
        assert view.num_slots == num_slots
        assert (gather_rows(view, slots) == i + 1).all()


@pytest.mark.parametrize(
    ("places", "sizes", "complaint"),
    [
        ([(0, 31)], None, r"latent\.0 .* overlap"),
        ([(0, 32), (8, 64)], None, "overlap"),
        ([(0, 32)], {"r": 95}, "its last page ends at byte 96 of region 'r', which has 95"),
        ([(1, 32)], {"r": 96}, "its last page ends at byte 97 of region 'r', which has 96"),
    ],
)
def test_pages_outside_and_pages_over_each_other(places, sizes, complaint):
    with pytest.raises(LayoutError, match=complaint):
        place(*places, sizes=sizes)


def test_every_component_is_placed_once():
    layout = rows_layout(2)
    pages = [Pages(f"latent.{i}", "r", 96 * i, 32, 3) for i in (0, 1, 1)]
    for wrong in (pages[:1], pages, [*pages[:2], Pages("latent.2", "r", 192, 32, 3)]):
        with pytest.raises(LayoutError, match="pages must be placed once"):
            MemoryOrder(layout, 0, [Region("r", 288)], wrong)
    with pytest.raises(LayoutError, match="no region 'r'"):
        MemoryOrder(layout, 0, [Region("s", 288)], pages[:2])
    with pytest.raises(LayoutError, match="regions named twice"):
        MemoryOrder(layout, 0, [Region("r", 288)] * 2, pages[:2])


def test_lookups_name_what_is_missing():
    order = place((0, 32))
    with pytest.raises(LayoutError, match=r"rank 0: no pages of 'latent\.1'"):
        order.pages_of("latent.1")
    for block in (-1, 3):
        with pytest.raises(LayoutError, match=rf"latent\.0: block {block}, must be in \[0, 3\)"):
            order.pages_of("latent.0").begin(block)


def test_groups_may_be_laid_over_each_other_only_if_said():
    spec = rows_layout(2).spec
    groups = tuple(CacheGroup(f"g{i}", (f"latent.{i}",), Paged(4)) for i in range(2))
    layout = KVLayout(spec, ONE, groups)
    places = {f"latent.{i}": ("r", 0, 32) for i in range(2)}
    blocks = {"g0": 3, "g1": 3}
    assert MemoryOrder.placed(layout, 0, blocks, places, overlaid=True).nbytes == 96
    with pytest.raises(LayoutError, match="overlap"):
        MemoryOrder.placed(layout, 0, blocks, places)
    pages = [Pages(name, "r", 0, 32, 3) for name in places]
    with pytest.raises(LayoutError, match="overlap"):
        MemoryOrder(layout, 0, [Region("r", 96)], pages)
    with pytest.raises(LayoutError, match="overlap"):
        MemoryOrder.placed(
            layout, 0, blocks, {"latent.0": ("r", 0, 31), "latent.1": ("r", 0, 32)}, overlaid=True
        )


def test_components_are_placed_once_each():
    layout = rows_layout(2)
    first, second, third = (Pages(f"latent.{i}", "r", 32 * i, 32, 1) for i in range(3))
    for pages, odd in (
        ([first], ["latent.1"]),
        ([first, second, third], ["latent.2"]),
        ([first, second, second], ["latent.0", "latent.1", "latent.1"]),
    ):
        rule = rf"rank 0: pages must be placed once for {re.escape(str(odd))}"
        with pytest.raises(LayoutError, match=rule):
            MemoryOrder(layout, 0, [Region("r", 96)], pages)


@pytest.mark.parametrize(
    ("places", "rule"),
    [
        (((0, 32), (95, 32)), r"0 latent at bytes \[0, 96\) and latent\.1 latent at \[95, 191\)"),
        (((0, 40), (44, 40)), r"0 latent at bytes \[40, 72\) and latent\.1 latent at \[44, 76\)"),
        (((8, 40), (12, 40)), r"0 latent at bytes \[8, 40\) and latent\.1 latent at \[12, 44\)"),
    ],
)
def test_the_first_bytes_that_overlap_are_named(places, rule):
    """Rows of 8 bytes without holes are named as the whole page, or all pages, that they fill."""
    record = Record((Field("latent", "uint8", 8),))
    layout = rows_layout(2, record=record)
    at = {f"latent.{i}": ("r", *place) for i, place in enumerate(places)}
    with pytest.raises(LayoutError, match=rf"^region 'r': latent\.{rule} overlap$"):
        MemoryOrder.placed(layout, 0, {"kv": 3}, at)


def layout_of(*records: Record, block_size: int = 4) -> KVLayout:
    spec = KVCacheSpec([Component("latent", i, record) for i, record in enumerate(records)])
    return KVLayout.uniform(spec, ONE, Paged(block_size))


def test_a_solid_page_may_stand_in_a_hole():
    """Bytes [8, 40) between the rows of 8 bytes at 0, 40, 80 and 120."""
    solid = Record((Field("latent", "uint8", 8),))
    layout = layout_of(Record(solid.fields, "t _5 e"), solid)
    places = {"latent.0": ("r", 0, 160), "latent.1": ("r", 8, 32)}
    assert MemoryOrder.placed(layout, 0, {"kv": 1}, places).nbytes == 128
    for base in (7, 9):
        with pytest.raises(LayoutError, match="overlap"):
            MemoryOrder.placed(layout, 0, {"kv": 1}, places | {"latent.1": ("r", base, 32)})


def test_blocks_are_told_apart_before_their_rows():
    """Two blocks of one and three of the other, 40,001 rows each with holes: blocks do not meet, so
    no row is looked at."""
    record = Record((Field("latent", "uint8", 1),), "t _2 e")
    spec = rows_layout(2, record=record).spec
    groups = [CacheGroup(f"g{i}", (f"latent.{i}",), Paged(40_001)) for i in range(2)]
    layout = KVLayout(spec, ONE, groups)
    places = {"latent.0": ("r", 0, 1_000_000), "latent.1": ("r", 100_001, 400_000)}
    order = MemoryOrder.placed(layout, 0, {"g0": 2, "g1": 3}, places)
    assert order.nbytes == 1_000_000 + 2 * 40_000 + 1


def test_any_number_of_blocks_anywhere_is_looked_at_once():
    layout = rows_layout(1)
    order = MemoryOrder.placed(layout, 0, {"kv": 10**9}, {"latent.0": ("r", 1 << 40, 40)})
    assert order.nbytes == (1 << 40) + (10**9 - 1) * 40 + 32


def test_as_many_runs_as_allowed_are_compared(monkeypatch):
    """Rows at 0, 2, 4, 6 and at 1, 5, 9, 13: six runs at most are held at a time."""
    one = Field("latent", "uint8", 1)
    layout = layout_of(Record((one,), "t _2 e"), Record((one,), "t _4 e"))
    places = {"latent.0": ("r", 0, 16), "latent.1": ("r", 1, 16)}
    monkeypatch.setattr(memory, "MAX_RUNS", 6)
    assert MemoryOrder.placed(layout, 0, {"kv": 1}, places).nbytes == 14
    monkeypatch.setattr(memory, "MAX_RUNS", 5)
    with pytest.raises(LayoutError, match="interlace in more than 5 runs of bytes"):
        MemoryOrder.placed(layout, 0, {"kv": 1}, places)


def test_interlacing_without_a_common_step_is_refused_where_it_cannot_be_proven():
    record = Record((Field("latent", "uint8", 1),), "t _2 e")
    layout = rows_layout(2, block_size=40_001, record=record)
    places = {"latent.0": ("r", 0, 1 << 20), "latent.1": ("r", 1, (1 << 20) + 2)}
    with pytest.raises(LayoutError, match="interlace in more than 65536 runs of bytes"):
        MemoryOrder.placed(layout, 0, {"kv": 2}, places)


# --- against bytes counted one by one -------------------------------------------------------------

ORDERS = ["t e", "e t", "t _2 e", "_3 t e", "e _2 t", "t _3 e", "t e e2", "e t t2 e2"]


@st.composite
def records(draw: st.DrawFn) -> Record:
    dtype, num_elements = (
        draw(st.sampled_from(["uint8", "bfloat16"])),
        draw(st.sampled_from([2, 4])),
    )
    f = Field("latent", dtype, num_elements)
    if draw(st.booleans()):
        return Record((f, Field("scale", "uint8", 1)), "planar")
    return Record((f,), draw(st.sampled_from(ORDERS)))


def owned(record: Record, base: int, stride: int, num_blocks: int) -> list[int]:
    """Every byte of every page, from the oracle's walk through a page."""
    page = [at for places in page_cells(record, 4).values() for at in places]
    return [base + block * stride + at for block in range(num_blocks) for at in page]


@given(st.data())
def test_pages_are_accepted_if_and_only_if_no_byte_is_in_two(data):
    num_blocks = data.draw(st.integers(1, 4))
    components, places, bytes_ = [], {}, []
    for layer in range(data.draw(st.integers(1, 3))):
        record = data.draw(records())
        stride = data.draw(st.sampled_from([1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96]))
        base = data.draw(st.one_of(st.integers(0, 12), st.sampled_from([16, 32, 64, 96, 128])))
        components.append(Component("latent", layer, record))
        places[f"latent.{layer}"] = ("r", base, stride)
        bytes_ += owned(record, base, stride, num_blocks)
    layout = KVLayout.uniform(KVCacheSpec(components), ONE, Paged(4))
    if len(set(bytes_)) == len(bytes_):
        assert MemoryOrder.placed(layout, 0, {"kv": num_blocks}, places).nbytes == max(bytes_) + 1
    else:
        with pytest.raises(LayoutError, match="overlap"):
            MemoryOrder.placed(layout, 0, {"kv": num_blocks}, places)


@given(records(), st.integers(0, 40), st.integers(1, 5))
def test_pages_at_a_stride_are_apart(record, stride, num_blocks):
    at = owned(record, 0, stride, num_blocks)
    if pages_are_apart(record, 4, stride, num_blocks):
        assert len(set(at)) == len(at)
    elif num_blocks > 1 and stride:
        solid = record.is_solid(4)
        assert len(set(at)) < len(at) or (solid and stride < record.page_extent(4))


def test_pages_need_a_stride_and_a_number_to_stand_in_holes():
    holes = Record((Field("latent", "uint8", 1),), "t _3 e")  # 3 bytes a token, 10 in all
    assert pages_are_apart(holes, 4, 1, 3)
    assert pages_are_apart(holes, 4, 1, 1)
    assert not pages_are_apart(holes, 4, 1, 4)
    assert pages_are_apart(holes, 4, 10, 0)
    assert not pages_are_apart(holes, 4, 1, 0)
    assert not pages_are_apart(holes, 4, 0, 3)
    assert not pages_are_apart(ROWS, 4, 31, 1)


# --- caches ---------------------------------------------------------------------------------------

MAKERS = {
    "a region each": layer_outermost,
    "one region": partial(layer_outermost, region="pool"),
    "blocks packed": block_outermost,
    "blocks rounded up": partial(block_outermost, multiple=100),
}


@settings(max_examples=12)
@given(cases(max_tokens=24, max_shards=3), *[st.sampled_from(list(MAKERS.values()))] * 2)
def test_the_law_holds_in_any_memory_order(case, here, there):
    src, dst = (
        lambda layout, rank, blocks, fill, make=make: RankCache.on(make(layout, rank, blocks), fill)
        for make in (here, there)
    )
    check_law(StridedExecutor(), case.src, case.dst, case.tokens, make_source=src, make_target=dst)


def test_a_cache_shares_the_regions_of_its_order():
    order = entry("vllm.blhnc").order(Shape())
    cache = RankCache.on(order, fill=7)
    memories = {view.memory.data_ptr() for view in cache.pages.values()}
    assert len(memories) == 1
    assert cache.nbytes == order.nbytes == cache.pages["key.0"].memory.numel()
    assert all((view.memory == 7).all() for view in cache.pages.values())
    first = cache.geometries()["key.0"].base
    for name, geometry in cache.geometries().items():
        assert geometry.base - first == order.pages_of(name).base
        assert geometry.num_blocks == 3


def test_a_page_view_ends_with_its_own_blocks():
    """A layer in front of others in one region has no more blocks than it was given."""
    order = layer_outermost(rows_layout(3), 0, {"kv": 2}, region="pool")
    view = RankCache.on(order).pages["latent.0"]
    assert view.num_slots == 8
    with pytest.raises(LayoutError, match="slot < 8"):
        gather_rows(view, torch.tensor([8]))


def test_places_of_a_cache_are_those_of_its_order():
    order = entry("vllm.lhbnc").order(Shape(num_layers=2, num_blocks=3, block_size=4, head_dim=2))
    cache = RankCache.on(order)
    seen = set()
    for name, view in cache.pages.items():
        for piece in view.pieces():
            begins = view.byte_offsets(torch.arange(view.num_slots), piece).numpy()
            at = (begins[:, None] + np.arange(piece.nbytes)).ravel().tolist()
            assert len(set(at)) == len(at), name
            assert not seen & set(at), name
            seen |= set(at)
    assert seen == set(range(order.nbytes))
