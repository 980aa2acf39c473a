"""Running the application inside an asyncio program, on a real socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from attrs import frozen
from starlette.types import ASGIApp

_GRACE_S = 1


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


def _listen(host: str, port: int) -> socket.socket:
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
    app: ASGIApp, host: str = "127.0.0.1", port: int = 8000, *, keep_alive_s: int = 75
) -> AsyncIterator[RunningServer]:
    """Serve `app` for as long as the block runs; port 0 takes a free one.

    Leaving the block lets running calls finish for a second, then cancels them, and returns
    within two. Raises OSError when the address cannot be bound. Signals are the caller's.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        yield RunningServer(host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await running
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks, timeout=_GRACE_S / 2)
        listener.close()
