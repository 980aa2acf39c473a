"""vLLM: host memory. HiSparse keeps latent rows there; the offload tier keeps whole blocks."""

from kvflow.layouts.catalogue.entry import (
    GROUP,
    Entry,
    Golden,
    Shape,
    Source,
    fp8_latent,
)
from kvflow.layouts.catalogue.vllm import GLM, LLAMA
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.memory import MemoryOrder, Place
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.record import index_record
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import Component, KVCacheSpec

HISPARSE = "vllm/v1/hisparse/layout.py"
OFFLOAD = "vllm/v1/kv_offload/cpu/shared_offload_region.py, vllm/v1/kv_offload/cpu/spec.py"
PAGE_NBYTES = 4096
"""The size of a page of the operating system, to which rows of the offload region are rounded."""


def _wheel(where: str, says: str) -> Source:
    return Source("vLLM", "v0.32.0", where, says)


def leaders_first(shape: Shape) -> tuple[int, ...]:
    """Layers in the order of their specs: those that own an indexer, then those that share it."""
    others = [layer for layer in range(shape.num_layers) if layer not in shape.indexed]
    return (*shape.indexed, *others)


def _host(shape: Shape, tokens: int, num_blocks: int) -> MemoryOrder:
    """Latent pages of `tokens` tokens, layer outermost."""
    record = fp8_latent(shape)
    spec = KVCacheSpec([Component("latent", layer, record) for layer in range(shape.num_layers)])
    page = record.page_nbytes(tokens)
    places: dict[str, Place] = {
        f"latent.{layer}": (GROUP, at * num_blocks * page, page)
        for at, layer in enumerate(leaders_first(shape))
    }
    layout = KVLayout.uniform(spec, Placement.simple(Replicated()), Pool(tokens), GROUP)
    return MemoryOrder.placed(layout, 0, {GROUP: num_blocks}, places)


def host_pages(_: Entry, shape: Shape) -> MemoryOrder:
    return _host(shape, shape.block_size, shape.num_blocks)


def host_rows(_: Entry, shape: Shape) -> MemoryOrder:
    return _host(shape, 1, shape.num_blocks * shape.block_size)


def resident_groups(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Layers by resident group: a layer that owns an indexer and those that share it stay
    together, and units share a group while their pages fit beside one block of indexer pages."""
    latent, index = fp8_latent(shape), index_record("fp8", index_dim=shape.index_dim)
    room = len(shape.indexed) * index.page_nbytes(shape.block_size)
    page = latent.page_nbytes(shape.block_size)
    units: list[list[int]] = []
    for layer in range(shape.num_layers):
        if layer in shape.indexed or not units:
            units.append([])
        units[-1].append(layer)
    groups: list[list[int]] = []
    for unit in units:
        if not groups or (len(groups[-1]) + len(unit)) * page > room:
            groups.append([])
        groups[-1] += unit
    return tuple(tuple(group) for group in groups)


def device_pool(_: Entry, shape: Shape) -> MemoryOrder:
    """Indexer pages and resident latent pages, groups laid over each other in one pool."""
    latent, index = fp8_latent(shape), index_record("fp8", index_dim=shape.index_dim)
    page, key = latent.page_nbytes(shape.block_size), index.page_nbytes(shape.block_size)
    resident = resident_groups(shape)
    widest = max(len(shape.indexed) * key, *(len(group) * page for group in resident))
    stride = -(-widest // page) * page
    places: dict[str, Place] = {}
    groups = {"indexer": [f"indexer.{layer}" for layer in shape.indexed]}
    for at, name in enumerate(groups["indexer"]):
        places[name] = (GROUP, at * key, stride)
    for i, layers in enumerate(resident):
        groups[f"resident.{i}"] = [f"latent.{layer}" for layer in layers]
        for at, layer in enumerate(layers):
            places[f"latent.{layer}"] = (GROUP, at * page, stride)
    components = [Component("latent", layer, latent) for layer in range(shape.num_layers)]
    components += [Component("indexer", layer, index) for layer in shape.indexed]
    paging = Paged(shape.block_size)
    layout = KVLayout(
        KVCacheSpec(components),
        Placement.simple(Replicated()),
        [CacheGroup(name, members, paging) for name, members in groups.items()],
    )
    num_blocks = dict.fromkeys(groups, shape.num_blocks)
    size = {GROUP: shape.num_blocks * stride}
    return MemoryOrder.placed(layout, 0, num_blocks, places, sizes=size, overlaid=True)


HISPARSE_ENTRIES = (
    Entry(
        "vllm.hisparse_host",
        "mla_fp8",
        "L B t f e",
        _wheel(
            HISPARSE + " (get_hisparse_kv_cache_config)",
            "the host pool is laid out as LBNHC, layers by spec: owners of an indexer first",
        ),
        Golden(GLM, 51_824, 41_984, 41_984_000, 41_984, 3_316_736_000),
        custom=host_pages,
        note="imported pages land here whole",
    ),
    Entry(
        "vllm.hisparse_host_rows",
        "mla_fp8",
        "L B t f e",
        _wheel(
            HISPARSE + " (get_hisparse_kv_cache_config)",
            "the same memory by rows: a row of 656 bytes is what a miss of the hot buffer fetches",
        ),
        Golden(GLM, 51_824, 656, 41_984_000, 656, 3_316_736_000),
        custom=host_rows,
        note="row granular: a block is one token",
    ),
    Entry(
        "vllm.hisparse_device",
        "dsa_fp8",
        "B L page",
        _wheel(
            HISPARSE + " (_lay_out_hisparse_groups); vllm/v1/core/kv_cache_utils.py "
            "(_get_kv_cache_bytes_per_block)",
            "block outermost; the indexer pages of all layers and the resident pages of each "
            "group of layers overlay the same block, which is rounded up to whole latent pages",
        ),
        Golden(GLM, 54_728, 41_984, 41_984, 209_920, 209_920_000),
        custom=device_pool,
        note="a block id belongs to one group at a time",
    ),
)

_SHARED = (
    "a row for each chunk, rounded up to an OS page; in it the workers' parts, in each the "
    "tensors behind each other, in each the device blocks of the chunk"
)
OFFLOADED = (
    Entry(
        "vllm.offload_nhd",
        "gqa",
        "B w L t h v e",
        _wheel(OFFLOAD, _SHARED),
        Golden(LLAMA, 131_072, 131_072, 131_072, 4_194_304, 4_194_304_000),
        block_multiple=PAGE_NBYTES,
        chunked=True,
        note="layers that are tensors of their own (layer outermost on the device)",
    ),
    Entry(
        "vllm.offload_hnd",
        "gqa",
        "B w L t h t* v e",
        _wheel(OFFLOAD, _SHARED),
        Golden(LLAMA, 131_072, 131_072, 131_072, 4_194_304, 4_194_304_000),
        block_multiple=PAGE_NBYTES,
        chunked=True,
        note="device blocks keep their HND order inside the chunk",
    ),
    Entry(
        "vllm.offload_fp8_ds_mla",
        "mla_fp8",
        "B w L t f e",
        _wheel(OFFLOAD, _SHARED),
        Golden(GLM, 51_824, 83_968, 83_968, 6_635_520, 6_635_520_000),
        block_multiple=PAGE_NBYTES,
        chunked=True,
    ),
    Entry(
        "vllm.offload_indexer",
        "index_fp8",
        "B w L t f t* e",
        _wheel(OFFLOAD, _SHARED),
        Golden(GLM, 2_904, 16_896, 16_896, 372_736, 372_736_000),
        block_multiple=PAGE_NBYTES,
        chunked=True,
        note="planar device pages stand behind each other: a chunk is not one planar page",
    ),
)

ENTRIES = (*HISPARSE_ENTRIES, *OFFLOADED)
