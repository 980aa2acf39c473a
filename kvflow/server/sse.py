"""Server-sent events over ASGI, begun only when there is something to say.

Until the first event the status line is not sent, so that a call which fails before its first
token still gets its own status (429, 400).
"""

import asyncio

import msgspec
from attrs import define, field
from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@define(eq=False)
class EventStream:
    """One response. Events may be sent by several tasks; each goes out whole."""

    send: Send
    started: bool = field(default=False, init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def event(self, value: object) -> None:
        """Send `value` as one JSON event; waits while the client reads too slowly."""
        await self._write(msgspec.json.encode(value), more=True)

    async def done(self) -> None:
        """Send OpenAI's end mark and end the response."""
        await self._write(b"[DONE]", more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        async with self._lock:
            if not self.started:
                self.started = True
                start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                await self.send(start)
            body = b"data: " + data + b"\n\n"
            await self.send({"type": "http.response.body", "body": body, "more_body": more})
