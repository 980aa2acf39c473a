"""Carrying out a call: every choice at once, for as long as the client listens."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from attrs import frozen
from starlette.types import Receive, Scope, Send

from kvflow.engine.api import EngineClient
from kvflow.server.choice import Piece, choice_pieces
from kvflow.server.errors import ApiError, as_api_error, json_response
from kvflow.server.metrics import Outcome, ServerMetrics
from kvflow.server.protocol import Call, Choice
from kvflow.server.render import ChunkRenderer, full_response
from kvflow.server.sse import EventStream
from kvflow.server.tally import Tally
from kvflow.server.tokenizer import TextTokenizer

Sink = Callable[[Piece], Awaitable[None]]


def outcome_of(error: ApiError) -> Outcome:
    """How a call that ended in `error` is counted."""
    if error.status == 429:
        return "overloaded"
    return "refused" if error.status < 500 else "error"


@frozen
class Generation:
    """The ASGI response to one call. `arrived` is in seconds of time.monotonic."""

    engine: EngineClient
    tokenizer: TextTokenizer
    metrics: ServerMetrics
    call: Call
    arrived: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop promptly when the client goes away; then every choice is aborted."""
        answer = self._stream(send) if self.call.stream else self._whole(scope, receive, send)
        outcome: Outcome = "aborted"
        try:
            outcome = await _while_connected(receive, answer) or "aborted"
        finally:
            self.metrics.requests.add(1, self.call.endpoint, outcome)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        pieces: list[list[Piece]] = [[] for _ in self.call.choices]
        tally = Tally(self.call)

        async def keep(piece: Piece) -> None:
            tally.add(piece.choice, piece.output)
            pieces[piece.choice.index].append(piece)

        try:
            await self._run(keep)
            body = full_response(self.call, self.tokenizer, tally, pieces)
        except Exception as error:
            refusal = as_api_error(error)
            await refusal.response()(scope, receive, send)
            return outcome_of(refusal)
        await json_response(body)(scope, receive, send)
        return "ok"

    async def _stream(self, send: Send) -> Outcome:
        tally = Tally(self.call)
        renderer = ChunkRenderer(self.call, self.tokenizer, tally)
        events = EventStream(send)

        async def show(piece: Piece) -> None:
            tally.add(piece.choice, piece.output)
            for chunk in renderer.chunks(piece):
                await events.event(chunk)

        outcome: Outcome = "ok"
        try:
            await self._run(show)
            if self.call.include_usage:
                await events.event(renderer.usage_chunk())
        except Exception as error:
            refusal = as_api_error(error)
            outcome = outcome_of(refusal)
            if not events.started:
                await _send_plainly(refusal, send)
                return outcome
            await events.event(refusal.body())
        await events.done()
        return outcome

    async def _run(self, sink: Sink) -> None:
        """All choices at once; the first error cancels the others and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.call.choices:
                    group.create_task(self._run_choice(choice, sink))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _run_choice(self, choice: Choice, sink: Sink) -> None:
        metrics = self.metrics
        metrics.running.add(1)
        before: float | None = None
        reason = "aborted"
        try:
            source = choice_pieces(self.engine, self.tokenizer, self.call, choice)
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    now = time.monotonic()
                    self._measure(piece, before, now)
                    before = now
                    await sink(piece)
                    reason = piece.finish_reason or reason
        finally:
            metrics.running.add(-1)
            metrics.finished.add(1, reason)

    def _measure(self, piece: Piece, before: float | None, now: float) -> None:
        metrics = self.metrics
        metrics.generated_tokens.add(1)
        if before is not None:
            metrics.itl.observe(now - before)
            return
        metrics.ttft.observe(now - self.arrived)
        metrics.prompt_tokens.add(len(piece.choice.request.prompt))
        metrics.cached_tokens.add(piece.output.cached_tokens)


async def _send_plainly(error: ApiError, send: Send) -> None:
    response = error.response()
    start = {"type": "http.response.start", "status": response.status_code}
    await send(start | {"headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """The result of `work`, or None when the client went away first and `work` was cancelled."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
