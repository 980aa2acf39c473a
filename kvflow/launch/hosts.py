"""A deployment whose ranks other programs start, on this host or others: `kvflow.launch.node`.

The front listens at one TCP address, admits ranks that hold its key, and starts none itself.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from attrs import frozen

from kvflow.engine.curve import Curve
from kvflow.engine.deployment import Deployment
from kvflow.engine.mailbox import ZmqHub
from kvflow.errors import KvflowError, LayoutError
from kvflow.launch.checks import check_launch
from kvflow.launch.config import LaunchConfig
from kvflow.launch.interfaces import interface_of
from kvflow.launch.joining import facts_of, gather_ranks
from kvflow.launch.processes import files_of, require_nixl
from kvflow.transfers.executors.seal import check_key

_LOOK_S = 0.5
_END_S = 5.0


@contextlib.asynccontextmanager
async def joined_deployment(
    config: LaunchConfig, address: str, key: bytes, *, start_timeout: float = 600.0
) -> AsyncIterator[Deployment]:
    """A started deployment of ranks that join at `address`, ``tcp://<IPv4 of this host>:<port>``,
    and hold `key`, 16 bytes or more. Leaving the block ends them all. A rank that is lost makes the
    deployment unhealthy. Raises `KvflowError` for an address that cannot be listened at and for
    ranks that are missing or fail within `start_timeout` seconds, `LayoutError` for a tier that
    ranks of other hosts cannot reach, and what `check_launch` raises."""
    check_launch(config)
    if config.transport != "nixl":
        raise LayoutError(f"transport = {config.transport!r}, must be 'nixl' between hosts")
    require_nixl()
    host = front_host(address)
    names = [name for ranks in engine_ranks(config).values() for name in ranks]
    hub = ZmqHub(address, Curve(check_key(key)))
    try:
        check = _TierCheck(config, host)
        hosts = await gather_ranks(hub, names, facts_of(config), start_timeout, check)
        deployment = config.deployment(hub, files_of(config), engine_hosts(config, hosts), host)
        watcher: asyncio.Task[None] | None = None
        try:
            await _start(deployment, hub, names, start_timeout)
            watcher = asyncio.create_task(_watch(deployment, hub, names))
            yield deployment
        finally:
            if watcher is not None:
                watcher.cancel()
            await deployment.close()
            await _let_go(hub, names)
    finally:
        hub.close()


def engine_ranks(config: LaunchConfig) -> dict[str, tuple[str, ...]]:
    """The ranks of every engine, in rank order, by the engine's name."""
    decode = {leader: config.decode_group(leader) for leader in config.decode_names}
    return config.prefill_groups | decode


def engine_hosts(config: LaunchConfig, hosts: Mapping[str, str]) -> dict[str, str]:
    """The host of every engine, of `hosts` by rank; of one that spans several, all of them."""
    ranks = engine_ranks(config)
    return {name: ", ".join(sorted({hosts[r] for r in each})) for name, each in ranks.items()}


def read_key(path: Path) -> bytes:
    """The secret that a file holds. Raises `KvflowError` if it cannot be read or is too short."""
    try:
        return check_key(path.read_bytes())
    except OSError as error:
        raise KvflowError(f"key file {str(path)!r} cannot be read: {error}") from error


def front_host(address: str) -> str:
    """The host of ``tcp://<IPv4 of this host>:<port>``. Raises `KvflowError` for another form, the
    wildcard 0.0.0.0, and an address that no interface here bears."""
    form = re.fullmatch(r"tcp://(\d+\.\d+\.\d+\.\d+):(\d+)", address)
    if form is None or not 0 < int(form[2]) < 65536:
        raise KvflowError(f"address {address!r}, must be tcp://<IPv4 of this host>:<port>")
    interface_of(form[1])
    return form[1]


@frozen
class _TierCheck:
    """A host tier is memory of the front's host; prefill ranks write and read it themselves."""

    config: LaunchConfig
    host: str

    def __call__(self, hosts: Mapping[str, str]) -> None:
        nbytes = self.config.prefix.host_nbytes
        away = {name: hosts[name] for name in self.config.prefill_names if hosts[name] != self.host}
        if nbytes and away:
            raise LayoutError(
                f"a host tier of {nbytes} bytes lies on the front's host {self.host}: every "
                f"prefill rank must run there, not {away}"
            )


async def _start(deployment: Deployment, hub: ZmqHub, names: list[str], timeout: float) -> None:
    """Starts the deployment, but gives up as soon as a rank is lost."""
    start = asyncio.create_task(deployment.start(timeout))
    while not start.done():
        await asyncio.wait([start], timeout=_LOOK_S)
        lost = [name for name in names if not hub.is_connected(name)]
        if lost and not start.done():
            await asyncio.wait([start], timeout=_LOOK_S)  # its own words may be under way
            if not start.done():
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
                raise KvflowError(f"ranks {lost} are lost")
    await start


async def _watch(deployment: Deployment, hub: ZmqHub, names: list[str]) -> None:
    while not (lost := [name for name in names if not hub.is_connected(name)]):
        await asyncio.sleep(_LOOK_S)
    deployment.fail(f"ranks {lost} are lost")


async def _let_go(hub: ZmqHub, names: list[str]) -> None:
    """Waits a while for the ranks to end, so that none sees its front go first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while any(hub.is_connected(name) for name in names):
                await asyncio.sleep(0.05)
