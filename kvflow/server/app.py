"""The routes: an ASGI application over one engine and its tokenizer."""

import asyncio
import time

from attrs import define, evolve, frozen
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvflow.engine.api import EngineClient
from kvflow.server.errors import ApiError, as_api_error, json_response
from kvflow.server.events import EventFeed, log_metrics, log_of
from kvflow.server.fields import Fields, is_int, read_object, refuse
from kvflow.server.generation import Generation, outcome_of
from kvflow.server.metrics import CONTENT_TYPE, ServerMetrics, exposition
from kvflow.server.models import ModelList
from kvflow.server.protocol import (
    READERS,
    Endpoint,
    Model,
    chat_text,
    check_model,
)
from kvflow.server.routes import application
from kvflow.server.tokenizer import TextTokenizer

REPORT_HEADER = "x-kvflow-report"


@frozen
class ServerConfig:
    """Limits of the front. A body of token ids needs about 8 bytes per prompt token."""

    max_body_nbytes: int = 32 * 2**20
    max_choices: int = 128


def make_app(
    engine: EngineClient, tokenizer: TextTokenizer, config: ServerConfig | None = None
) -> Starlette:
    """The ASGI application; it starts nothing and owns neither engine nor tokenizer.

    Its `state.stopping` is an asyncio.Event that `serve` sets to end the calls that still run.
    """
    config = config or ServerConfig()
    model = Model(engine.model_name, engine.max_model_len, tokenizer, config.max_choices)
    stopping = asyncio.Event()
    front = _Front(engine, model, config, ServerMetrics(), stopping)
    models = ModelList(model.name, lambda: model.max_model_len)
    answers = {
        "/v1/completions": front.completions,
        "/v1/chat/completions": front.chat,
        "/v1/models": models.every,
        "/v1/models/{name:path}": models.one,
        "/health": front.health,
        "/metrics": front.show_metrics,
        "/tokenize": front.tokenize,
        "/detokenize": front.detokenize,
    }
    return application(
        answers, _answer_error, stopping, [Route("/kv_events", front.kv_events, methods=["GET"])]
    )


def _answer_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or 413 when it has more than `limit` bytes.

    Of a body that is too large as much again is read and dropped: most clients read no answer
    before they have sent everything, and find a closed connection instead.
    """
    body = bytearray()
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes <= limit:
            body += piece
        elif num_bytes > 2 * limit:
            break
    if num_bytes <= limit:
        return bytes(body)
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() else num_bytes
    message = f"the body has {size} bytes or more, but at most {limit} are read"
    raise ApiError(413, message, headers={"connection": "close"})


@define(eq=False)
class _Front:
    engine: EngineClient
    model: Model
    config: ServerConfig
    own_metrics: ServerMetrics
    stopping: asyncio.Event

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate("completions", request)

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate("chat", request)

    async def _generate(self, endpoint: Endpoint, request: Request) -> ASGIApp:
        arrived = time.monotonic()
        try:
            fields = await self._fields(request)
            # A long prompt takes the tokenizer a while, and other streams must go on.
            call = await asyncio.to_thread(READERS[endpoint], fields, self.model)
        except ClientDisconnect:
            self.own_metrics.requests.add(1, endpoint, "aborted")
            return Response(status_code=400)
        except Exception as error:
            refusal = as_api_error(error)
            self.own_metrics.requests.add(1, endpoint, outcome_of(refusal))
            return refusal.response()
        if request.headers.get(REPORT_HEADER, "").lower() in ("1", "true"):
            call = evolve(call, wants_report=True)
        return Generation(
            self.engine, self.model.tokenizer, self.own_metrics, self.stopping, call, arrived
        )

    async def _fields(self, request: Request) -> Fields:
        body = await read_body(request, self.config.max_body_nbytes)
        fields = await asyncio.to_thread(read_object, body)
        check_model(fields, self.model.name)
        return fields

    async def health(self, request: Request) -> Response:
        if not await self.engine.healthy():
            raise ApiError(503, "the engine cannot serve now")
        return json_response({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        log = log_of(self.engine)
        said = log_metrics(log) if log is not None else []
        text = exposition([*self.own_metrics.snapshot(), *said, *self.engine.metrics()])
        return Response(text, media_type=CONTENT_TYPE)

    async def kv_events(self, request: Request) -> ASGIApp:
        log = log_of(self.engine)
        if log is None:
            raise ApiError(404, "this engine says no KV events: it reuses no prefixes")
        return EventFeed(log, self.model.name, self.stopping)

    async def tokenize(self, request: Request) -> Response:
        fields = await self._fields(request)
        tokens = await asyncio.to_thread(_tokenize, fields, self.model.tokenizer)
        counts = {"count": len(tokens), "max_model_len": self.model.max_model_len}
        return json_response(counts | {"tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        fields = await self._fields(request)
        tokens = fields.get("tokens")
        if not isinstance(tokens, list) or not all(map(is_int, tokens)):
            raise refuse("tokens", tokens, "a list of token ids")
        size = self.model.tokenizer.vocab_size
        if (unknown := next((t for t in tokens if not 0 <= t < size), None)) is not None:
            raise refuse("tokens", unknown, f"ids in [0, {size})")
        text = self.model.tokenizer.decode(tokens, skip_special=False)
        return json_response({"prompt": text})


def _tokenize(fields: Fields, tokenizer: TextTokenizer) -> tuple[int, ...]:
    if fields.get("messages") is not None:
        special = fields.boolean("add_special_tokens", False)
        return tokenizer.encode(chat_text(fields, tokenizer), add_special_tokens=special)
    prompt = fields.string("prompt")
    if prompt is None:
        raise refuse("prompt", prompt, "a string, unless messages is given")
    special = fields.boolean("add_special_tokens", True)
    return tokenizer.encode(prompt, add_special_tokens=special)
