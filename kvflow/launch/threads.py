"""The in-process world: every rank a thread, transfers by the in-process transport."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

from kvflow.comm.threads import ThreadComm, ThreadGroup
from kvflow.engine.deployment import Deployment
from kvflow.engine.mailbox import ThreadHub
from kvflow.engine.ranks import guarded
from kvflow.errors import KvflowError
from kvflow.launch.build import decode_rank, prefill_rank
from kvflow.launch.config import LaunchConfig
from kvflow.transfers.executors.base import Endpoint, RankCache
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.executors.plain_files import PlainFiles

_JOIN_S = 30.0  # how long all ranks together may take to end: a step under way is finished
_IDLE_S = 3600.0  # how long a rank may wait inside a collective for the others

MakeLocalEndpoint = Callable[[RankCache, LocalFabric], Endpoint]


@contextlib.asynccontextmanager
async def thread_deployment(
    config: LaunchConfig, *, make_endpoint: MakeLocalEndpoint = LocalEndpoint
) -> AsyncIterator[Deployment]:
    """A started deployment whose ranks are threads of this process; all end with the block, and
    transfers under way are recalled. Raises `KvflowError` for ranks that do not end.

    Each thread bears its rank's name and makes its endpoint with `make_endpoint(cache, fabric)`.
    """
    hub, fabric = ThreadHub(), LocalFabric()
    group = ThreadGroup(config.prefill_size, _IDLE_S)

    def run_prefill(rank: int) -> None:
        mailbox = boxes[config.prefill_names[rank]]

        def serve() -> None:
            comm = ThreadComm(group, rank)
            run, endpoint = prefill_rank(
                config, comm, mailbox, lambda cache: make_endpoint(cache, fabric)
            )
            with contextlib.closing(endpoint):
                run()

        try:
            guarded(mailbox, serve)
        finally:
            group.leave(rank, "it has ended")

    def run_decode(name: str, rank: int, members: ThreadGroup) -> None:
        mailbox = boxes[name]

        def serve() -> None:
            run, endpoint = decode_rank(
                config,
                ThreadComm(members, rank),
                mailbox,
                lambda cache: make_endpoint(cache, fabric),
            )
            with contextlib.closing(endpoint):
                run()

        try:
            guarded(mailbox, serve)
        finally:
            members.leave(rank, "it has ended")

    decode = {leader: config.decode_group(leader) for leader in config.decode_names}
    names = (*config.prefill_names, *(name for group in decode.values() for name in group))
    boxes = {name: hub.mailbox(name) for name in names}
    threads = [_thread(name, run_prefill, r) for r, name in enumerate(config.prefill_names)]
    for ranks in decode.values():
        members = ThreadGroup(len(ranks), _IDLE_S)
        threads += [_thread(name, run_decode, name, r, members) for r, name in enumerate(ranks)]
    deployment = config.deployment(hub, PlainFiles())
    try:
        await deployment.start()
        yield deployment
    finally:
        await deployment.close()
        fabric.close()
        try:
            await asyncio.to_thread(_join, threads)
        finally:
            hub.close()


def _thread(name: str, body: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=_quiet, args=(body, *args), name=name, daemon=True)
    thread.start()
    return thread


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if late := [thread.name for thread in threads if thread.is_alive()]:
        raise KvflowError(f"ranks {late} did not end within {_JOIN_S} s")


def _quiet(body: Callable[..., None], *args: object) -> None:
    """A rank's error has reached the front as a message; the thread just ends."""
    with contextlib.suppress(Exception):
        body(*args)
