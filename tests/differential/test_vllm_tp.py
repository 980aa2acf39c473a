"""Which rank reads what from whom: vLLM's `compute_tp_mapping` against the links of our plans."""

from collections import Counter
from itertools import product

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvflow.layouts import (
    CacheGroup,
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
from kvflow.transfers import plan_transfer

pytestmark = pytest.mark.peers

SIZES = (1, 2, 4, 8, 16)
BLOCK_SIZE = 16
LATENT = KVCacheSpec([Component("latent", 0, latent_record("fp8", latent_rank=8, rope_dim=4))])


def topology(tp_rank, tp_size, *, heads=1, mla=False, dcp=1):
    return TransferTopology(
        tp_rank, tp_size, BLOCK_SIZE, "here", mla, False, heads, [], dcp_size=dcp
    )


def their_mapping(tp_rank, tp_size, remote_size, *, heads=1, mla=False, dcp=1, remote_dcp=1):
    here = topology(tp_rank, tp_size, heads=heads, mla=mla, dcp=dcp)
    return compute_tp_mapping(here, remote_size, (FullAttentionSpec,), remote_dcp)


def loads(plan):
    """(tokens x heads) that each source sends."""
    sent = Counter()
    for part in plan.parts:
        width = part.heads[1] - part.heads[0]
        for rank, n in zip(part.runs.src_rank.tolist(), part.runs.count.tolist(), strict=True):
            sent[rank] += n * width
    return sent


# --- heads ----------------------------------------------------------------------------------------


def head_sharded(tp_size, heads):
    spec = KVCacheSpec(
        [Component("key", 0, Record((Field("key", "bfloat16", 8, num_heads=heads),), "h t e"))]
    )
    ranks = tuple(range(tp_size))
    return KVLayout(
        spec,
        Placement(Replicated(), (ranks,)),
        [CacheGroup("kv", spec.names, Paged(BLOCK_SIZE))],
        head_ranks=tuple((r,) for r in ranks),
    )


def shard_of(rank, tp_size, heads):
    """The first head of a rank, and how many it holds."""
    return rank * heads // tp_size, max(1, heads // tp_size)


def their_reads(tp_size, remote_size, heads):
    """{(source, target, first head, stop)} as vLLM's worker would read them."""
    reads = set()
    for rank in range(tp_size):
        mapping = their_mapping(rank, tp_size, remote_size, heads=heads)
        first, held = shard_of(rank, tp_size, heads)
        for source in mapping.source_ranks_per_group[0]:
            remote_first, remote_held = shard_of(source, remote_size, heads)
            if tp_size < remote_size:  # whole shards of the remote, one behind the other
                start = first + mapping.rank_to_attention_slot[source] * remote_held
                reads.add((source, rank, start, start + remote_held))
                assert start == remote_first
            else:  # a part of one remote shard
                start = remote_first + mapping.rank_offset_factor * held
                reads.add((source, rank, start, start + held))
                assert start == first
    return reads


def our_reads(plan):
    return {
        (source, target, *part.heads)
        for part in plan.parts
        for source, target in zip(
            part.runs.src_rank.tolist(), part.runs.dst_rank.tolist(), strict=True
        )
    }


@pytest.mark.parametrize("heads", SIZES)
def test_heads_come_from_the_ranks_that_hold_them(heads, count):
    for remote_size, tp_size in product(SIZES, SIZES):
        theirs = their_reads(tp_size, remote_size, heads)
        plan = plan_transfer(
            head_sharded(remote_size, heads), head_sharded(tp_size, heads), (0, 64)
        )
        ours = our_reads(plan)
        if remote_size <= heads:
            assert ours == theirs, (remote_size, tp_size)
            count("TP mapping of heads: (H, T, T') where all links are equal")
        else:  # the remote holds each head several times: we read from every copy, vLLM from one

            def by_shard(reads, copies=remote_size // heads):
                return {(s // copies, d, a, b) for s, d, a, b in reads}

            assert by_shard(ours) == by_shard(theirs), (remote_size, tp_size)
            busiest = max(Counter(s for s, *_ in theirs).values()) * 64
            assert max(loads(plan).values()) <= busiest
            count("TP mapping of heads: (H, T, T') where we use all replicas")


def test_tensor_parallel_sizes_that_do_not_divide(count):
    for remote_size, tp_size, heads in ((4, 6, 12), (3, 2, 6), (2, 3, 6), (6, 4, 24)):
        with pytest.raises(AssertionError, match="not divisible"):
            topology(0, tp_size, heads=heads).handshake_target_ranks(remote_size)
        plan = plan_transfer(
            head_sharded(remote_size, heads), head_sharded(tp_size, heads), (0, 64)
        )
        assert sum(loads(plan).values()) == 64 * heads
        count("TP sizes that do not divide: vLLM refuses, we plan")


# --- latent rows ----------------------------------------------------------------------------------


def latent(sharding, groups):
    return KVLayout.uniform(LATENT, Placement(sharding, groups), Paged(BLOCK_SIZE))


def replicated(size):
    return latent(Replicated(), (tuple(range(size)),))


def dealt(size, interleave):
    return latent(RoundRobin(size, interleave), tuple((r,) for r in range(size)))


def test_replicated_latent_rows(count):
    """vLLM reads all from one replica; we read an equal part from each."""
    for remote_size, tp_size in product(SIZES, SIZES):
        theirs = Counter(
            their_mapping(r, tp_size, remote_size, mla=True).all_source_ranks
            for r in range(tp_size)
        )
        assert all(len(sources) == 1 for sources in theirs)
        sent = loads(plan_transfer(replicated(remote_size), replicated(tp_size), (0, 1024)))
        assert sum(sent.values()) == 1024 * tp_size
        assert all(n == 1024 * tp_size / remote_size for n in sent.values())
        assert set(sent) == set(range(remote_size))
        assert max(sent.values()) <= max(theirs.values()) * 1024
        count("TP mapping of latent rows, both replicated: we use all replicas")


@pytest.mark.parametrize("interleave", [1, 4, BLOCK_SIZE])
def test_latent_rows_dealt_by_dcp(interleave, count):
    """Each side is all replicas or all shards, the only cases vLLM has."""
    for remote_size, tp_size, sharded in product(SIZES[1:], SIZES, (False, True)):
        if sharded and tp_size == 1:
            continue
        target = dealt(tp_size, interleave) if sharded else replicated(tp_size)
        plan = plan_transfer(dealt(remote_size, interleave), target, (0, 64 * interleave))
        readers = Counter(source for source, _ in plan.links)
        for rank in range(tp_size):
            mapping = their_mapping(
                rank,
                tp_size,
                remote_size,
                mla=True,
                dcp=tp_size if sharded else 1,
                remote_dcp=remote_size,
            )
            ours = tuple(source for source, target in plan.links if target == rank)
            assert ours == mapping.all_source_ranks, (remote_size, tp_size, rank)
            assert all(readers[source] == mapping.local_consumers for source in ours)
        count("TP mapping of latent rows, source dealt by DCP: all links and readers equal")


def test_interleaves_that_differ(count):
    """vLLM's rule looks at ranks alone, and is wrong where the two sides deal differently: it
    would read from one rank what four hold. (Its connector forces both sides to I = B first.)"""
    missed = 0
    for remote_size, tp_size, theirs_i, ours_i in product((2, 4), (2, 4), (1, 4), (1, 4)):
        if theirs_i == ours_i:
            continue
        plan = plan_transfer(dealt(remote_size, theirs_i), dealt(tp_size, ours_i), (0, 256))
        for rank in range(tp_size):
            needed = {source for source, target in plan.links if target == rank}
            named = their_mapping(
                rank, tp_size, remote_size, mla=True, dcp=tp_size, remote_dcp=remote_size
            )
            missed += not needed <= set(named.all_source_ranks)
            count("TP mapping where the interleaves differ: (W, W', I, I', rank)")
    assert missed > 0
    count("... of them where vLLM's rule misses a rank", missed)
