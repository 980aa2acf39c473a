"""Running the application inside an asyncio program, on a real socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from attrs import frozen
from starlette.applications import Starlette

_GRACE_S = 0.8  # for running calls to finish by themselves
_FORCE_S = 1  # from then on tasks are cancelled; whole seconds, as uvicorn wants


@frozen
class RunningServer:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base address, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the program around, which also has engines to stop.
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: the address is ours, and a conflict shows, before
    anything expensive is started. Raises OSError when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.asynccontextmanager
async def serve(
    app: Starlette,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    bound: socket.socket | None = None,
    keep_alive_s: int = 75,
) -> AsyncIterator[RunningServer]:
    """Serve `app` for as long as the block runs; port 0 takes a free one. A socket from `bind`
    stands for host and port, and is closed at the end.

    Leaving the block takes no more calls, lets those that run finish for 0.8 s, then ends them
    with 503, and returns within two seconds. `app` comes from `make_app`; signals are the
    caller's. Raises OSError when the address cannot be bound.
    """
    listener = bound or bind(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=_FORCE_S,
    )
    server = _Server(config)
    app.state.stopping.clear()
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        yield RunningServer(host, listener.getsockname()[1])
    finally:
        await _stop(server, running, app.state.stopping)
        listener.close()


async def _stop(server: _Server, running: asyncio.Task[None], stopping: asyncio.Event) -> None:
    server.should_exit = True
    await asyncio.wait({running}, timeout=_GRACE_S)
    stopping.set()
    await running
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_FORCE_S / 2)
