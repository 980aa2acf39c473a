"""The law of AllGather over torch.distributed: two spawned gloo ranks, each with its own memory.
Both uses of a prefill step: new KV from balanced chunks, cached context from round-robin pages."""

import multiprocessing as mp

import pytest
import torch
from gloo_child import images_of, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from kvflow.layouts import (
    GLM_5_3,
    BalancedChunks,
    Binding,
    Dense,
    KVCacheSpec,
    KVLayout,
    Paged,
    Placement,
    Replicated,
    RoundRobin,
)
from kvflow.layouts.wire import layout_to_wire
from kvflow.testing import check_law

SPEC = KVCacheSpec.from_config(
    GLM_5_3 | {"num_hidden_layers": 2, "index_topk_freq": 1, "index_skip_topk_offset": 0}
)
SIZE = 2


@pytest.fixture(scope="module")
def pipes():
    context = mp.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [context.Pipe() for _ in range(SIZE)]
    ranks = [
        context.Process(target=serve, args=(r, SIZE, store.port, theirs), daemon=True)
        for r, (_, theirs) in enumerate(ends)
    ]
    for rank in ranks:
        rank.start()
    yield [mine for mine, _ in ends]
    for mine, _ in ends:
        mine.send(None)
    for rank in ranks:
        rank.join(20)
        assert rank.exitcode == 0
        rank.close()


def over_gloo(pipes, src, dst, tokens):
    """A move function: every rank gets its own bytes, gathers, and gives its target back."""

    def side(binding, length):
        tables = {name: ids.tolist() for name, ids in binding.tables.items()}
        return layout_to_wire(binding.layout), tables, dict(binding.num_blocks), length

    def move(bound, sources, targets):
        for r, pipe in enumerate(pipes):
            sent = images_of(sources[r]), images_of(targets[r])
            pipe.send((side(src, tokens[1]), side(dst, tokens[1]), tokens, *sent))
        for r, pipe in enumerate(pipes):
            assert pipe.poll(60), f"rank {r} does not answer"
            for name, image in pipe.recv().items():
                memory = targets[r].pages[name].memory
                memory.copy_(torch.frombuffer(bytearray(image), dtype=torch.uint8))

    return move


def bound_to(layout, length):
    need = layout.num_blocks_for(length)
    tables = {g: list(range(n))[::-1] for g, n in need.items()}
    return Binding.of(layout, tables, {g: n + 1 for g, n in need.items()}, length)


@pytest.mark.processes
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, 20),
    count=st.integers(0, 20),
    interleave=st.integers(1, 9),
    block_size=st.integers(1, 8),
    cached=st.booleans(),
)
def test_all_gather_keeps_the_law_over_gloo(pipes, start, count, interleave, block_size, cached):
    stop = start + count
    if cached:
        deal, start = RoundRobin(SIZE, interleave), 0
    else:
        deal = BalancedChunks(SIZE, start, stop, rotate=interleave)
    everyone = Placement(Replicated(start, stop), (tuple(range(SIZE)),))
    src = bound_to(KVLayout.uniform(SPEC, Placement.simple(deal), Paged(block_size)), stop)
    dst = bound_to(KVLayout.uniform(SPEC, everyone, Dense(max(count + start, 1))), stop)
    check_law(over_gloo(pipes, src, dst, (start, stop)), src, dst, (start, stop))
