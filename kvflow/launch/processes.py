"""The real world: every rank a process, gloo between prefill ranks, NIXL for KV.

The control plane is one ROUTER socket on an ipc path in a private directory. A rank whose parent
is gone ends itself; a rank that dies makes the deployment unhealthy. Ranks are forked from Python's
fork server, which has imported what they run and nothing else has happened in: there is no NIXL
agent, no socket and no other rank's memory in it.
"""

import asyncio
import contextlib
import gc
import multiprocessing as mp
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from attrs import frozen
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvflow.comm import Comm
from kvflow.comm.dist import connect_gloo, disconnect
from kvflow.comm.local import LocalComm
from kvflow.engine.deployment import Deployment
from kvflow.engine.mailbox import ZmqHub, ZmqMailbox
from kvflow.engine.prefill.rank import guarded
from kvflow.engine.tiers.unitfile import FileMover
from kvflow.errors import KvflowError, TransferError
from kvflow.launch.build import decode_rank, prefill_rank
from kvflow.launch.checks import check_launch
from kvflow.launch.config import LaunchConfig
from kvflow.transfers.executors.base import RankCache, TwoWayEndpoint

_JOIN_S = 3.0
COLLECTIVE_TIMEOUT_S = 600.0
IDLE_S = 30 * 86400.0  # ranks of a decode group wait for its leader's next turn in a collective


@contextlib.asynccontextmanager
async def process_deployment(
    config: LaunchConfig, *, start_timeout: float = 120.0
) -> AsyncIterator[Deployment]:
    """A started deployment of processes. Leaving the block ends every one of them within
    seconds, whatever it was doing, and removes the sockets' directory; Python's fork server stays
    until this process ends. Raises `TransferError` without NIXL, what `check_launch` raises, and
    `KvflowError` if a rank cannot start."""
    check_launch(config)
    require_nixl()
    context, key = await asyncio.to_thread(_context), secrets.token_bytes(32)
    num_ranks = len(config.prefill_names) + config.decode_ranks * config.decode_size
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    with tempfile.TemporaryDirectory(prefix="kvflow-") as directory:
        address = f"ipc://{Path(directory) / 'front'}"
        hub = ZmqHub(address)
        groups = [(_prefill_main, ranks) for ranks in config.prefill_groups.values()]
        groups += [(_decode_main, config.decode_group(name)) for name in config.decode_names]
        stores = [_store() for _ in groups]
        processes: dict[str, BaseProcess] = {}
        for (target, names), store in zip(groups, stores, strict=True):
            for rank, name in enumerate(names):
                start = _Start(
                    config, name, address, key, threads, rank, store.port, dict(os.environ)
                )
                processes[name] = context.Process(target=target, args=(start,), name=name)
        deployment = config.deployment(hub, files_of(config))
        watcher: asyncio.Task[None] | None = None
        try:
            for process in processes.values():
                process.start()
            await _start_or_die(deployment, processes, start_timeout)
            watcher = asyncio.create_task(_watch(deployment, processes))
            yield deployment
        finally:
            if watcher is not None:
                watcher.cancel()
            await deployment.close()
            await asyncio.to_thread(_end, list(processes.values()))
            hub.close()


def _context() -> SpawnContext | ForkServerContext:
    """How ranks are started: from the fork server, if a process from there comes to this kvflow.
    Otherwise every rank is spawned and imports for itself: the server listens in the directory for
    temporary files, whose path may be too long for a socket or which may be gone, and it looks for
    modules in the working directory first. Waits for the server's imports."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    probe = context.Process(target=_probe, args=(__file__,))
    try:
        probe.start()
        probe.join()
    except (OSError, EOFError):
        return mp.get_context("spawn")
    return mp.get_context("spawn") if probe.exitcode else context


def _probe(file: str) -> None:
    if file != __file__:
        sys.exit(1)


def _store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def require_nixl() -> None:
    from kvflow.transfers.executors.nixl_agent import load_nixl, settle_environment

    settle_environment()
    try:
        load_nixl()
    except TransferError as error:
        raise TransferError(
            f"{error}, or run every rank as a thread of one process: --transport in-process"
        ) from error


def files_of(config: LaunchConfig) -> FileMover | None:
    """What moves the files of a disk tier, if there is one."""
    from kvflow.transfers.executors.nixl_files import NixlFiles

    return NixlFiles() if config.prefix.disk_directory is not None else None


async def _start_or_die(
    deployment: Deployment, processes: dict[str, BaseProcess], timeout: float
) -> None:
    """Starts the deployment, but gives up as soon as a process is gone."""
    start = asyncio.create_task(deployment.start(timeout))
    try:
        while not start.done():
            await asyncio.wait([start], timeout=0.2)
            for name, process in processes.items():
                if not start.done() and process.exitcode is not None:
                    await asyncio.wait([start], timeout=0.5)  # its own words may be under way
                    if not start.done():
                        raise KvflowError(f"rank {name!r} ended with code {process.exitcode}")
        await start
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


async def _watch(deployment: Deployment, processes: dict[str, BaseProcess]) -> None:
    while True:
        await asyncio.sleep(0.2)
        for name, process in processes.items():
            if process.exitcode is not None:
                deployment.fail(f"rank {name!r} ended with code {process.exitcode}")
                return


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            process.join(_JOIN_S / len(processes))
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()
            process.close()


# --- what runs in a rank's process


@frozen
class _Start:
    """What a rank is told. `environment` is its parent's: the fork server may be older. Standard
    output and error, limits and affinity are the server's."""

    config: LaunchConfig
    name: str
    address: str
    key: bytes
    threads: int
    rank: int
    port: int
    environment: Mapping[str, str]


def _enter(start: _Start) -> ZmqMailbox:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when ranks end
    from kvflow.transfers.executors.nixl import settle_environment

    gc.freeze()  # what the imports made lives to the end; walking it there takes seconds
    os.environ.clear()
    os.environ.update(start.environment)
    settle_environment()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(start.threads)
    parent = mp.parent_process()

    def follow_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    return ZmqMailbox(start.name, start.address)


def nixl_endpoint(key: bytes, config: LaunchConfig, cache: RankCache) -> TwoWayEndpoint:
    from kvflow.transfers.executors.nixl import NixlEndpoint

    return NixlEndpoint(cache, key, costs=config.costs())


@contextlib.contextmanager
def _group(rank: int, size: int, port: int, timeout_s: float) -> Iterator[Comm]:
    """The ranks of an engine or a decode group; one alone needs no gloo."""
    if size == 1:
        yield LocalComm()
        return
    store = TCPStore("127.0.0.1", port, is_master=False)
    yield connect_gloo(rank, size, store, timeout_s=timeout_s)
    disconnect()


def _prefill_main(start: _Start) -> None:
    mailbox, config = _enter(start), start.config

    def serve() -> None:
        with _group(start.rank, config.prefill_size, start.port, COLLECTIVE_TIMEOUT_S) as comm:
            make = partial(nixl_endpoint, start.key, config)
            run, endpoint = prefill_rank(config, comm, mailbox, make)
            with contextlib.closing(endpoint):
                run()

    guarded(mailbox, serve)
    mailbox.close()


def _decode_main(start: _Start) -> None:
    mailbox, config = _enter(start), start.config

    def serve() -> None:
        with _group(start.rank, config.decode_size, start.port, IDLE_S) as comm:
            make = partial(nixl_endpoint, start.key, config)
            run, endpoint = decode_rank(config, comm, mailbox, make)
            with contextlib.closing(endpoint):
                run()

    guarded(mailbox, serve)
    mailbox.close()
