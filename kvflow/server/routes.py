"""The paths of the API: the same before one engine as before several servers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvflow.server.errors import ApiError

PATHS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/models/{name:path}": "GET",
    "/health": "GET",
    "/metrics": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
}
"""What every front answers, and by which method."""

Answer = Callable[[Request], Awaitable[object]]


def application(
    answers: Mapping[str, Answer],
    on_error: Callable[[Request, Exception], Response],
    stopping: asyncio.Event,
    more: Sequence[Route] = (),
) -> Starlette:
    """The ASGI application of a front that has an answer for each of `PATHS`. Its
    `state.stopping` is the event that ends the calls that still run."""
    routes = [Route(path, answers[path], methods=[method]) for path, method in PATHS.items()]
    handlers = dict.fromkeys((ApiError, HTTPException, Exception), on_error)
    app = Starlette(routes=[*routes, *more], exception_handlers=handlers)
    app.state.stopping = stopping
    return app
