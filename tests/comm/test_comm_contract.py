"""One contract for every Comm: run on one rank, on threads and on spawned processes."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import forks
import pytest
import torch
from torch.distributed import TCPStore

from kvflow.comm import (
    Background,
    Comm,
    Inline,
    Lane,
    LocalComm,
    PeerError,
    connect_gloo,
    disconnect,
    run_ranks,
)
from kvflow.comm.dist import padded_is_quicker

DTYPES = [
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
]


def tagged(rank: int, num: int, dtype: torch.dtype, row: tuple[int, ...]) -> torch.Tensor:
    """Rows that say where they come from: small integers, exact in every dtype."""
    first = torch.arange(num).view(num, *(1 for _ in row))
    return ((rank * 3 + first) % 8).expand(num, *row).to(dtype)


def same(got: torch.Tensor, parts: list[torch.Tensor]) -> None:
    want = torch.cat([p.to(torch.float64) for p in parts])
    assert got.shape == want.shape
    assert got.dtype == parts[0].dtype
    assert torch.equal(got.to(torch.float64), want)


def check_gathers(comm: Comm) -> None:
    patterns = [
        [2] * comm.size,
        [0] * comm.size,
        [(r * 5) % 7 for r in range(comm.size)],
        [9 if r == comm.size - 1 else 0 for r in range(comm.size)],
    ]
    for dtype in DTYPES:
        for row in ((), (3,), (2, 5)):
            for counts in patterns:
                rows = tagged(comm.rank, counts[comm.rank], dtype, row)
                got = comm.all_gather(rows, counts)
                same(got, [tagged(r, n, dtype, row) for r, n in enumerate(counts)])


def check_large_gathers(comm: Comm) -> None:
    for counts in ([40] * comm.size, [40 - r for r in range(comm.size)]):
        rows = tagged(comm.rank, counts[comm.rank], torch.float64, (2000,))
        got = comm.all_gather(rows, counts)
        same(got, [tagged(r, n, torch.float64, (2000,)) for r, n in enumerate(counts)])


def check_exchanges(comm: Comm) -> None:
    def sends(source: int, target: int) -> int:
        return (source * 2 + target * 3) % 4

    def row_block(source: int, target: int, dtype: torch.dtype) -> torch.Tensor:
        return tagged(source + target, sends(source, target), dtype, (3,))

    for dtype in DTYPES:
        counts = [sends(comm.rank, r) for r in range(comm.size)]
        rows = torch.cat([row_block(comm.rank, r, dtype) for r in range(comm.size)])
        got, received = comm.all_to_all(rows, counts)
        assert received == [sends(r, comm.rank) for r in range(comm.size)]
        same(got, [row_block(r, comm.rank, dtype) for r in range(comm.size)])
    nothing, received = comm.all_to_all(torch.empty(0, 4), [0] * comm.size)
    assert nothing.shape == (0, 4)
    assert received == [0] * comm.size


def check_known_exchanges(comm: Comm) -> None:
    """Where all ranks know what they will receive, split sizes are not exchanged."""
    counts = [(comm.rank + 2 * r) % 3 for r in range(comm.size)]
    received = [(r + 2 * comm.rank) % 3 for r in range(comm.size)]
    parts = [tagged(comm.rank + r, n, torch.uint8, (3,)) for r, n in enumerate(counts)]
    got, arrived = comm.all_to_all(torch.cat(parts), counts, received)
    assert arrived == received
    same(got, [tagged(r + comm.rank, n, torch.uint8, (3,)) for r, n in enumerate(received)])


def check_channels(comm: Comm) -> None:
    """Calls of a channel meet each other, not those of the group they run beside."""
    lanes: list[Lane] = [Background(comm.channel()), Background(comm.channel()), Inline(comm)]
    rows = torch.full((comm.rank + 1, 2), comm.rank)
    counts = [r + 1 for r in range(comm.size)]
    pending = [
        (i, j, lane.issue(lambda c, i=i, j=j: c.all_gather(rows + 10 * i + 100 * j, counts)))
        for j in range(3)
        for i, lane in enumerate(lanes)
    ]
    parts = [torch.full((r + 1, 2), r) for r in range(comm.size)]
    for i, j, one in reversed(pending):
        got, times = one.wait()
        same(got, [p + 10 * i + 100 * j for p in parts])
        assert times.issued <= times.began <= times.ended
        assert times.waited_from <= times.waited_until


def check_results_are_copies(comm: Comm) -> None:
    rows = torch.zeros(2, 3)
    gathered = comm.all_gather(rows, [2] * comm.size)
    exchanged, _ = comm.all_to_all(gathered[: comm.size], [1] * comm.size)
    rows.fill_(7)
    gathered.fill_(8)
    comm.barrier()
    assert not exchanged.any()
    assert not rows.eq(8).any()


def check_refusals(comm: Comm) -> None:
    """Input that this rank alone can see is wrong raises before anything is sent."""
    with pytest.raises(RuntimeError, match=r"rank \d+ has 1 rows, counts say 2"):
        comm.all_gather(torch.zeros(1), [2] * comm.size)
    with pytest.raises(RuntimeError, match="one per rank"):
        comm.all_gather(torch.zeros(1), [1] * (comm.size + 1))
    with pytest.raises(RuntimeError, match="add up to"):
        comm.all_to_all(torch.zeros(comm.size + 1), [1] * comm.size)


def contract(comm: Comm) -> int:
    assert 0 <= comm.rank < comm.size
    check_gathers(comm)
    check_large_gathers(comm)
    check_exchanges(comm)
    check_known_exchanges(comm)
    check_channels(comm)
    check_results_are_copies(comm)
    check_refusals(comm)
    comm.barrier()
    return comm.rank


def test_local() -> None:
    assert contract(LocalComm()) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_threads(size: int) -> None:
    assert run_ranks(size, contract) == list(range(size))


def _process(rank: int, size: int, port: int, body: Callable[[Comm], Any]) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    comm = connect_gloo(rank, size, store)
    assert (comm.rank, comm.size) == (rank, size)
    body(comm)
    disconnect()


@pytest.mark.processes
@pytest.mark.parametrize("size", [3])
def test_processes(size: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, size + 1, is_master=True, wait_for_workers=False)
    forks.run(_process, (size, port, contract), size)
    del store


def test_how_rows_are_gathered_follows_their_volume() -> None:
    assert padded_is_quicker([40] * 3, 16000)
    assert padded_is_quicker([40, 39, 38], 16000)
    assert not padded_is_quicker([40] * 3, 16)
    assert not padded_is_quicker([90, 0, 0], 16000)


def test_a_job_that_raises_raises_where_it_is_waited_for() -> None:
    def fail(comm: Comm) -> None:
        raise ValueError("no rows")

    for lane in (Background(LocalComm()), Inline(LocalComm())):
        pending = lane.issue(fail)
        with pytest.raises(ValueError, match="no rows"):
            pending.wait()
        assert lane.issue(lambda comm: comm.rank).wait()[0] == 0


def test_a_rank_that_has_gone_ends_the_meetings_of_channels_too() -> None:
    def body(comm: Comm) -> None:
        lane = Background(comm.channel())
        if comm.rank == 1:
            return
        with pytest.raises(PeerError, match="rank 1 will not come"):
            lane.issue(lambda c: c.barrier()).wait()

    run_ranks(2, body)


def test_ranks_that_expect_other_rows_are_told() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(RuntimeError, match=r"expects \[1, 2\] rows, its peers send \[1, 1\]"):
            comm.all_to_all(torch.zeros(2, 1), [1, 1], [1, 2])

    run_ranks(2, body)


def test_the_thread_of_a_lane_has_ended_when_its_lane_has() -> None:
    before = set(threading.enumerate())
    lane = Background(LocalComm())
    pending = lane.issue(lambda comm: time.sleep(0.2))
    (thread,) = set(threading.enumerate()) - before
    del lane
    assert not thread.is_alive()
    assert pending.wait()[0] is None
