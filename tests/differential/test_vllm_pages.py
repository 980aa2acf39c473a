"""Pages of vLLM's CPU attention, written by its own op, and its regrouping of blocks on receive."""

import numpy as np
import pytest
import torch
import vllm._custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.utils import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
)

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
)
from kvflow.layouts.catalogue import Shape, entry
from kvflow.layouts.paging import bytes_of_slots
from kvflow.transfers import BoundPlan, plan_transfer
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor

pytestmark = pytest.mark.peers

NUMBER = {"float32": torch.int32, "bfloat16": torch.int16}


def rows(num_tokens, heads, dim, dtype, first):
    """[tokens, heads, dim] whose items are numbered by their bits, `first` the first number."""
    bits = torch.arange(first, first + num_tokens * heads * dim, dtype=NUMBER[dtype])
    return bits.reshape(num_tokens, heads, dim).view(getattr(torch, dtype))


def written(order, slots, key, value):
    """The memory of a layer as the catalogue describes it; what nobody wrote is 0xff."""
    memory = np.full(order.nbytes, 0xFF, np.uint8)
    for component, values in (("key.0", key), ("value.0", value)):
        pages, record = order.pages_of(component), order.record(component)
        size = order.block_size(component)
        packed = values.contiguous().view(torch.uint8).reshape(len(slots), record.nbytes).numpy()
        for piece in record.pieces(size):
            at = pages.base + bytes_of_slots(slots, size, pages.block_stride, piece)
            for i in range(piece.nbytes):
                memory[at + i] = packed[:, piece.record_offset + i]
    return memory


@pytest.mark.parametrize("dtype", list(NUMBER))
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_cpu_attention_pages(dtype, dim, block_size, count):
    heads, num_blocks = 2, 3
    shape = Shape(1, num_blocks, block_size, heads, dim, dtype)
    order = entry("vllm.cpu_vec").order(shape)
    rng = np.random.default_rng(dim)
    for _ in range(5):
        num_tokens = int(rng.integers(1, min(num_blocks * block_size, 120)))
        slots = rng.permutation(num_blocks * block_size)[:num_tokens]
        key = rows(num_tokens, heads, dim, dtype, 1)
        value = rows(num_tokens, heads, dim, dtype, 15_000)
        memory = torch.full((order.nbytes,), 0xFF, dtype=torch.uint8)
        cache = memory.view(key.dtype).view(num_blocks, heads, 2 * block_size, dim)
        ops.cpu_attn_reshape_and_cache(
            key, value, *cache.chunk(2, dim=2), torch.from_numpy(slots), "vec"
        )
        assert np.array_equal(memory.numpy(), written(order, slots, key, value))
        count("pages of CPU attention, isa vec, written by vLLM's op: bytes", order.nbytes)


def test_amx_pages(count):
    """Where the machine has no AMX, vLLM's op refuses, and its formulas are evaluated instead."""
    for heads, dim, block_size in ((1, 32, 32), (2, 64, 32), (2, 32, 128), (1, 64, 64)):
        num_blocks = 2
        order = entry("vllm.cpu_amx").order(Shape(1, num_blocks, block_size, heads, dim))
        slots = np.random.default_rng(dim).permutation(num_blocks * block_size)[:50]
        key = rows(50, heads, dim, "bfloat16", 1)
        value = rows(50, heads, dim, "bfloat16", 15_000)
        memory = torch.full((order.nbytes,), 0xFF, dtype=torch.uint8)
        cache = memory.view(torch.bfloat16).view(num_blocks, heads, 2 * block_size, dim)
        if torch.cpu._is_amx_tile_supported():
            ops.cpu_attn_reshape_and_cache(
                key, value, *cache.chunk(2, dim=2), torch.from_numpy(slots), "amx"
            )
            count("pages of CPU attention, isa amx, written by vLLM's op: bytes", order.nbytes)
        else:
            store_as_amx(cache, slots, key, value, block_size)
            count("pages of CPU attention, isa amx, by formula: bytes", order.nbytes)
        assert np.array_equal(memory.numpy(), written(order, slots, key, value))


def store_as_amx(cache, slots, key, value, n):
    """K in groups of 16 tokens, V in groups of 16 elements, both as pairs."""
    for i, slot in enumerate(slots.tolist()):
        block, t = divmod(slot, n)
        for h in range(key.shape[1]):
            page, dim = cache[block, h].view(-1), key.shape[2]
            for d in range(dim):
                page[t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2] = key[i, h, d]
                at = d // 16 * 16 * n + t // 2 * 32 + d % 16 * 2 + t % 2
                page[n * dim + at] = value[i, h, d]


# --- regrouping of blocks -------------------------------------------------------------------------

HEADS, DIM = 2, 8
HND, NHD, TRANSPOSED = "h t e", "t h e", "h e t"


def layout(order, block_size):
    record = Record((Field("key", "float32", DIM, num_heads=HEADS),), order)
    spec = KVCacheSpec([Component("key", 0, record)])
    return KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(block_size))


def both_ways(src_order, dst_order, small, large, regroup):
    """The memory of the target: as our plan moves it, and as vLLM does, which copies the small
    pages raw behind each other into the large one and then regroups."""
    length = 3 * large
    src, dst = layout(src_order, small), layout(dst_order, large)
    tables = [np.arange(length // small)[::-1], np.arange(3)]
    bindings = [
        Binding.of(side, {"kv": table}, {"kv": len(table)}, length)
        for side, table in zip((src, dst), tables, strict=True)
    ]
    source, target = (RankCache.allocate(b.layout, 0, b.num_blocks) for b in bindings)
    pool = source.pages["key.0"].memory
    pool.view(torch.int32)[:] = torch.arange(len(pool) // 4, dtype=torch.int32)
    bound = BoundPlan(plan_transfer(src, dst, (0, length)), *bindings)
    ReferenceExecutor().execute(bound, {0: source}, {0: target})

    raw = pool.view(torch.float32).view(length // small, -1)[tables[0].copy()]
    cache = raw.reshape(3, *((large, HEADS) if dst_order == NHD else (HEADS, large)), DIM)
    cache = cache.transpose(1, 2) if dst_order == NHD else cache
    regroup(cache, torch.arange(3), large // small)
    theirs = cache.transpose(1, 2) if dst_order == NHD else cache
    ours = target.pages["key.0"].memory.view(torch.int32)
    return ours.numpy(), theirs.contiguous().view(torch.int32).reshape(-1).numpy()


SIZES = [(s, n) for n in (4, 16, 64) for s in (1, 2, 4, 16) if s < n]


@pytest.mark.parametrize(("small", "large"), SIZES)
def test_regrouping_of_head_major_pages(small, large, count):
    ours, theirs = both_ways(HND, HND, small, large, kv_postprocess_blksize_on_receive)
    assert np.array_equal(ours, theirs)
    ours, theirs = both_ways(HND, NHD, small, large, kv_postprocess_blksize_and_layout_on_receive)
    assert np.array_equal(ours, theirs)
    count("regrouping of blocks, HND to HND and HND to NHD: pairs of block sizes", 2)


@pytest.mark.parametrize(("small", "large"), SIZES)
def test_regrouping_of_transposed_pages_is_wrong_there(small, large, count):
    """K of CPU attention is transposed inside a page. vLLM regroups it as token-major rows, says
    nothing and serves wrong tokens; our plan knows the order of the page."""
    ours, theirs = both_ways(
        TRANSPOSED, TRANSPOSED, small, large, kv_postprocess_blksize_on_receive
    )
    # Independent of both: token by token, through the transposed views.
    length = 3 * large
    first = torch.arange(length * HEADS * DIM, dtype=torch.int32)
    pages = first.view(length // small, HEADS, DIM, small).flip(0)
    token = [pages[t // small, :, :, t % small] for t in range(length)]
    right = torch.stack(token).view(3, large, HEADS, DIM).permute(0, 2, 3, 1).reshape(-1).numpy()
    assert np.array_equal(ours, right)
    wrong = int((theirs != right).sum())
    assert wrong > 0
    count("regrouping of transposed pages: items", len(right))
    count("... of them in the wrong place after vLLM's function", wrong)
