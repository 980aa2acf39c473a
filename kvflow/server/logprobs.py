"""Log probabilities in the two forms of OpenAI's endpoints."""

from collections.abc import Sequence
from typing import Any

from kvflow.engine.api import TokenOutput
from kvflow.server.tokenizer import TextTokenizer

_LEAST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


def _token_text(tokenizer: TextTokenizer, token: int) -> str:
    return tokenizer.bytes_of(token).decode("utf-8", errors="replace")


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None else max(logprob, _LEAST)


def completion_logprobs(
    tokenizer: TextTokenizer, outputs: Sequence[TokenOutput], offset: int
) -> dict[str, Any]:
    """`logprobs` of `/v1/completions`: parallel lists. `offset` is the first token's, in text."""
    tokens = [_token_text(tokenizer, output.token) for output in outputs]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(output.logprob) for output in outputs],
        "top_logprobs": [_top(tokenizer, output) for output in outputs],
        "text_offset": offsets,
    }


def _top(tokenizer: TextTokenizer, output: TokenOutput) -> dict[str, float]:
    best: dict[str, float] = {}
    for token, logprob in [*output.top_logprobs, (output.token, _finite(output.logprob))]:
        best.setdefault(_token_text(tokenizer, token), _finite(logprob))
    return best


def chat_logprobs(tokenizer: TextTokenizer, outputs: Sequence[TokenOutput]) -> dict[str, Any]:
    """`logprobs` of `/v1/chat/completions`: one object per token."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": _token_text(tokenizer, token),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.bytes_of(token)),
        }

    return {
        "content": [
            entry(output.token, output.logprob)
            | {"top_logprobs": [entry(token, value) for token, value in output.top_logprobs]}
            for output in outputs
        ]
    }
