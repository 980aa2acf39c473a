"""vLLM's PCP batch layout against `BalancedChunks(form="ceil")`."""

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from kvflow.layouts import BalancedChunks, Replicated

pytestmark = pytest.mark.peers

NUM_BATCHES = 600


def draw(seed):
    """P, queries, computed tokens, which requests prefill: one scheduler step."""
    rng = np.random.default_rng(seed)
    num_ranks, num_requests = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    prefill = rng.random(num_requests) < 0.7
    queries = np.where(prefill, rng.integers(1, 70, num_requests), rng.integers(1, 5, num_requests))
    computed = rng.integers(0, 1000, num_requests)
    return num_ranks, queries.astype(np.int64), computed.astype(np.int64), prefill


def vllm_layout(num_ranks, queries, computed, prefill, dcp_size=1, padded=None):
    manager = PCPManager(
        num_ranks, 0, torch.device("cpu"), shard_decode_requests=False, dcp_world_size=dcp_size
    )
    starts = np.concatenate([[0], np.cumsum(queries)])
    segments, sizes = manager._build_batch_layout(queries, computed, prefill, starts, padded)
    return manager, segments, sizes, starts


def shardings(num_ranks, queries, computed, replicated):
    """The sharding of each request's tokens of this step."""
    return [
        Replicated(c, c + q) if whole else BalancedChunks(num_ranks, c, c + q, form="ceil")
        for q, c, whole in zip(queries.tolist(), computed.tolist(), replicated, strict=True)
    ]


def hand(sharding, rank):
    """The positions a rank holds, in the order of its local indices."""
    shard = 0 if sharding.num_shards == 1 else rank
    held = int(sharding.local_len(sharding.stop, shard))
    return sharding.token(shard, np.arange(held)).tolist()


def batch_order(prefill):
    """vLLM stores the decodes of a step before its prefills."""
    return sorted(range(len(prefill)), key=lambda i: (bool(prefill[i]), i))


def rank_batch(step, rank, prefill):
    """(request, position) of each row of a rank."""
    return [(i, t) for i in batch_order(prefill) for t in hand(step[i], rank)]


@pytest.mark.parametrize("dcp", [False, True])
def test_every_rank_gets_the_same_tokens_in_the_same_order(dcp, count):
    for seed in range(NUM_BATCHES):
        num_ranks, queries, computed, prefill = draw(seed)
        manager, segments, sizes, starts = vllm_layout(
            num_ranks, queries, computed, prefill, num_ranks if dcp else 1
        )
        step = shardings(
            num_ranks, queries, computed, manager.replicated_requests(queries, prefill)
        )
        for rank in range(num_ranks):
            theirs = [
                (s.global_batch_req_idx, int(computed[s.global_batch_req_idx] + row - first))
                for s in segments[rank]
                for first in [starts[s.global_batch_req_idx]]
                for row in range(s.global_batch_slice.start, s.global_batch_slice.stop)
            ]
            assert theirs == rank_batch(step, rank, prefill), (seed, rank)
            assert sizes[rank] == len(theirs)
        count("PCP batches: tokens and order of every rank")


@pytest.mark.parametrize("dcp", [False, True])
def test_the_gathered_batch_is_restored_by_owner_and_local_index(dcp, count):
    for seed in range(NUM_BATCHES):
        num_ranks, queries, computed, prefill = draw(seed)
        padded = int(queries.sum()) if seed % 3 == 0 else None  # as a CUDA graph would pad
        manager, _, sizes, _ = vllm_layout(
            num_ranks, queries, computed, prefill, num_ranks if dcp else 1, padded
        )
        replicated = manager.replicated_requests(queries, prefill)
        step = shardings(num_ranks, queries, computed, replicated)
        pitch = padded or max(sizes)
        before = np.zeros((num_ranks, len(step)), np.int64)
        for rank in range(num_ranks):
            done = 0
            for i in batch_order(prefill):
                before[rank, i] = done
                done += len(hand(step[i], rank))
        restore = []
        for i, sharding in enumerate(step):
            t = np.arange(sharding.start, sharding.stop)
            rank = sharding.owner(t)
            restore.append(rank * pitch + before[rank, i] + sharding.local(t))
        restore = np.concatenate(restore)
        assert manager._hidden_restore_idx.tolist() == restore.tolist(), seed
        written = np.flatnonzero(manager._gathered_kv_write_mask.numpy())
        assert sorted(restore.tolist()) == written.tolist(), seed
        assert manager._padded_gather_idx.numpy()[restore].tolist() == list(range(len(restore)))
        count("PCP batches: restore index, write mask and gather index")


def test_the_even_form_is_never_less_balanced(count):
    """Where we differ on purpose: `form="even"` is the default of kvflow."""
    for num_ranks in range(1, 9):
        for q in range(1, 200):
            most = {
                form: int(
                    BalancedChunks(num_ranks, 0, q, form).local_len(q, range(num_ranks)).max()
                )
                for form in ("ceil", "even")
            }
            _, _, sizes, _ = vllm_layout(num_ranks, np.array([q]), np.array([0]), np.array([True]))
            assert max(sizes) == most["ceil"] >= most["even"] == -(-q // num_ranks)
            count("PCP chunk sizes: vLLM's ceil against our even form")
            count(
                "... of them with a fuller fullest rank in the ceil form",
                most["ceil"] > most["even"],
            )
