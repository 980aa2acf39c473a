"""A request on its way through the engines, as the front sees it."""

import asyncio
from typing import Any

from attrs import define, field

from kvflow.engine.api import TokenOutput
from kvflow.engine.messages import Generated, RequestFailed
from kvflow.engine.prefill.requests import Loan
from kvflow.engine.sampling import Sampled
from kvflow.router.policy import Route


@define(eq=False)
class Live:
    """`is_admitted`: its decode engine knows it. `loan`: what the decode engine takes from a
    sibling. `report`: of the transfer from the engine that computed the prompt. `error`: why the
    decode engine gave it up."""

    route: Route
    is_admitted: bool = False
    loan: Loan | None = None
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
