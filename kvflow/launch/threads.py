"""The in-process world: every rank a thread, transfers by the in-process transport."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

from kvflow.comm.threads import ThreadComm, ThreadGroup
from kvflow.engine.deployment import Deployment
from kvflow.engine.mailbox import ThreadHub
from kvflow.engine.prefill.rank import guarded
from kvflow.errors import KvflowError
from kvflow.launch.build import MakeRank, decode_rank, prefill_rank
from kvflow.launch.checks import check_launch
from kvflow.launch.config import LaunchConfig
from kvflow.transfers.executors.base import RankCache, TwoWayEndpoint
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.executors.plain_files import PlainFiles

_JOIN_S = 30.0  # how long all ranks together may take to end: a step under way is finished
_IDLE_S = 3600.0  # how long a rank may wait inside a collective for the others

MakeLocalEndpoint = Callable[[RankCache, LocalFabric], TwoWayEndpoint]


@contextlib.asynccontextmanager
async def thread_deployment(
    config: LaunchConfig, *, make_endpoint: MakeLocalEndpoint = LocalEndpoint
) -> AsyncIterator[Deployment]:
    """A started deployment whose ranks are threads of this process; all end with the block, and
    transfers under way are recalled. Raises `KvflowError` for ranks that do not end.

    Each thread bears its rank's name and makes its endpoint with `make_endpoint(cache, fabric)`.
    Before the first one starts, `check_launch` raises what it has against `config`.
    """
    check_launch(config)
    hub, fabric = ThreadHub(), LocalFabric()
    groups = [(prefill_rank, names) for names in config.prefill_groups.values()]
    groups += [(decode_rank, config.decode_group(leader)) for leader in config.decode_names]
    boxes = {name: hub.mailbox(name) for _, names in groups for name in names}

    def run_rank(make_rank: MakeRank, name: str, rank: int, group: ThreadGroup) -> None:
        def serve() -> None:
            run, endpoint = make_rank(
                config,
                ThreadComm(group, rank),
                boxes[name],
                lambda cache: make_endpoint(cache, fabric),
            )
            with contextlib.closing(endpoint):
                run()

        try:
            guarded(boxes[name], serve)
        finally:
            group.leave(rank, "it has ended")

    threads: list[threading.Thread] = []
    for make_rank, names in groups:
        group = ThreadGroup(len(names), _IDLE_S)
        threads += [_thread(n, run_rank, make_rank, n, r, group) for r, n in enumerate(names)]
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
