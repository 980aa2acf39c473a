"""vLLM's three slot mappings against `Binding.slots`: the C++ kernel of the CPU backend (no
context parallelism) and the two Triton kernels, in the interpreter."""

from collections import Counter

import numpy as np
import pytest
import torch
import vllm._custom_ops  # noqa: F401 - loads the C++ kernels
from attrs import frozen
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker import block_table as runner_v1
from vllm.v1.worker.gpu import block_table as runner_v2
from vllm.v1.worker.gpu.buffer_utils import _load_ptr
from vllm_kernels import interpreted

from kvflow.layouts import Binding, KVCacheSpec, KVLayout, Paged, Placement, Replicated, RoundRobin

pytestmark = pytest.mark.peers

SPEC = KVCacheSpec.from_config(
    {"num_hidden_layers": 1, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "index_head_dim": 4}
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return interpreted(
        tmp_path_factory.mktemp("kernels"),
        _load_ptr,
        runner_v1.ComputeSlotMappingKernel.kernel,
        runner_v2._compute_slot_mappings_kernel,
    )


@frozen(eq=False)
class Step:
    """A batch of requests: each has a block table and a range of positions."""

    block_size: int
    num_ranks: int
    interleave: int
    tables: np.ndarray
    ranges: list

    @classmethod
    def draw(cls, rng, block_size, num_ranks, interleave):
        num_requests, width, pool = int(rng.integers(1, 4)), 6, 40
        tables = np.stack([rng.permutation(pool)[:width] for _ in range(num_requests)])
        room = (width - 2) * block_size * num_ranks  # an odd interleave needs entries to spare
        ends = [sorted(rng.integers(0, room, 2).tolist()) for _ in range(num_requests)]
        return cls(block_size, num_ranks, interleave, tables.astype(np.int32), ends)

    @property
    def positions(self):
        return np.concatenate([np.arange(*r) for r in self.ranges]).astype(np.int64)

    @property
    def starts(self):
        return np.cumsum([0] + [b - a for a, b in self.ranges]).astype(np.int32)

    def ours(self, rank):
        deal = RoundRobin(self.num_ranks, self.interleave) if self.num_ranks > 1 else Replicated()
        layout = KVLayout.uniform(SPEC, Placement.simple(deal), Paged(self.block_size))
        slots = []
        for table, (start, stop) in zip(self.tables, self.ranges, strict=True):
            binding = Binding.of(layout, {"kv": table}, {"kv": 40}, stop)
            slots.append(binding.slots("kv", np.arange(start, stop), rank))
        return np.concatenate(slots)

    def out(self):
        """Room for the batch and a few rows of padding."""
        return torch.full((int(self.starts[-1]) + 3,), -7, dtype=torch.int64)


def cpp(step):
    out = step.out()
    torch.ops._C.compute_slot_mapping_kernel_impl(
        torch.from_numpy(step.starts),
        torch.from_numpy(step.positions),
        torch.from_numpy(step.tables),
        out,
        step.block_size,
    )
    return out.numpy()


def triton_v1(kernels, step, rank):
    out = step.out()
    kernels.kernel[(len(step.tables) + 1,)](
        int(step.starts[-1]),
        len(out),
        torch.from_numpy(step.starts),
        torch.from_numpy(step.positions),
        torch.from_numpy(step.tables),
        step.tables.shape[1],
        out,
        KV_CACHE_BLOCK_SIZE=step.block_size,
        TOTAL_CP_WORLD_SIZE=step.num_ranks,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=step.interleave,
        PAD_ID=PAD_SLOT_ID,
        BLOCK_SIZE=16,
    )
    return out.numpy()


def triton_v2(kernels, step, rank):
    out, table = step.out()[None].contiguous(), torch.from_numpy(step.tables)
    kernels._compute_slot_mappings_kernel[(1, len(step.tables) + 1)](
        out.shape[1],
        torch.arange(len(step.tables), dtype=torch.int32),
        torch.from_numpy(step.starts),
        torch.from_numpy(step.positions),
        torch.tensor([table.data_ptr()], dtype=torch.uint64),
        torch.tensor([table.stride(0)]),
        torch.tensor([step.block_size], dtype=torch.int32),
        torch.tensor([True]),
        torch.tensor([True]),
        out,
        out.stride(0),
        rank,
        CP_SIZE=step.num_ranks,
        CP_INTERLEAVE=step.interleave,
        PAD_ID=PAD_SLOT_ID,
        TRITON_BLOCK_SIZE=16,
    )
    return out[0].numpy()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64])
def test_cpp_kernel_without_context_parallelism(block_size, count):
    rng = np.random.default_rng(block_size)
    for _ in range(100):
        step = Step.draw(rng, block_size, 1, 1)
        theirs = cpp(step)
        assert theirs[:-3].tolist() == step.ours(0).tolist()
        assert (theirs[-3:] == -7).all()  # unlike the Triton kernels it leaves the rest unwritten
        count("slots, C++ kernel: tokens", len(step.positions))


def grid():
    """(block size, ranks, interleave) with an interleave that divides the block size."""
    for block_size in (1, 2, 4, 6, 16):
        for num_ranks in (1, 2, 3, 4, 8):
            for interleave in (1, 2, 3, 4, 16):
                if block_size % interleave == 0:
                    yield block_size, num_ranks, interleave


@pytest.mark.parametrize("variant", [triton_v1, triton_v2])
def test_triton_kernels_with_context_parallelism(variant, kernels, count):
    rng = np.random.default_rng(3)
    for block_size, num_ranks, interleave in grid():
        step = Step.draw(rng, block_size, num_ranks, interleave)
        for rank in range(num_ranks):
            theirs = variant(kernels, step, rank)
            assert theirs[:-3].tolist() == step.ours(rank).tolist(), step
            assert (theirs[-3:] == PAD_SLOT_ID).all()
            count(f"slots, {variant.__name__}: tokens x ranks", len(step.positions))


@pytest.mark.parametrize("variant", [triton_v1, triton_v2])
def test_where_the_interleave_does_not_divide_the_block_size(variant, kernels, count):
    """vLLM refuses such an interleave: the formula of virtual blocks then leads into blocks that
    the request does not hold, or to one slot for two tokens. `RoundRobin` deals along the whole
    request."""
    step = Step(4, 2, 3, np.array([[5, 2, 9, 1]], np.int32), [(0, 16)])
    theirs, ours = [], []
    for rank in range(2):
        theirs += [(rank, s) for s in variant(kernels, step, rank)[:-3] if s >= 0]
        ours += [(rank, s) for s in step.ours(rank).tolist() if s >= 0]
    assert len(set(ours)) == len(ours) == 16
    foreign = [(rank, slot) for rank, slot in theirs if slot // 4 not in (5, 2)]
    twice = [slot for slot, n in Counter(theirs).items() if n > 1]
    if variant is triton_v1:  # positions 7 and 15, in blocks 6 and 3
        assert (foreign, twice) == ([(0, 24), (0, 12)], [])
    else:  # positions 7 and 8 in one slot, 15 in the entry behind the request's last
        assert (foreign, twice) == ([(0, 36)], [(0, 8)])
    count("slots where the interleave does not divide the block size: we differ", 16)
