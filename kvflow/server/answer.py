"""The two ways to answer a call: one JSON object at the end, or events as pieces come."""

from typing import Protocol

from attrs import define, field
from starlette.types import Send

from kvflow.server.choice import Piece
from kvflow.server.errors import ApiError, json_response
from kvflow.server.protocol import Call
from kvflow.server.render import ChunkRenderer, full_response
from kvflow.server.sse import EventStream
from kvflow.server.tally import Tally
from kvflow.server.tokenizer import TextTokenizer


class Answer(Protocol):
    """Takes every piece of every choice, then exactly one of finish and fail."""

    async def show(self, piece: Piece) -> None:
        """Take the next piece of a choice; choices interleave."""
        ...

    async def finish(self) -> None:
        """Every choice has ended."""
        ...

    async def fail(self, error: ApiError) -> None:
        """The call has failed; pieces may have been shown before."""
        ...


@define(eq=False)
class WholeAnswer:
    """Keeps the pieces and answers at the end."""

    call: Call
    tokenizer: TextTokenizer
    send: Send
    _tally: Tally = field(init=False)
    _pieces: list[list[Piece]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tally = Tally(self.call)
        self._pieces = [[] for _ in self.call.choices]

    async def show(self, piece: Piece) -> None:
        """Keep it."""
        self._tally.add(piece.choice, piece.output)
        self._pieces[piece.choice.index].append(piece)

    async def finish(self) -> None:
        """Send the whole response."""
        body = full_response(self.call, self.tokenizer, self._tally, self._pieces)
        await _send_json(self.send, 200, body, {})

    async def fail(self, error: ApiError) -> None:
        """Send the error instead."""
        await _send_json(self.send, error.status, error.body(), error.headers)


@define(eq=False)
class StreamedAnswer:
    """Sends chunks as pieces come."""

    call: Call
    tokenizer: TextTokenizer
    send: Send
    _renderer: ChunkRenderer = field(init=False)
    _events: EventStream = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._renderer = ChunkRenderer(self.call, self.tokenizer, Tally(self.call))
        self._events = EventStream(self.send)

    async def show(self, piece: Piece) -> None:
        """Send what the piece shows; waits while the client reads too slowly."""
        self._renderer.tally.add(piece.choice, piece.output)
        for chunk in self._renderer.chunks(piece):
            await self._events.event(chunk)

    async def finish(self) -> None:
        """Send usage when asked for, and the end mark."""
        if self.call.include_usage:
            await self._events.event(self._renderer.usage_chunk())
        await self._events.done()

    async def fail(self, error: ApiError) -> None:
        """Before the first event a plain error response, afterwards an error event."""
        if not self._events.started:
            await _send_json(self.send, error.status, error.body(), error.headers)
            return
        await self._events.event(error.body())
        await self._events.done()


async def _send_json(send: Send, status: int, body: object, headers: dict[str, str]) -> None:
    response = json_response(body, status, headers)
    start = {"type": "http.response.start", "status": status, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.body})
