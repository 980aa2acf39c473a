"""When a request ends: one rule for the first token and for all others."""

from kvflow.engine.api import FinishReason, SamplingParams


def finish_reason(
    token: int, num_generated: int, params: SamplingParams, eos_ids: frozenset[int]
) -> FinishReason | None:
    """Why a request ends with `token` as its `num_generated`-th, or None if it goes on."""
    if token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos):
        return "stop"
    return "length" if num_generated >= params.max_tokens else None
