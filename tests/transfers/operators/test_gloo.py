"""The laws of the collective operators over torch.distributed: spawned gloo ranks, each with its
own memory. AllGather in both uses of a prefill step (new KV from balanced chunks, cached context
from round-robin pages), and ReduceScatter."""

import forks
import pytest
import torch
from gloo_child import images_of, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stages import bound_to, problems
from torch.distributed import TCPStore

from kvflow.layouts import (
    GLM_5_3,
    BalancedChunks,
    Dense,
    KVCacheSpec,
    KVLayout,
    Paged,
    Placement,
    Replicated,
    RoundRobin,
)
from kvflow.layouts.wire import layout_to_wire
from kvflow.testing import Attention, check_law, check_reduce_scatter
from kvflow.transfers.operators import PartialAttention

SPEC = KVCacheSpec.from_config(
    GLM_5_3 | {"num_hidden_layers": 2, "index_topk_freq": 1, "index_skip_topk_offset": 0}
)
SIZE = 2


@pytest.fixture(scope="module")
def pipes():
    context = forks.context()
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


def over_gloo(pipes, src, dst, tokens, padded):
    """A move function: every rank gets its own bytes, gathers, and gives its target back."""

    def side(binding, length):
        tables = {name: ids.tolist() for name, ids in binding.tables.items()}
        return layout_to_wire(binding.layout), tables, dict(binding.num_blocks), length

    def move(bound, sources, targets):
        for r, pipe in enumerate(pipes):
            sent = images_of(sources[r]), images_of(targets[r])
            sides = side(src, tokens[1]), side(dst, tokens[1])
            pipe.send(("gather", *sides, tokens, padded, *sent))
        for r, pipe in enumerate(pipes):
            for name, image in answer(pipe, r).items():
                memory = targets[r].pages[name].memory
                memory.copy_(torch.frombuffer(bytearray(image), dtype=torch.uint8))

    return move


def answer(pipe, rank):
    assert pipe.poll(60), f"rank {rank} does not answer"
    return pipe.recv()


@pytest.mark.processes
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, 20),
    count=st.integers(0, 20),
    interleave=st.integers(1, 9),
    block_size=st.integers(1, 8),
    cached=st.booleans(),
    padded=st.booleans(),
)
def test_all_gather_keeps_the_law_over_gloo(
    pipes, start, count, interleave, block_size, cached, padded
):
    stop = start + count
    if cached:
        deal, start = RoundRobin(SIZE, interleave), 0
    else:
        deal = BalancedChunks(SIZE, start, stop, rotate=interleave)
    everyone = Placement(Replicated(start, stop), (tuple(range(SIZE)),))
    src = bound_to(KVLayout.uniform(SPEC, Placement.simple(deal), Paged(block_size)), stop)
    dst = bound_to(KVLayout.uniform(SPEC, everyone, Dense(max(count + start, 1))), stop)
    check_law(over_gloo(pipes, src, dst, (start, stop), padded), src, dst, (start, stop))


@pytest.mark.processes
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    problem=problems(size=SIZE),
    axis=st.sampled_from(["head", "token"]),
    base=st.sampled_from(["e", "2"]),
    data=st.data(),
)
def test_reduce_scatter_keeps_the_law_over_gloo(pipes, problem, axis, base, data):
    scatters(pipes, problem, axis, base, data)


@pytest.mark.processes
@pytest.mark.parametrize(("axis", "counts"), [("head", (1, 2)), ("token", (0, 0))])
def test_a_step_without_queries_goes_over_gloo_too(pipes, axis, counts):
    """Rows of no bytes."""
    nobody = Attention(torch.zeros(0, 3, 5).double(), torch.zeros(5, 3, 2).double(),
                       torch.arange(5) % 2, SIZE)  # fmt: skip
    check_reduce_scatter(scatter_over(pipes, axis, counts, "e"), nobody, axis, counts)


def scatters(pipes, problem, axis, base, data):
    total = problem.scores.shape[1 if axis == "head" else 0]
    first = data.draw(st.integers(0, total))
    counts = (first, total - first)
    scatter = scatter_over(pipes, axis, counts, base)
    check_reduce_scatter(scatter, problem, axis, counts, base=base)


def scatter_over(pipes, axis, counts, base):
    """Every rank gets its part and gives back what it ends with."""

    def scatter(parts):
        for part, pipe in zip(parts, pipes, strict=True):
            arrays = part.out.numpy(), part.lse.numpy()
            pipe.send(("scatter", axis, counts, base, *arrays))
        arrived = [answer(pipe, r) for r, pipe in enumerate(pipes)]
        return [PartialAttention(*map(torch.from_numpy, arrays), base) for arrays in arrived]

    return scatter
