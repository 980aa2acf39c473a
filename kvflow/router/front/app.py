"""The routes of the front: what it answers itself, and what goes to a server."""

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

from attrs import define
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from kvflow.router.front.fleet import NO_CHAIN, Chained, Fleet
from kvflow.router.front.metrics import FrontMetrics
from kvflow.router.front.relay import Job, Relay, as_front_error
from kvflow.server.app import ServerConfig, read_body
from kvflow.server.errors import json_response
from kvflow.server.fields import read_object
from kvflow.server.generation import outcome_of
from kvflow.server.metrics import CONTENT_TYPE, exposition
from kvflow.server.models import ModelList
from kvflow.server.protocol import READERS, Endpoint, Model, check_model
from kvflow.server.routes import application
from kvflow.server.tokenizer import TextTokenizer


def make_front(
    fleet: Fleet, tokenizer: TextTokenizer, config: ServerConfig | None = None
) -> Starlette:
    """The ASGI application; it starts nothing. The fleet must be `watched` while it is served by
    `kvflow.server.serve`, and `tokenizer` be that of the servers' model."""
    stopping = asyncio.Event()
    front = _Front(fleet, tokenizer, config or ServerConfig(), fleet.metrics, stopping)
    models = ModelList(fleet.model, lambda: fleet.max_model_len)
    answers = {
        "/v1/completions": front.completions,
        "/v1/chat/completions": front.chat,
        "/v1/models": models.every,
        "/v1/models/{name:path}": models.one,
        "/health": front.health,
        "/metrics": front.show_metrics,
        "/tokenize": front.tokenize,
        "/detokenize": front.tokenize,
    }
    return application(answers, _answer_error, stopping)


def _answer_error(request: Request, error: Exception) -> Response:
    return as_front_error(error).response()


@define(eq=False)
class _Front:
    fleet: Fleet
    tokenizer: TextTokenizer
    config: ServerConfig
    metrics: FrontMetrics
    stopping: asyncio.Event

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate("completions", request)

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate("chat", request)

    async def tokenize(self, request: Request) -> ASGIApp:
        """`/tokenize` and `/detokenize`: any server answers, all have the same tokenizer."""
        return await self._relay(request, request.url.path.strip("/"), lambda body: (NO_CHAIN, 1))

    async def _generate(self, endpoint: Endpoint, request: Request) -> ASGIApp:
        return await self._relay(request, endpoint, lambda body: self._understand(endpoint, body))

    async def _relay(
        self, request: Request, endpoint: str, understand: Callable[[bytes], tuple[Chained, int]]
    ) -> ASGIApp:
        arrived = time.monotonic()
        try:
            body = await read_body(request, self.config.max_body_nbytes)
            read = time.monotonic()
            # A long prompt takes the tokenizer a while, and other streams must go on.
            chain, num_tokens = await asyncio.to_thread(understand, body)
        except ClientDisconnect:
            self.metrics.requests.add(1, endpoint, "aborted")
            return Response(status_code=400)
        except Exception as error:
            refusal = as_front_error(error)
            self.metrics.requests.add(1, endpoint, outcome_of(refusal))
            return refusal.response()
        headers = tuple(request.headers.raw)
        name, path = f"{endpoint}-{uuid4().hex}", request.url.path
        job = Job(endpoint, name, path, headers, body, chain, num_tokens)
        return Relay(self.fleet, self.metrics, self.stopping, job, arrived, read)

    def _understand(self, endpoint: Endpoint, body: bytes) -> tuple[Chained, int]:
        """The chain and the tokens of a call's longest prompt. What a server would refuse is
        refused here in the same words."""
        fleet = self.fleet
        fields = read_object(body)
        check_model(fields, fleet.model)
        model = Model(fleet.model, fleet.max_model_len, self.tokenizer, self.config.max_choices)
        call = READERS[endpoint](fields, model)
        longest = max((choice.request for choice in call.choices), key=lambda one: len(one.prompt))
        return fleet.chain(longest.prompt, longest.cache_salt), len(longest.prompt)

    async def health(self, request: Request) -> Response:
        """200 while a server is in the rotation; says of each why it is not."""
        servers = {one.name: one.trouble or "ok" for one in self.fleet.members.values()}
        well = bool(self.fleet.rotation)
        said = {"status": "ok" if well else "no server is in the rotation", "servers": servers}
        return json_response(said, 200 if well else 503)

    async def show_metrics(self, request: Request) -> Response:
        text = exposition([*self.metrics.snapshot(), *self.fleet.numbers()])
        return Response(text, media_type=CONTENT_TYPE)
