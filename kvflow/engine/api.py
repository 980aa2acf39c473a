"""What an engine looks like from outside: the values and the protocol every front end speaks.

A front end turns its clients' wishes into `Request` values, iterates what
`EngineClient.generate` yields and closes the iterator when nobody listens any more. It knows
nothing else of an engine, and an engine knows nothing of HTTP or text.
"""

import contextlib
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any, Literal, Protocol, SupportsIndex

from attrs import field, frozen

from kvflow.errors import CapacityError, KvflowError

MAX_LOGPROBS = 20
SEED_BOUND = 2**63
TOKEN_BOUND = 2**31

_TEXT = "string that UTF-8 can carry"

FinishReason = Literal["stop", "length"]


class InvalidRequest(KvflowError, ValueError):  # noqa: N818
    """A request that breaks a rule; `param` names the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(CapacityError):  # noqa: N818
    """The engine takes no further request now; the same request may succeed later."""


class Unavailable(KvflowError):  # noqa: N818
    """The engine has lost a part of itself or is closed, and serves nobody any more."""


def _require(holds: bool, param: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidRequest(param, f"{param} is {_shown(value)}, but must be {rule}")


def _shown(value: object) -> str:
    """Python refuses to write out ints of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


# Converters turn what stands for a number or a text, numpy's too, into Python's own, which every
# wire carries. They leave all else as it is, for the checks that know the field's name.


def _int(value: SupportsIndex) -> int:
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    return value  # type: ignore[return-value]


def _optional_int(value: SupportsIndex | None) -> int | None:
    return None if value is None else _int(value)


def _float(value: float) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return value


def _text(value: str) -> str:
    return str.__str__(value) if isinstance(value, str) else value


def _optional_text(value: str | None) -> str | None:
    return None if value is None else _text(value)


def _ints(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        items: tuple[Any, ...] = tuple(values)
    except TypeError:
        return values  # type: ignore[return-value]
    return items if _all_plain(items) else tuple(map(_int, items))


def _all_plain(values: tuple[Any, ...]) -> bool:
    """No Python code runs per value: prompts are long."""
    return set(map(type, values)) <= {int}


def _check_tokens(param: str, values: object) -> None:
    _require(isinstance(values, tuple), param, values, "several token ids")
    tokens: tuple[int, ...] = values  # type: ignore[assignment]
    if not _all_plain(tokens) or (tokens and not 0 <= min(tokens) <= max(tokens) < TOKEN_BOUND):
        for i, token in enumerate(tokens):
            if not _is_int(token, 0, TOKEN_BOUND - 1):
                what = f"{param}[{i}] is {_shown(token)} ({type(token).__name__})"
                raise InvalidRequest(param, f"{what}, but must be a token id, an int in [0, 2**31)")


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: object) -> bool:
    """Whether UTF-8 can carry it: lone surrogates cannot be."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
        return True
    except UnicodeEncodeError:
        return False


@frozen
class SamplingParams:
    """How to choose tokens and when to end; a wrong value raises `InvalidRequest`.

    max_tokens: at most this many tokens are generated, at least 1.
    temperature: divides the logits; 0 means greedy, and then top_p and seed say nothing.
    top_p: nucleus mass in (0, 1].
    seed: in [0, 2**63); randomness is a function of (seed, position) alone.
    stop_token_ids: each of them ends the request, also under ignore_eos.
    ignore_eos: the model's own end-of-sequence ids do not end the request.
    num_logprobs: None for no logprobs; k in [0, 20] for the chosen token's and the k best.
    """

    max_tokens: int = field(converter=_int)
    temperature: float = field(default=1.0, converter=_float)
    top_p: float = field(default=1.0, converter=_float)
    seed: int = field(default=0, converter=_int)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ints)
    ignore_eos: bool = False
    num_logprobs: int | None = field(default=None, converter=_optional_int)

    def __attrs_post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        _require(_is_int(self.max_tokens, 1, 2**62), "max_tokens", self.max_tokens, "an int >= 1")
        _require(
            _is_finite(temperature) and temperature >= 0,
            "temperature",
            temperature,
            "finite and >= 0",
        )
        _require(_is_finite(top_p) and 0 < top_p <= 1, "top_p", top_p, "in (0, 1]")
        _require(_is_int(self.seed, 0, SEED_BOUND - 1), "seed", self.seed, "an int in [0, 2**63)")
        _check_tokens("stop_token_ids", self.stop_token_ids)
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "a bool")
        if self.num_logprobs is not None:
            rule = f"None or an int in [0, {MAX_LOGPROBS}]"
            _require(
                _is_int(self.num_logprobs, 0, MAX_LOGPROBS), "logprobs", self.num_logprobs, rule
            )


@frozen
class Request:
    """One sequence to continue; a wrong value raises `InvalidRequest`.

    request_id: unique among the requests that live in the engine at the same time.
    prompt: token ids, at least one.
    cache_salt: requests share cached prefixes only with those of the same salt (a tenant).
    """

    request_id: str = field(converter=_text)
    prompt: tuple[int, ...] = field(converter=_ints)
    sampling: SamplingParams
    cache_salt: str | None = field(default=None, converter=_optional_text)

    def __attrs_post_init__(self) -> None:
        name, salt, sampling = self.request_id, self.cache_salt, self.sampling
        _require(_is_text(name) and name != "", "request_id", name, f"a non-empty {_TEXT}")
        _check_tokens("prompt", self.prompt)
        _require(len(self.prompt) >= 1, "prompt", self.prompt, "at least one token id")
        _require(isinstance(sampling, SamplingParams), "sampling", sampling, "SamplingParams")
        _require(salt is None or _is_text(salt), "cache_salt", salt, f"None or a {_TEXT}")


@frozen
class TokenOutput:
    """One generated token of one request, in order of position.

    position: index of the token in its request; the first one is at len(prompt).
    finish_reason: None, except in the last output: "stop" (this token is an end-of-sequence or
        stop token) or "length" (max_tokens reached).
    logprob: natural log of the token's probability, when logprobs were asked for.
    top_logprobs: (token id, logprob) of the most likely tokens, best first.
    cached_tokens: prompt tokens reused from a prefix cache; meaningful in the first output.
    transfer: the report of the KV transfer, in the first output that knows it, for instance
        {"nbytes": ..., "num_descriptors": ..., "num_links": ..., "plan_digest": ...,
        "verified": True}. JSON values only.
    """

    request_id: str
    token: int
    position: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0
    transfer: Mapping[str, Any] | None = None


@frozen
class Sample:
    """One measured value. `suffix` is "" or, in a histogram, "_bucket", "_sum" or "_count"."""

    value: float
    labels: Mapping[str, str] = field(factory=dict)
    suffix: str = ""


def _samples(values: Iterable[Sample]) -> tuple[Sample, ...]:
    return tuple(values)


@frozen
class Metric:
    """One family of samples under one name, as Prometheus understands it."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    samples: tuple[Sample, ...] = field(converter=_samples)


class EngineClient(Protocol):
    """An engine, whole, from outside. All calls are made from one event loop.

    An engine that reuses prefixes may also say what its caches hold: it then has `kv_events`, the
    one method of `kvflow.server.events.SaysKVEvents`. Without it a server has no `/kv_events`."""

    @property
    def max_model_len(self) -> int:
        """The most positions one request may have: prompt tokens + max_tokens."""
        ...

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """Yield the request's tokens as they come; an async generator function fits.

        The last output carries a finish_reason. Closing the generator early, or cancelling the
        task that iterates it, aborts the request and frees what it holds on every side.

        Raises, from the first step on: `Overloaded` when the engine is full, `InvalidRequest`
        when the request breaks a rule of this engine, `Unavailable` when a rank is lost, other
        `KvflowError` when the request failed.
        """
        ...

    def metrics(self) -> Sequence[Metric]:
        """A snapshot of the engine's own metrics."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine can serve a request now."""
        ...
