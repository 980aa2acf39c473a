"""Faults of host pools, each with its input to try."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hisparse_world import (
    LATENT_RANK,
    ROPE_DIM,
    TOPK,
    Blocks,
    bare_step,
    greedy_tokens,
    hisparse_memory,
    made_up_rows,
    model,
    paged_memory,
    prefilled,
    pull,
    pulled,
    request_of,
    small_spec,
)

from kvflow.engine.hisparse import (
    HiSparseBytes,
    HiSparseSizes,
    hisparse_layout,
)
from kvflow.engine.hisparse.pool import LatentPool
from kvflow.errors import CapacityError, ContentMismatch, LayoutError
from kvflow.layouts.layout import Binding
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import latent_record
from kvflow.layouts.spec import KVCacheSpec
from kvflow.transfers.operators.hotfetch import DeviceSlots, HotFetch, Misses, index_groups

torch.set_num_threads(1)
SPEC = small_spec()


def slots_of_row(pool, name, slot):
    return pool.read(name, torch.tensor([slot]))[0]


def test_fault_g01_each_buffer_is_addressed_by_ids_of_its_own_pool():
    """The host hands out pages 4 and 1; the request's tail pages on the device are 0 and 1."""
    memory = hisparse_memory(HiSparseSizes(3, 1, 3), SPEC, block=4, num_blocks=6)
    tables = {"latent": [4, 1], "indexer": [2, 0]}
    bare_step(memory, [request_of("a", 0, 7, tables)], 3, 0)
    memory.flush("a")
    rng, host = np.random.default_rng(0), memory.cache.pages["latent.0"]
    rows = made_up_rows(SPEC, "latent.0", rng, 7)
    page = host.memory[host.offset :].view(-1)[: 6 * 4 * rows.shape[1]].view(6, 4, -1)
    assert torch.equal(page[4], rows[:4])
    assert torch.equal(page[1][:3], rows[4:])
    assert not page[[0, 2, 3, 5]].any()
    held = [slots_of_row(memory.pool, "latent.0", slot) for slot in range(7)]
    assert torch.equal(torch.stack(held), rows)


def test_fault_g02_target_and_mtp_share_one_pool_whose_bytes_are_known_before():
    """One allocation on the host, two on the device, whoever asks; as many bytes as was said."""
    asked = {"host": [], "device": []}

    def allocate(side):
        def make(nbytes):
            asked[side].append(nbytes)
            return torch.zeros(nbytes, dtype=torch.uint8)

        return make

    sizes, blocks = HiSparseSizes(TOPK, 2, 40), {"latent": 9, "indexer": 11}
    said = HiSparseBytes.of(hisparse_layout(model().spec, _alone(), 8), blocks, sizes)
    memory = hisparse_memory(
        sizes,
        num_blocks=blocks,
        allocate_host=allocate("host"),
        allocate_device=allocate("device"),
    )
    assert asked == {"host": [said.host], "device": [said.latent_pool, said.index_pages]}
    main, mtp = (memory.cache.pages[f"latent.{i}"] for i in (0, 5))
    assert main.memory.data_ptr() == mtp.memory.data_ptr()
    assert memory.gauges["host_nbytes"] == said.host
    row = sum(c.record.nbytes for c in model().spec.components if c.kind == "latent")
    assert said.host == 9 * 8 * row
    assert said.latent_pool == 2 * (2 * 8 + 40) * row


def _alone():
    return hisparse_memory(spec=SPEC, num_blocks=1).layout.placement


def test_fault_g03_admission_counts_the_host_pool():
    """64 tokens on the device, 512 on the host: 300 find room, 513 need one block more than there
    are. A decode engine refuses these by `num_blocks_for` (test_decode)."""
    memory = hisparse_memory(HiSparseSizes(16, 1, 32), SPEC, block=16, num_blocks=32)
    assert memory.pool.sizes.rows_per_request(16) == 64
    assert memory.layout.num_blocks_for(300) == {"latent": 19, "indexer": 19}
    assert memory.layout.num_blocks_for(513) == {"latent": 33, "indexer": 33}
    out = bare_step(memory, [request_of("a", 299, 1, Blocks(memory).take(300))], 16, 0)
    assert all(torch.isfinite(o).all() for o in out.values())


def test_fault_g03_seats_are_named_when_they_run_out():
    memory = hisparse_memory(HiSparseSizes(3, 2, 3), SPEC, block=4, num_blocks=6)
    tables = [{"latent": [i], "indexer": [i]} for i in range(3)]
    bare_step(memory, [request_of(i, 0, 2, tables[i]) for i in range(2)], 3, 0)
    with pytest.raises(CapacityError, match=r"request 2 needs a seat, all 2 \(max_requests\)"):
        memory.open([request_of(2, 0, 2, tables[2])], frozenset())
    memory.forget(0)
    bare_step(memory, [request_of(2, 0, 2, tables[2])], 3, 0)


def test_fault_g04_a_request_that_arrives_by_transfer_needs_no_other_preparation():
    """Its first step finds tail pages and hot rows complete: all are made when it is seated."""
    source = prefilled(60, 37, 96)
    wanted = greedy_tokens(source.blocks.memory, source.tables, source, 3, [1])
    memory = hisparse_memory(HiSparseSizes(TOPK, 1, TOPK))
    _, tables = pulled(source, memory, [1])
    assert memory.num_free_seats == 1
    assert greedy_tokens(memory, tables, source, 3, [1]) == wanted
    before = memory.totals
    memory.flush("nobody")  # all its rows are on the host
    assert memory.totals == before


def test_fault_g06_three_requests_with_small_hot_buffers_read_their_own_rows():
    """100 tokens each, 16 hot rows each, steps of one and of several in turn."""
    sizes = HiSparseSizes(16, 3, 16)
    source = Blocks(paged_memory(SPEC, 8, 42), 3)
    target = Blocks(hisparse_memory(sizes, SPEC, 8, 42), 4)
    tables = [(source.take(108), target.take(108)) for _ in range(3)]
    for i, (here, there) in enumerate(tables):
        bare_step(source.memory, [request_of(i, 0, 100, here)], 16, i)
        pull(source, here, target, there, 100)
    at = [100, 100, 100]
    for seed, names in enumerate([[0], [1, 2], [2, 0], [1], [0, 1, 2], [2]], 10):
        outs = []
        for side, blocks in enumerate((source, target)):
            requests = [request_of(i, at[i], 1, tables[i][side]) for i in names]
            outs.append(bare_step(blocks.memory, requests, 16, seed))
        for i in names:
            at[i] += 1
        assert all(torch.equal(out, outs[1][name]) for name, out in outs[0].items())
    assert target.memory.counters["evictions"] > 0


def _resident_nbytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_fault_g08_seating_and_forgetting_leaks_nothing():
    """10,000 requests come and go, and 200 memories; the resident size stays flat."""
    memory = hisparse_memory(HiSparseSizes(3, 2, 3), SPEC, block=4, num_blocks=4)
    tables, sizes = {"latent": [0, 1], "indexer": [0, 1]}, []
    for n in range(10_000):
        memory.open([request_of(n, 0, 5, tables)], frozenset())
        memory.forget(n)
        if n in (1_000, 9_999):
            gc.collect()
            sizes.append(_resident_nbytes())
    assert sizes[1] - sizes[0] < 1 << 20
    assert memory.num_free_seats == 2
    sizes = []
    for n in range(200):
        big = hisparse_memory(HiSparseSizes(3, 2, 3000), SPEC, block=64, num_blocks=64)
        big.cache.pages["latent.0"].memory.fill_(1)
        if n in (20, 199):
            del big
            gc.collect()
            sizes.append(_resident_nbytes())
    assert sizes[1] - sizes[0] < 4 << 20


def test_fault_f04_each_layer_reads_its_own_rows_in_both_pools():
    """Value l is written to layer l of four layers in one allocation: in tail pages by publishing,
    in hot rows by fetching from the host."""
    config = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "shared"]}
    sizes = {"kv_lora_rank": LATENT_RANK, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": 8}
    spec = KVCacheSpec.from_config(config | sizes, kv_dtype="fp8")
    memory = hisparse_memory(HiSparseSizes(4, 1, 4), spec, block=2, num_blocks=8)
    pool, nbytes = memory.pool, spec["latent.0"].record.nbytes
    kv = memory.open([request_of("a", 0, 8, Blocks(memory).take(8))], frozenset())
    for layer in range(4):
        kv.publish(f"latent.{layer}", torch.full((8, nbytes), 10 + layer, dtype=torch.uint8))
    held = kv.shard.rows[0]
    (group,) = index_groups(spec)
    found, missing = held.groups[group].resolve(np.arange(2, 8))
    assert missing.tolist() == [True, True, False, False, False, False]
    pool.fetch(group, [held.lanes(np.arange(2, 4), found[:2])])
    for layer in range(4):
        rows = pool.read(f"latent.{layer}", torch.from_numpy(found))
        assert bool((rows == 10 + layer).all()), layer


def test_fault_f12_tiers_with_rows_of_different_size_are_refused():
    """Rows of 656 bytes on the device, of 640 on the host."""
    config = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    spec = KVCacheSpec.from_config(config | {"index_head_dim": 128}, kv_dtype="fp8")
    layout = hisparse_layout(spec, _alone(), 4)
    short = latent_record("fp8", latent_rank=512, rope_dim=56)
    assert (spec["latent.0"].record.nbytes, short.nbytes) == (656, 640)
    components = [
        evolve(c, record=short if c.kind == "latent" else c.record) for c in spec.components
    ]
    other = hisparse_layout(KVCacheSpec(components, spec.content), _alone(), 4)
    with pytest.raises((LayoutError, ContentMismatch)):
        HotFetch(other, layout, ("latent.0",))
    pool = LatentPool(layout, 0, {"latent": 2, "indexer": 2}, HiSparseSizes(1, 1, 1))
    here, there = pool.cache.pages["latent.0"], pool.device.pages["latent.0"]
    assert here.record == there.record
    assert here.record.nbytes == 656
    binding = Binding.of(layout, {"latent": [1], "indexer": [0]}, {"latent": 2, "indexer": 2}, 1)
    pool.fetch(("latent.0",), [Misses(binding, [0], DeviceSlots([8]))])
    assert pool.counters["fetched_nbytes"] == 656
    assert isinstance(layout.group("indexer").paging, Paged)
