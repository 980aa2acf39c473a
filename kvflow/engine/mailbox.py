"""Mailboxes: how a rank and its engine's front exchange messages, in threads or processes.

A rank owns a blocking `Mailbox`. The front owns one `Hub` for all ranks, in its event loop.
"""

import asyncio
import math
import queue
import socket
import time
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio
from attrs import define, field

from kvflow.engine.curve import Curve, Guard
from kvflow.engine.link import Link
from kvflow.engine.messages import (
    FromRank,
    ToRank,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from kvflow.errors import KvflowError


class Mailbox(Protocol):
    """The rank's side. One thread receives; `send` may be called from the same thread only."""

    def receive(self, timeout: float | None) -> list[ToRank]:
        """All messages that wait; blocks up to `timeout` seconds (None: for ever) for the first."""
        ...

    def send(self, message: FromRank) -> None: ...

    def wake(self) -> None:
        """From any thread: `receive` returns at once, if with nothing; so does the next one if none
        runs."""
        ...


class Hub(Protocol):
    """The front's side: every rank by name."""

    def send(self, name: str, message: ToRank) -> None: ...

    async def receive(self) -> tuple[str, FromRank]:
        """The next message of any rank, with the rank's name. Raises `KvflowError` for bytes that
        are no message."""
        ...

    def close(self) -> None: ...


def _decoded(name: str, data: bytes) -> FromRank:
    try:
        return decode_from_rank(data)
    except msgspec.DecodeError as error:
        raise KvflowError(f"rank {name!r} sent what is no message: {error}") from error


@define(eq=False)
class ThreadHub:
    """Hub and mailboxes of ranks that are threads of this process. Messages are encoded and
    decoded as on a wire, so that both worlds carry the same values."""

    _loop: asyncio.AbstractEventLoop = field(factory=asyncio.get_running_loop)
    _inbox: "asyncio.Queue[tuple[str, bytes]]" = field(init=False, factory=asyncio.Queue)
    _boxes: dict[str, "queue.SimpleQueue[bytes]"] = field(init=False, factory=dict)

    def mailbox(self, name: str) -> "ThreadMailbox":
        """The mailbox of a new rank. Raises `KvflowError` for a name that is taken."""
        if name in self._boxes:
            raise KvflowError(f"a rank named {name!r} exists already")
        box: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._boxes[name] = box
        return ThreadMailbox(name, box, self)

    def send(self, name: str, message: ToRank) -> None:
        self._boxes[name].put(encode(message))

    def deliver(self, name: str, data: bytes) -> None:
        """Called by mailboxes, from their threads. Dropped once the front's loop is gone."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, (name, data))

    async def receive(self) -> tuple[str, FromRank]:
        name, data = await self._inbox.get()
        return name, _decoded(name, data)

    def close(self) -> None:
        self._boxes.clear()


@define(eq=False)
class ThreadMailbox:
    """A rank's end of a `ThreadHub`."""

    name: str
    _box: "queue.SimpleQueue[bytes]"
    _hub: ThreadHub

    def receive(self, timeout: float | None) -> list[ToRank]:
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._box.get(block=timeout is None or timeout > 0, timeout=timeout))
            while True:
                arrived.append(self._box.get_nowait())
        return [decode_to_rank(data) for data in arrived if data]

    def send(self, message: FromRank) -> None:
        self._hub.deliver(self.name, encode(message))

    def wake(self) -> None:
        self._box.put(b"")


@define(eq=False)
class ZmqHub:
    """ROUTER socket bound at `address`; ranks are known by their names. With `curve` only holders
    of its secret come in; without, whoever reaches the address does, so that it must be private."""

    address: str
    curve: Curve | None = None
    _context: zmq.asyncio.Context = field(init=False, factory=zmq.asyncio.Context)
    _socket: zmq.asyncio.Socket = field(init=False)
    _guard: Guard | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        if self.curve is not None:
            self._guard = self.curve.guard(self._context, self._socket)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise KvflowError(f"cannot listen at {self.address}: {error}") from error

    def send(self, name: str, message: ToRank) -> None:
        """Raises `KvflowError` if the rank is not connected."""
        self.send_bytes(name, encode(message))

    def send_bytes(self, name: str, data: bytes) -> None:
        """Raises `KvflowError` if the rank is not connected."""
        # Through the asyncio socket, never below it: a send may swallow the edge that announces a
        # message to receive, and only this socket looks again. With DONTWAIT it is done at once.
        sent = asyncio.ensure_future(
            self._socket.send_multipart([name.encode(), data], zmq.DONTWAIT)
        )
        if error := sent.exception():
            raise KvflowError(f"rank {name!r} cannot be reached: {error}") from error

    def is_connected(self, name: str) -> bool:
        """Whether the rank's connection stands. Ranks see nothing of the question."""
        try:
            self.send_bytes(name, b"")
        except KvflowError as error:
            return isinstance(error.__cause__, zmq.Again)  # a full queue is a connection too
        return True

    async def receive(self) -> tuple[str, FromRank]:
        name, data = await self.receive_bytes()
        return name, _decoded(name, data)

    async def receive_bytes(self) -> tuple[str, bytes]:
        name, data = await self._socket.recv_multipart()
        return name.decode(errors="backslashreplace"), data  # a peer may bear any name

    def close(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


@define(eq=False)
class ZmqMailbox:
    """A rank's DEALER socket, connected to a `ZmqHub`. With `curve`, the hub's, there is a `link`
    that knows how the connection fares."""

    name: str
    address: str
    curve: Curve | None = None
    link: Link | None = field(init=False, default=None)
    _context: "zmq.Context[zmq.Socket[bytes]]" = field(init=False, factory=zmq.Context)
    _socket: "zmq.Socket[bytes]" = field(init=False)
    _bell: tuple[socket.socket, socket.socket] = field(init=False, factory=socket.socketpair)
    _poller: zmq.Poller = field(init=False, factory=zmq.Poller)

    def __attrs_post_init__(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.IDENTITY, self.name.encode())
        if self.curve is not None:
            self.curve.present(self._socket)
            self.link = Link.watch(self._socket)
        self._socket.connect(self.address)
        self._poller.register(self._socket, zmq.POLLIN)
        for end in self._bell:
            end.setblocking(False)
        self._poller.register(self._bell[1].fileno(), zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[ToRank]:
        return [decode_to_rank(data) for data in self.receive_bytes(timeout)]

    def receive_bytes(self, timeout: float | None) -> list[bytes]:
        """As `receive`, undecoded. Empty frames are the hub's way to look for us."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._poller.poll(None if end is None else _milliseconds_until(end)):
            arrived, woken = [], self._rung()
            while self._socket.poll(0):
                arrived.append(self._socket.recv())
            if (messages := [data for data in arrived if data]) or woken:
                return messages
        return []

    def _rung(self) -> bool:
        """Whether somebody has called `wake` since the last call."""
        with suppress(BlockingIOError):
            return bool(self._bell[1].recv(4096))
        return False

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it was rung often enough
            self._bell[0].send(b"!")

    def send(self, message: FromRank) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)

    def close(self) -> None:
        if self.link is not None:
            self.link.end()
        self._socket.close()
        self._context.term()
        for end in self._bell:
            end.close()


def _milliseconds_until(end: float) -> int:
    return max(0, math.ceil((end - time.monotonic()) * 1000))
