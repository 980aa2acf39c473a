"""A small HTTP/1.1 client: one connection per call, bodies in pieces as they come.

A connection serves one call, so nothing is ever read from, or lost on, one that went stale, and to
end a call early is to close its connection, which is what a server aborts a generation by.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

import h11
from attrs import define, field, frozen

from kvflow.errors import KvflowError

Headers = tuple[tuple[bytes, bytes], ...]

_PIECE_NBYTES = 2**16


class ServerLost(KvflowError):  # noqa: N818
    """A server that cannot be reached, or whose connection broke before its answer was whole."""


def _without_slash(url: str) -> str:
    return url.rstrip("/")


@frozen
class Address:
    """Where a server listens: ``http://host[:port][/path]``, without a query. Raises `KvflowError`
    for anything else."""

    url: str = field(converter=_without_slash)
    host: str = field(init=False)
    port: int = field(init=False)
    path: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise KvflowError(f"server {self.url!r} is no URL: {error}") from error
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise KvflowError(f"server {self.url!r}, must be http://host[:port][/path]")
        object.__setattr__(self, "host", parts.hostname)
        object.__setattr__(self, "port", port or 80)
        object.__setattr__(self, "path", parts.path)


@define(eq=False)
class Answer:
    """The head of an answer; `pieces` yields its body once."""

    status: int
    headers: Headers
    _connection: "_Connection" = field(alias="connection")

    def header(self, name: bytes) -> bytes:
        """The value of a header by its name in lower case; empty without it."""
        return next((value for key, value in self.headers if key == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `ServerLost` if it breaks off."""
        while isinstance(event := await self._connection.next_event(), h11.Data):
            yield bytes(event.data)

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])


@define(eq=False)
class _Connection:
    address: Address
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    machine: h11.Connection = field(init=False, factory=lambda: h11.Connection(h11.CLIENT))

    async def send(self, request: h11.Request, body: bytes) -> None:
        parts = [self.machine.send(request)]
        parts += [self.machine.send(h11.Data(body))] if body else []
        self.writer.writelines([part for part in parts if part])
        self.machine.send(h11.EndOfMessage())
        with contextlib.suppress(ConnectionError):  # it may have answered before it read it all
            await self.writer.drain()

    async def next_event(self) -> h11.Event:
        ended = False
        try:
            while not isinstance(event := self.machine.next_event(), h11.Event):
                data = await self.reader.read(_PIECE_NBYTES)
                ended = not data
                self.machine.receive_data(data)
        except (OSError, h11.RemoteProtocolError) as error:
            why = (
                "closed the connection before its answer was whole" if ended else f"broke: {error}"
            )
            raise ServerLost(f"{self.address.url} {why}") from error
        if isinstance(event, h11.ConnectionClosed):
            raise ServerLost(f"{self.address.url} closed the connection without an answer")
        return event


@contextlib.asynccontextmanager
async def call(
    address: Address,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    *,
    connect_timeout_s: float = 5.0,
) -> AsyncIterator[Answer]:
    """The answer of one call; leaving the block closes its connection, read or not.

    `headers` go beside host, content-length and ``connection: close``. Raises `ServerLost` if there
    is no connection within `connect_timeout_s`, or no head of an answer comes over it; how long the
    head may take is the caller's to say, with `asyncio.timeout`.
    """
    connection = await _connect(address, connect_timeout_s)
    try:
        host = f"[{address.host}]" if ":" in address.host else address.host
        own = [
            (b"host", f"{host}:{address.port}".encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        target = address.path + path
        request = h11.Request(method=method, target=target, headers=[*own, *headers])
        await connection.send(request, body)
        while isinstance(head := await connection.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(head, h11.Response):
            raise ServerLost(f"{address.url} answered with {type(head).__name__}")
        yield Answer(head.status_code, tuple(head.headers), connection)
    finally:
        connection.writer.transport.abort()


async def _connect(address: Address, timeout_s: float) -> _Connection:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        raise ServerLost(f"{address.url} took no connection within {timeout_s} s") from None
    except OSError as error:
        raise ServerLost(f"{address.url} takes no connection: {error}") from error
    # A host that is gone says nothing: the kernel asks for it while an answer is awaited.
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return _Connection(address, reader, writer)
