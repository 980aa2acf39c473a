"""Reading a server's `/kv_events`, and noticing when anything of it was missed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from kvflow.errors import KvflowError
from kvflow.router.front.http import Address, Answer, call
from kvflow.server.events import Begin, Behind, Changed, Held, LoadSaid, Message, SnapshotEnd

Told = Held | SnapshotEnd | Changed | LoadSaid

_DECODER = msgspec.json.Decoder(Message)


class FeedBroken(KvflowError):  # noqa: N818
    """A stream of events that cannot be relied on any more; a new one begins with a snapshot."""


class NoFeed(KvflowError):  # noqa: N818
    """A server that says no KV events: it reuses no prefixes."""


@contextlib.asynccontextmanager
async def open_feed(
    address: Address, *, connect_timeout_s: float, silence_s: float
) -> AsyncIterator[tuple[Begin, AsyncIterator[Told]]]:
    """How a server names blocks, and what it says then: a whole snapshot before every change.

    The iterator raises `FeedBroken` for changes whose numbers do not follow on one another, for a
    server that says this reader is too slow, and for `silence_s` without a word. Raises `NoFeed`
    for a server without events, `ServerLost` as `call` does.
    """
    async with call(address, "GET", "/kv_events", connect_timeout_s=connect_timeout_s) as answer:
        if answer.status == 404:
            raise NoFeed(f"{address.url} says no KV events")
        if answer.status != 200:
            raise FeedBroken(f"{address.url}/kv_events answers {answer.status}")
        messages = _messages(answer, silence_s)
        begin = await anext(messages, None)
        if not isinstance(begin, Begin):
            raise FeedBroken(f"{address.url}/kv_events begins with {type(begin).__name__}")
        yield begin, _in_order(messages)


async def _messages(answer: Answer, silence_s: float) -> AsyncIterator[Message]:
    events = _events(answer)
    while True:
        try:
            async with asyncio.timeout(silence_s):
                data = await anext(events, b"[DONE]")
        except TimeoutError:
            raise FeedBroken(f"no KV event within {silence_s} s") from None
        if data == b"[DONE]":
            return
        try:
            yield _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise FeedBroken(f"a KV event that is none: {error}") from error


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    """The data of each server-sent event; comments have none."""
    waiting = bytearray()
    async for piece in answer.pieces():
        waiting += piece
        *whole, rest = bytes(waiting).split(b"\n\n") if b"\n\n" in waiting else (bytes(waiting),)
        waiting[:] = rest
        for event in whole:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")


async def _in_order(messages: AsyncIterator[Message]) -> AsyncIterator[Told]:
    seq: int | None = None
    async for message in messages:
        match message:
            case Begin():
                raise FeedBroken("a second beginning")
            case Behind(reason):
                raise FeedBroken(reason)
            case SnapshotEnd(now):
                seq = now
            case Changed(now):
                if seq is None or now != seq + 1:
                    raise FeedBroken(f"change {now} comes behind {seq}")
                seq = now
        yield message
