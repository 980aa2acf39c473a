"""A request on its way through the engines, as the front sees it."""

import asyncio
from typing import Any

from attrs import define, field

from kvflow.engine.api import Request, TokenOutput
from kvflow.engine.messages import Generated, RequestFailed
from kvflow.engine.sampling import Sampled
from kvflow.router.policy import Route


@define(eq=False)
class Live:
    """`is_admitted`: its decode engine knows it. `may_keep`: whether what is computed for it may
    become a prefix of others. `has_begun`: whether the decode engine has said a token. `report`: of
    the transfer from the engine that computed the prompt. `error`: why the decode engine gave it
    up."""

    work: Request
    route: Route
    is_admitted: bool = False
    may_keep: bool = True
    has_begun: bool = False
    report: dict[str, Any] | None = None
    error: str | None = None
    events: "asyncio.Queue[Generated | RequestFailed]" = field(factory=asyncio.Queue)


def output(
    request_id: str,
    sampled: Sampled,
    reason: Any,
    transfer: dict[str, Any] | None = None,
    cached_tokens: int = 0,
) -> TokenOutput:
    """A token as the client gets it."""
    return TokenOutput(
        request_id,
        sampled.token,
        sampled.position,
        reason,
        sampled.logprob,
        sampled.top_logprobs,
        cached_tokens=cached_tokens,
        transfer=transfer,
    )
