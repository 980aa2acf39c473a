"""DTensor's redistribute against our plans, for what DTensor can express: shards of the token and
the head axis, replicas, meshes of two axes, and `_StridedShard`.

A request of T tokens is a tensor [T, H, D]. DTensor moves it between ranks that are threads of
this process; we fill the source caches with its local tensors, move them by plan, and compare with
the local tensors it ends with. What DTensor cannot say is tested at the end.
"""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import multi_threaded_pg

from kvflow.layouts import (
    Axis,
    BalancedChunks,
    Binding,
    CacheGroup,
    Component,
    Contiguous,
    Dense,
    Field,
    KVCacheSpec,
    KVLayout,
    Mesh,
    Placement,
    Record,
    Replicated,
    RoundRobin,
)
from kvflow.transfers import BoundPlan, plan_transfer
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor

HEADS, DIM = 12, 2
SPEC = KVCacheSpec(
    [Component("key", 0, Record((Field("key", "float32", DIM, num_heads=HEADS),), "t h e"))]
)


def on_ranks(num_ranks: int, body: Callable[[int], object]) -> list:
    """body(rank) on as many threads, which share a process group; the results by rank."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, results, errors = dist.HashStore(), [None] * num_ranks, []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            results[rank] = body(rank)
        except SystemExit:
            pass  # another rank has failed
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results


@frozen
class Side:
    """The same distribution in both vocabularies."""

    said: tuple
    placement: Placement
    head_ranks: tuple = ()

    def layout(self, capacity: int) -> KVLayout:
        group = CacheGroup("kv", SPEC.names, Dense(capacity))
        return KVLayout(SPEC, self.placement, [group], self.head_ranks)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def sides(num_ranks: int, length: int) -> list[Side]:
    """On a mesh of one axis. A shard of DTensor holds ceil(T/W) tokens, so that `Shard(0)` is a
    round-robin deal of one round, and `_StridedShard` one of several rounds of equal size."""
    ranks = tuple(range(num_ranks))
    found = [
        Side((Replicate(),), Placement(Replicated(), (ranks,))),
        Side((Shard(0),), Placement.simple(RoundRobin(num_ranks, ceil(length, num_ranks)))),
        Side((Shard(1),), Placement(Replicated(), (ranks,)), tuple((r,) for r in ranks)),
    ]
    for rounds in (2, 3, 6):
        interleave, rest = divmod(length, rounds * num_ranks)
        if interleave and not rest:
            deal = Placement.simple(RoundRobin(num_ranks, interleave))
            found.append(Side((_StridedShard(0, split_factor=rounds),), deal))
    return found


def mesh_sides(length: int) -> list[Side]:
    """On a mesh of 2 x 2, length a multiple of 4: rank = 2*a + b."""
    mesh = Mesh((Axis("a", 2), Axis("b", 2)))
    halves, quarters = RoundRobin(2, length // 2), RoundRobin(4, length // 4)
    everywhere = mesh.place(Replicated())
    return [
        Side((Replicate(), Replicate()), everywhere),
        Side((Replicate(), Shard(0)), mesh.place(halves, "b")),
        Side((Shard(0), Replicate()), mesh.place(halves, "a")),
        Side((Shard(0), Shard(0)), mesh.place(quarters, "a", "b")),
        Side((Shard(0), Shard(1)), mesh.place(halves, "a"), mesh.ranks_by_shard("b")),
        Side((Shard(1), Shard(0)), mesh.place(halves, "b"), mesh.ranks_by_shard("a")),
        Side((Shard(1), Replicate()), everywhere, mesh.ranks_by_shard("a")),
        Side((Replicate(), Shard(1)), everywhere, mesh.ranks_by_shard("b")),
    ]


def tensor(length: int) -> torch.Tensor:
    return torch.arange(length * HEADS * DIM, dtype=torch.float32).view(length, HEADS, DIM)


def redistributed(shape: tuple[int, ...], length: int, pairs: list[tuple[Side, Side]]) -> list:
    """For each pair of sides what each rank holds before and after: [pair][rank]."""

    def body(_: int) -> list:
        mesh = init_device_mesh("cpu", shape)
        moved = []
        for src, dst in pairs:
            before = distribute_tensor(tensor(length), mesh, src.said)
            after = before.redistribute(mesh, dst.said)
            moved.append((before.to_local().clone(), after.to_local().clone()))
        return moved

    by_rank = on_ranks(int(np.prod(shape)), body)
    return [[ranks[i] for ranks in by_rank] for i in range(len(pairs))]


def rows_of(cache: RankCache, num_tokens: int) -> torch.Tensor:
    """[tokens, heads of the rank, D], a view of the cache."""
    view = cache.pages["key.0"]
    rows = view.memory.view(torch.float32).view(view.block_size, -1, DIM)
    return rows[:num_tokens]


def check(length: int, src: Side, dst: Side, held: list) -> None:
    """Our plan takes the first of `held` to the second on every rank."""
    bindings = [
        Binding.of(side.layout(length), {"kv": [0]}, {"kv": 1}, length) for side in (src, dst)
    ]
    source, target = (
        {r: RankCache.allocate(b.layout, r, b.num_blocks, fill=0xAB) for r in b.layout.ranks}
        for b in bindings
    )
    for rank, (before, _) in enumerate(held):
        rows = rows_of(source[rank], len(before))
        assert rows.shape == before.shape, (src, rank)
        rows[:] = before
    bound = BoundPlan(plan_transfer(*(b.layout for b in bindings), (0, length)), *bindings)
    ReferenceExecutor().execute(bound, source, target)
    for rank, (_, after) in enumerate(held):
        assert torch.equal(rows_of(target[rank], len(after)), after), (src.said, dst.said, rank)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_one_axis(num_ranks):
    for length in (6 * num_ranks, 13, 1):
        every = sides(num_ranks, length)
        pairs = [(src, dst) for src in every for dst in every]
        for (src, dst), held in zip(pairs, redistributed((num_ranks,), length, pairs), strict=True):
            check(length, src, dst, held)


def test_two_axes():
    every = mesh_sides(8)
    pairs = [(src, dst) for src in every for dst in every]
    for (src, dst), held in zip(pairs, redistributed((2, 2), 8, pairs), strict=True):
        check(8, src, dst, held)


# --- what DTensor cannot say ----------------------------------------------------------------------


def held_by_dtensor(num_ranks: int, length: int, *said: object) -> list[list[list[int]]]:
    """[placement][rank]: the tokens that DTensor gives each rank, cut from a replica."""

    def body(_: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (num_ranks,))
        whole = distribute_tensor(torch.arange(length), mesh, [Replicate()])
        return [whole.redistribute(mesh, [one]).to_local().tolist() for one in said]

    by_rank = on_ranks(num_ranks, body)
    return [[ranks[i] for ranks in by_rank] for i in range(len(said))]


def hands(sharding: RoundRobin | Contiguous | BalancedChunks, length: int) -> list[list[int]]:
    owner = sharding.owner(np.arange(length))
    return [np.flatnonzero(owner == s).tolist() for s in range(sharding.num_shards)]


def test_uneven_shards_are_ceil_chunks_there_and_even_in_contiguous():
    (theirs,) = held_by_dtensor(4, 10, Shard(0))
    assert [len(h) for h in theirs] == [3, 3, 3, 1]
    assert [len(h) for h in hands(Contiguous(4, 0, 10), 10)] == [3, 3, 2, 2]
    assert theirs == hands(RoundRobin(4, 3), 10)


def test_a_strided_shard_depends_on_the_length_and_a_round_robin_does_not():
    deal = RoundRobin(2, 1)
    for length in (4, 8):
        (theirs,) = held_by_dtensor(2, length, _StridedShard(0, split_factor=length // 2))
        assert theirs == hands(deal, length)
    (fixed,) = held_by_dtensor(2, 8, _StridedShard(0, split_factor=2))
    assert fixed == hands(RoundRobin(2, 2), 8) != hands(deal, 8)


def test_a_strided_shard_with_a_tail_is_no_round_robin():
    (theirs,) = held_by_dtensor(2, 10, _StridedShard(0, split_factor=4))
    assert theirs == [[0, 1, 3, 4, 6, 7, 9], [2, 5, 8]]  # pieces of 3, each cut in 2 + 1
    assert all(theirs != hands(RoundRobin(2, i), 10) for i in range(1, 11))

    def body(_: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        strided = [_StridedShard(0, split_factor=4)]
        whole = distribute_tensor(torch.arange(10), mesh, [Replicate()])
        with pytest.raises(AssertionError):  # only redistribute can make one with a tail
            distribute_tensor(torch.arange(10), mesh, strided)
        back = whole.redistribute(mesh, strided).redistribute(mesh, [Replicate()])
        return back.to_local().tolist()

    assert on_ranks(2, body) == [list(range(10))] * 2


def test_no_placement_is_balanced_chunks():
    said = [Shard(0), *(_StridedShard(0, split_factor=k) for k in range(1, 9))]
    ours = hands(BalancedChunks(2, 0, 8), 8)
    assert ours == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert ours not in held_by_dtensor(2, 8, *said)
