"""One call on its way through: the server that is chosen, its answer, and who is told of an end.

Nothing of an answer is changed. What can be known only later may still change the server: as long
as nothing went to the client, a call whose connection failed goes to a second server, once.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec
from attrs import define, field, frozen
from starlette.types import Receive, Scope, Send

from kvflow.errors import CapacityError
from kvflow.router.front.fleet import Chained, Fleet, NoServer
from kvflow.router.front.http import Answer, Headers, ServerLost, call
from kvflow.router.front.metrics import FrontMetrics
from kvflow.router.policy import Router
from kvflow.server.errors import ApiError, as_api_error
from kvflow.server.generation import outcome_of, while_wanted
from kvflow.server.metrics import Outcome

_END = b"data: [DONE]\n\n"
SERVER_HEADER = b"x-kvflow-server"

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_NOT_ASKED = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_NOT_ANSWERED = _HOP_BY_HOP | {b"content-length", b"date", b"server"}  # uvicorn says its own


def as_front_error(error: Exception) -> ApiError:
    """What a client is told about an error of the front itself."""
    match error:
        case NoServer():
            return ApiError(503, str(error), headers={"retry-after": "1"})
        case ServerLost():
            return ApiError(502, str(error), code="server_lost")
        case CapacityError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case _:
            return as_api_error(error)


@frozen
class Job:
    """A call that was read. `path` and `headers` are the client's; `chain` names the blocks of the
    prompt of `num_tokens` tokens that the choice of a server goes by."""

    endpoint: str
    request_id: str
    path: str
    headers: Headers
    body: bytes
    chain: Chained
    num_tokens: int


@frozen
class Relay:
    """The ASGI response of one call. `arrived` and `read` are in seconds of time.monotonic."""

    fleet: Fleet
    metrics: FrontMetrics
    stopping: asyncio.Event
    job: Job
    arrived: float
    read: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; when the client goes away, the connection to its server is closed."""
        outcome: str = "aborted"
        try:
            outcome = await self._carry_out(_Reply(send), receive)
        finally:
            self.metrics.requests.add(1, self.job.endpoint, outcome)

    async def _carry_out(self, reply: "_Reply", receive: Receive) -> str:
        try:
            if not await while_wanted(self._run(reply), receive, self.stopping):
                return "aborted"
        except Exception as error:
            refusal = as_front_error(error)
            await reply.fail(refusal)
            return outcome_of(refusal)
        return _outcome(reply.status)

    async def _run(self, reply: "_Reply") -> None:
        try:
            await self._attempt(reply)
        except ServerLost:
            if reply.started:
                raise
            self.metrics.retries.add(1)
            await self._attempt(reply)

    async def _attempt(self, reply: "_Reply") -> None:
        fleet, metrics, job = self.fleet, self.metrics, self.job
        route = fleet.route(job.request_id, job.chain, job.num_tokens)
        name, router = route.decode, fleet.router
        entry = fleet.members[name].num_entered
        metrics.route.observe(time.monotonic() - self.read)
        metrics.prompt_tokens.add(job.num_tokens, name)
        metrics.hit_tokens.add(route.hit_tokens.get(name, 0), name)
        metrics.running.add(1, name)
        outcome = "aborted"
        try:
            headers = [(key, value) for key, value in job.headers if key not in _NOT_ASKED]
            timeout = fleet.config.connect_timeout_s
            address = fleet.members[name].address
            async with call(
                address, "POST", job.path, headers, job.body, connect_timeout_s=timeout
            ) as answer:
                await reply.relay(answer, name, lambda: self._began(router))
            outcome = _outcome(answer.status)
        except ServerLost as error:
            outcome = "lost"
            fleet.lost(name, entry, str(error))
            raise
        finally:
            router.ended(job.request_id)
            metrics.running.add(-1, name)
            metrics.forwarded.add(1, name, outcome)

    def _began(self, router: Router) -> None:
        router.prefilled(self.job.request_id)
        self.metrics.first_byte.observe(time.monotonic() - self.arrived)


def _outcome(status: int) -> Outcome:
    return "ok" if status < 400 else outcome_of(ApiError(status, ""))


@define(eq=False)
class _Reply:
    """What has gone to the client."""

    send: Send
    started: bool = field(default=False, init=False)
    status: int = field(default=0, init=False)
    _tail: bytes = field(default=b"", init=False)

    async def relay(self, answer: Answer, server: str, began: Callable[[], None]) -> None:
        """A stream of events as it comes; any other answer when it is whole, so that one that
        breaks off can still be had elsewhere. `began` is told of the first byte."""
        kept = [(key, value) for key, value in answer.headers if key not in _NOT_ANSWERED]
        kept.append((SERVER_HEADER, server.encode()))
        if not answer.header(b"content-type").startswith(b"text/event-stream"):
            body = await answer.body()
            began()
            kept.append((b"content-length", b"%d" % len(body)))
            await self._start(answer.status, kept)
            await self._body(body, more=False)
            return
        async for piece in answer.pieces():
            if not self.started:
                began()
                await self._start(answer.status, kept)
            await self._body(piece, more=True)
        if not self._tail.endswith(_END):
            raise ServerLost(f"{server} ended a stream without [DONE]")
        await self._body(b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """Before the first byte an error response; between two events of a stream an error event;
        within one nothing, so that the connection breaks and nobody takes the rest for whole; and
        behind the last one its end."""
        if not self.started:
            response = error.response()
            await self._start(error.status, response.raw_headers)
            await self._body(bytes(response.body), more=False)
        elif self._tail.endswith(_END):
            await self._body(b"", more=False)
        elif self._tail.endswith(b"\n\n"):
            event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
            await self._body(event + _END, more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        self._tail = (self._tail + body)[-len(_END) :]
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
