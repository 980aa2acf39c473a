"""Bytes of pages: vLLM's strides, and its canonical mapping and its certifier, against ours."""

from itertools import product

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping as vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    compute_layout_strides,
)
from vllm.v1.kv_offload.base import CanonicalPageMapping, CopyRun

from kvflow.errors import LayoutError
from kvflow.layouts import (
    Binding,
    Component,
    Field,
    KVCacheSpec,
    KVLayout,
    Paged,
    Placement,
    Record,
    Replicated,
    RoundRobin,
    latent_record,
)
from kvflow.layouts.catalogue import Shape, entry
from kvflow.layouts.layout import CacheGroup
from kvflow.layouts.paging import bytes_of_slots
from kvflow.transfers import BoundPlan, PageGeometry, descriptors, plan_transfer

pytestmark = pytest.mark.peers


# --- strides --------------------------------------------------------------------------------------


def our_bytes(order, component):
    """int64 [blocks, tokens, bytes of a row]: where each byte of a component lies."""
    pages, record = order.pages_of(component), order.record(component)
    size = order.block_size(component)
    slots = np.arange(pages.num_blocks * size)
    at = np.empty((len(slots), record.nbytes), np.int64)
    for piece in record.pieces(size):
        begins = pages.base + bytes_of_slots(slots, size, pages.block_stride, piece)
        stop = piece.record_offset + piece.nbytes
        at[:, piece.record_offset : stop] = begins[:, None] + np.arange(piece.nbytes)
    return at.reshape(pages.num_blocks, size, record.nbytes)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_every_byte_of_the_six_layouts(layout, count):
    grid = product((1, 2, 3), (1, 4), (1, 16), (1, 2, 4), (8,), ("bfloat16", "float32"))
    for num_layers, num_blocks, block_size, heads, dim, dtype in grid:
        shape = Shape(num_layers, num_blocks, block_size, heads, dim, dtype)
        order = entry(f"vllm.{layout.name.lower()}").order(shape)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=heads, head_size=dim, dtype=getattr(torch, dtype)
        )
        strides = compute_layout_strides(spec, num_blocks, num_layers, layout)
        row = dim * spec.dtype.itemsize  # of one head, key or value
        b, t, h, c = np.ogrid[:num_blocks, :block_size, :heads, :row]
        for layer, (v, kind) in product(range(num_layers), enumerate(("key", "value"))):
            where = (layer, b, h, t, c + v * row)
            theirs = sum(s * at for s, at in zip(strides, where, strict=True))
            ours = our_bytes(order, f"{kind}.{layer}")
            assert np.array_equal(ours, theirs.reshape(ours.shape)), (layout, shape)
            count("strides of the six layouts: bytes", theirs.size)


@pytest.mark.parametrize(
    ("name", "content", "alignment", "layout"),
    [
        ("vllm.mla_bf16", 1152, None, "LBNHC"),
        ("vllm.fp8_ds_mla", 656, None, "LBNHC"),
        ("vllm.nvfp4_ds_mla", 352, None, "LBNHC"),
        ("vllm.dsv4", 584, 576, "BLNHC"),
        ("vllm.dsv41", 528, 512, "BLNHC"),
    ],
)
def test_pages_of_latent_rows(name, content, alignment, layout, count):
    for num_layers, num_blocks, block_size in product((1, 3), (1, 5), (16, 64, 256)):
        shape = Shape(num_layers, num_blocks, block_size)
        order = entry(name).order(shape)
        spec = MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=content,
            dtype=torch.uint8,
            state_content_bytes=content,
            alignment=alignment,
        )
        strides = compute_layout_strides(spec, num_blocks, num_layers, KVCacheLayout[layout])
        for layer in range(num_layers):
            pages = order.pages_of(f"latent.{layer}")
            assert (pages.base, pages.block_stride) == (layer * strides[0], strides[1]), shape
            record = order.record(f"latent.{layer}")
            assert record.page_nbytes(block_size) == spec.unpadded_page_size_bytes
            assert record.page_pitch(block_size) == spec.page_size_bytes
            count("pages of latent rows: (format, shape, layer)")


# --- canonical pages ------------------------------------------------------------------------------

HEAD_DIM = 4
ORDERS = {  # ours, and how vLLM's tensor of (blocks, tokens, heads) is strided
    "packed NHD": (
        "[key,value: t h f e]",
        lambda b, n, h: _strided(b, n, h, 2 * HEAD_DIM, (0, 2, 1, 3)),
    ),
    "packed HND": (
        "[key,value: h t f e]",
        lambda b, n, h: _strided(b, h, n, 2 * HEAD_DIM, (0, 1, 2, 3)),
    ),
    "split NHD": ("[key: t h e | value: t h e]", lambda b, n, h: _halves(b, n, h, (0, 1, 2, 3, 4))),
    "split HND": ("[key: h t e | value: h t e]", lambda b, n, h: _halves(b, h, n, (0, 1, 3, 2, 4))),
}


def _strided(b, x, y, c, axes):
    return torch.empty(b, x, y, c, dtype=torch.bfloat16).permute(axes)


def _halves(b, x, y, axes):
    return torch.empty(b, 2, x, y, HEAD_DIM, dtype=torch.bfloat16).permute(axes)


def attention_record(heads, order):
    fields = [Field(name, "bfloat16", HEAD_DIM, num_heads=heads) for name in ("key", "value")]
    return Record(fields, order)


def canonical(record, block_size):
    """One rank that holds everything in one page."""
    spec = KVCacheSpec([Component("key", 0, record)])
    return KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(block_size))


def parallel(record, block_size, tp, dcp, pcp, interleave):
    """The ranks of a TP x PCP grid, with DCP on the TP ranks."""
    shards = [[] for _ in range(dcp * pcp)]
    for rank in range(tp * pcp):
        shards[rank // tp * dcp + rank % tp % dcp].append(rank)
    sharding = RoundRobin(dcp * pcp, interleave) if dcp * pcp > 1 else Replicated()
    spec = KVCacheSpec([Component("key", 0, record)])
    head_ranks = [[p * tp + t for p in range(pcp)] for t in range(tp)]
    if record.num_heads == 1 and dcp == tp:
        head_ranks = []
    group = CacheGroup("kv", spec.names, Paged(block_size))
    return KVLayout(spec, Placement(sharding, shards), [group], head_ranks)


def our_mappings(record, block_size, tp, dcp, pcp, interleave):
    """For each rank where every byte of its page lies in the canonical page: our plan from the
    canonical page to all ranks, lowered to bytes."""
    span = block_size * dcp * pcp
    src = canonical(record, span)
    dst = parallel(record, block_size, tp, dcp, pcp, interleave)
    plan = plan_transfer(src, dst, (0, span))
    bound = BoundPlan(
        plan, *(Binding.of(side, {"kv": [0]}, {"kv": 1}, span) for side in (src, dst))
    )
    page = record.page_nbytes(span)
    here = PageGeometry(record, span, 0, page, 1)
    mappings = []
    for rank in range(tp * pcp):
        local = dst.local_record("key.0", rank)
        there = PageGeometry(local, block_size, 0, local.page_nbytes(block_size), 1)
        runs = []
        for _, _, link in bound.links_to(rank):
            moved = descriptors(link, here, there)
            for at, to, n in zip(moved.src, moved.dst, moved.nbytes, strict=True):
                runs.append(CopyRun(int(to), int(at), int(n), 1, int(n), int(n)))
        mappings.append((there.nbytes, page, tuple(runs)))
    return mappings


def byte_map(runs, size):
    """int64 [local bytes]: the canonical byte of each."""
    found = np.full(size, -1, np.int64)
    for run in runs:
        for i in range(run.num_fragments):
            at = run.local_offset + i * run.local_stride
            byte = run.canonical_offset + i * run.canonical_stride
            assert (found[at : at + run.fragment_size] == -1).all()
            found[at : at + run.fragment_size] = np.arange(byte, byte + run.fragment_size)
    return found


def compare(what, theirs, ours, count):
    vllm._verify_tiling("theirs", theirs)
    certified = []
    for mapping, (local, page, runs) in zip(theirs, ours, strict=True):
        assert (mapping.local_page_size_bytes, mapping.canonical_page_size_bytes) == (local, page)
        assert np.array_equal(byte_map(mapping.runs, local), byte_map(runs, local)), what
        certified.append(
            CanonicalPageMapping(
                page, local, runs, mapping.num_writers, mapping.writer_index, False
            )
        )
    vllm._verify_tiling("ours", certified)
    count(f"canonical mapping, {what}: grids")
    count("canonical mapping: ranks x bytes", sum(local for local, _, _ in ours))


GRIDS = [
    (tp, dcp, pcp, interleave, block_size)
    for tp, dcp, pcp, interleave, block_size in product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4), (4, 8)
    )
    if tp % dcp == 0 and (interleave == 1 or dcp * pcp > 1)
]


def contexts(tp, dcp, pcp, interleave, heads):
    return [vllm._RankContext(tp, dcp, pcp, interleave, heads, rank) for rank in range(tp * pcp)]


def test_latent_pages(count):
    record = latent_record("bfloat16", latent_rank=4, rope_dim=2)
    for tp, dcp, pcp, interleave, block_size in GRIDS:
        spec = MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=6, dtype=torch.bfloat16
        )
        theirs = [
            vllm._layer_mapping(spec, None, 1, ctx) for ctx in contexts(tp, dcp, pcp, interleave, 1)
        ]
        compare("latent", theirs, our_mappings(record, block_size, tp, dcp, pcp, interleave), count)


@pytest.mark.parametrize("name", list(ORDERS))
def test_attention_pages(name, count):
    order, tensor = ORDERS[name]
    for (tp, dcp, pcp, interleave, block_size), heads in product(GRIDS, (1, 2, 4, 8)):
        held, record = max(1, heads // tp), attention_record(heads, order)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=held, head_size=HEAD_DIM, dtype=torch.bfloat16
        )
        cache = tensor(3, block_size, held)
        theirs = [
            vllm._layer_mapping(spec, cache, 3, ctx)
            for ctx in contexts(tp, dcp, pcp, interleave, heads)
        ]
        if None in theirs:  # DCP over ranks that hold different heads
            with pytest.raises(LayoutError):
                parallel(record, block_size, tp, dcp, pcp, interleave)
            count("canonical mapping: grids that lose tokens, refused by both")
            continue
        compare(name, theirs, our_mappings(record, block_size, tp, dcp, pcp, interleave), count)


def test_where_the_interleave_does_not_divide_the_block_size(count):
    """vLLM has no canonical page then; a plan between the two layouts exists and is proven."""
    record = latent_record("bfloat16", latent_rank=4, rope_dim=2)
    for block_size, interleave, dcp in product((4, 6), (3, 4, 5, 8, 16), (2, 4)):
        if block_size % interleave == 0:
            continue
        spec = MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=6, dtype=torch.bfloat16
        )
        ctx = vllm._RankContext(dcp, dcp, 1, interleave, 1, 0)
        assert vllm._layer_mapping(spec, None, 1, ctx) is None
        length = 3 * block_size * dcp + 1
        src = canonical(record, block_size)
        dst = parallel(record, block_size, dcp, dcp, 1, interleave)
        bindings = [
            Binding.of(side, {"kv": range(n)}, {"kv": n}, length)
            for side in (src, dst)
            for n in [side.num_blocks_for(length)["kv"]]
        ]
        plan = BoundPlan(plan_transfer(src, dst, (0, length)), *bindings).plan
        assert sum(part.runs.num_tokens for part in plan.parts) == length
        count("canonical mapping: grids where vLLM fails closed, and we plan")


def test_the_certifier_sees_a_fault_in_ours():
    record = latent_record("bfloat16", latent_rank=4, rope_dim=2)
    mappings = [
        CanonicalPageMapping(page, local, runs, 1, 0, False)
        for local, page, runs in our_mappings(record, 4, 2, 2, 1, 1)
    ]
    vllm._verify_tiling("ours", mappings)
    twice = [mappings[0], mappings[0]]
    with pytest.raises(AssertionError, match="do not tile"):
        vllm._verify_tiling("planted", twice)
