"""Carrying out a call: every choice at once, for as long as somebody wants the answer."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from attrs import frozen
from starlette.types import Receive, Scope, Send

from kvflow.engine.api import EngineClient
from kvflow.server.answer import Answer, StreamedAnswer, WholeAnswer
from kvflow.server.choice import Piece, choice_pieces
from kvflow.server.errors import ApiError, as_api_error
from kvflow.server.metrics import Outcome, ServerMetrics
from kvflow.server.protocol import Call, Choice
from kvflow.server.tokenizer import TextTokenizer


def outcome_of(error: ApiError) -> Outcome:
    """How a call that ended in `error` is counted."""
    if error.status == 429:
        return "overloaded"
    return "refused" if error.status < 500 else "error"


@frozen
class Generation:
    """The ASGI response to one call.

    stopping: set when the server stops; then the call ends with 503.
    arrived: in seconds of time.monotonic.
    """

    engine: EngineClient
    tokenizer: TextTokenizer
    metrics: ServerMetrics
    stopping: asyncio.Event
    call: Call
    arrived: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop promptly when the client goes away; then every choice is aborted."""
        make = StreamedAnswer if self.call.stream else WholeAnswer
        outcome: Outcome = "aborted"
        try:
            outcome = await self._carry_out(make(self.call, self.tokenizer, send), receive)
        finally:
            self.metrics.requests.add(1, self.call.endpoint, outcome)

    async def _carry_out(self, answer: Answer, receive: Receive) -> Outcome:
        try:
            if not await while_wanted(self._run(answer), receive, self.stopping):
                return "aborted"
            await answer.finish()
        except Exception as error:
            refusal = as_api_error(error)
            await answer.fail(refusal)
            return outcome_of(refusal)
        return "ok"

    async def _run(self, answer: Answer) -> None:
        """All choices at once; the first error cancels the others and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self.call.choices:
                    group.create_task(self._run_choice(choice, answer))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _run_choice(self, choice: Choice, answer: Answer) -> None:
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
                    await answer.show(piece)
                    reason = piece.finish_reason or reason
        except Exception:
            reason = "failed"
            raise
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


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def while_wanted(
    work: Coroutine[Any, Any, None], receive: Receive, stopping: asyncio.Event
) -> bool:
    """Run `work`; False when the client went away first, `ApiError` when the server stops.

    In both cases `work` is cancelled and has ended when this returns.
    """
    worker = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    stopped = asyncio.ensure_future(stopping.wait())
    tasks = (worker, left, stopped)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            return True
        if left.done():
            return False
        raise ApiError(503, "the server is stopping")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
