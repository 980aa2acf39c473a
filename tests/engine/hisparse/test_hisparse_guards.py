"""Attention reads the device's pool and nothing else, and the pool is no larger than it says."""

import ctypes
import os
import signal

import numpy as np
import pytest
import torch
from guarded import GuardedPool
from hisparse_world import (
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
)

from kvflow.engine.hisparse import HiSparseSizes
from kvflow.engine.hisparse.pool import LatentPool
from kvflow.errors import CapacityError
from kvflow.kernels.rows import scatter_rows
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec

torch.set_num_threads(1)
CAP = 40_000


def guarded_memory(sizes):
    """A memory on guarded pools, with its host pool and its latent pool on the device."""
    host, devices = GuardedPool(), []

    def device(nbytes):
        devices.append(GuardedPool())
        return devices[-1].allocate(nbytes)

    memory = hisparse_memory(
        sizes, allocate_host=host.allocate, allocate_device=device, host_access=host.window
    )
    return memory, host, devices[0]


def test_tokens_are_right_while_the_host_pool_cannot_be_read():
    """The host pool is unreadable but in the windows of fetches and mirrors, what lies behind the
    capped pool of the device always; the context is more than 8 times what the device holds."""
    source = prefilled(340)
    wanted = greedy_tokens(source.blocks.memory, source.tables, source, 12)
    memory, host, device = guarded_memory(HiSparseSizes(TOPK, 1, TOPK, device_nbytes=CAP))
    _, tables = pulled(source, memory)
    host.close_to_all()
    assert greedy_tokens(memory, tables, source, 12) == wanted
    latents = model().spec.select(kind="latent")
    row = sum(model().spec[name].record.nbytes for name in latents)
    assert device.nbytes == memory.gauges["device_latent_nbytes"] <= CAP
    assert 340 * row > 8 * CAP
    assert memory.counters["evictions"] > 0


def ends_of(body):
    """How a fork of this process ends that runs `body`: 0, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        try:
            body()
        except BaseException:
            os._exit(77)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_guards_are_real(monkeypatch):
    """Whoever reads the host pool in a forward, or writes behind the device's, dies of it."""
    source = prefilled(60, 37, 96)
    memory, host, device = guarded_memory(HiSparseSizes(TOPK, 1, TOPK))
    _, tables = pulled(source, memory, [0])
    host.close_to_all()
    pages, read = memory.cache.pages["latent.0"], LatentPool.read

    def decode():
        greedy_tokens(memory, tables, source, 3, [0])

    assert ends_of(decode) == 0
    assert ends_of(lambda: int(pages.memory[0])) == -signal.SIGSEGV
    behind = device.memory.data_ptr() + device.nbytes
    assert ends_of(lambda: ctypes.memset(behind - 1, 1, 1)) == 0
    assert ends_of(lambda: ctypes.memset(behind, 1, 1)) == -signal.SIGSEGV
    monkeypatch.setattr(LatentPool, "read", lambda *a: read(*a) + 0 * pages.memory[5])
    assert ends_of(decode) == -signal.SIGSEGV


def test_a_pool_above_its_cap_is_refused_before_anything_is_allocated():
    asked = []
    with pytest.raises(CapacityError, match=r"takes 193536 bytes \(.*\), its cap is 193535"):
        hisparse_memory(
            HiSparseSizes(TOPK, 3, 40, device_nbytes=193_535),
            allocate_host=asked.append,
            allocate_device=asked.append,
        )
    assert asked == []


def test_all_bytes_of_the_device_are_an_eighth_of_the_context():
    """At GLM-5.3's record sizes, index pages counted too: an index group of four layers, 3,000
    tokens of context, top-k 32."""
    spec = KVCacheSpec.from_config(
        GLM_5_3
        | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
        | {"index_skip_topk_offset": 1},
        kv_dtype="fp8",
    )
    assert [c.name for c in spec.components if c.kind == "indexer"] == ["indexer.0"]
    assert spec.nbytes_per_token == 4 * 656 + 132
    length, topk, block = 3000, 32, 64
    num_blocks = -(-(length + 4) // block)
    source = Blocks(paged_memory(spec, block, num_blocks), 1)
    target = Blocks(hisparse_memory(HiSparseSizes(topk, 1, topk), spec, block, num_blocks), 2)
    tables = [blocks.take(length + 4) for blocks in (source, target)]
    rows = np.random.default_rng(5)
    for name, view in source.memory.cache.pages.items():
        new = made_up_rows(spec, name, rows, num_blocks * block)
        scatter_rows(view, torch.arange(num_blocks * block), new)
    pull(source, tables[0], target, tables[1], length)
    for n in range(4):
        outs = [
            bare_step(blocks.memory, [request_of("a", length + n, 1, table)], topk, n)
            for blocks, table in zip((source, target), tables, strict=True)
        ]
        assert all(torch.equal(out, outs[1][name]) for name, out in outs[0].items())
    gauges = target.memory.gauges
    on_device = gauges["device_latent_nbytes"] + gauges["device_index_nbytes"]
    index, pool = target.memory.cache.pages["indexer.0"], target.memory.pool.device
    assert on_device == index.memory.numel() + pool.nbytes
    assert 8 * on_device <= (length + 4) * spec.nbytes_per_token
