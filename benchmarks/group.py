"""Benchmarks over a group of processes: spawned ranks, joined by gloo on this host."""

import multiprocessing as mp
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

from kvflow.comm import DistComm, connect_gloo, disconnect

Work = Callable[[DistComm, Any], Any]
"""What every rank runs: its communicator and the argument -> a result that can be pickled."""

_RECEIVED = 128
"""Offset of tcpi_bytes_received (u64) in the kernel's struct tcp_info."""


def run_group(size: int, work: Work, argument: object) -> list[Any]:
    """The results of all ranks, in rank order."""
    context = mp.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(r, size, store.port, work, argument, theirs))
        for r, (_, theirs) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    results = [mine.recv() for mine, _ in pipes]
    for rank in ranks:
        rank.join()
    return results


def _rank(rank: int, size: int, port: int, work: Work, argument: object, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    comm = connect_gloo(rank, size, store)
    pipe.send(work(comm, argument))
    comm.barrier()
    disconnect()


def received_nbytes() -> int:
    """Payload bytes that the TCP sockets of this process have received, as the kernel counts."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as s:
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # no TCP socket, or the listing's own descriptor
        total += struct.unpack_from("<Q", info, _RECEIVED)[0]
    return total


def in_step(
    comm: DistComm, calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of every call in every round, from a barrier to a barrier; all ranks alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            comm.barrier()
            begin = time.perf_counter()
            call()
            comm.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds
