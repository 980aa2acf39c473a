"""What a decode step computes: one token of every running request and its drafts, and parts of
those that catch up after a preemption."""

from collections.abc import Sequence

from kvflow.engine.decode.requests import Decoding

Share = tuple[Decoding, int, int]
"""A request, how many of its tokens the step computes, and how many drafts it tries behind them."""


def form_batch(running: Sequence[Decoding], max_tokens: int, num_drafts: int) -> list[Share]:
    """The shares of a step, oldest request first, of at most `max_tokens` tokens together; the
    oldest always gets one. Drafts never go beyond what a request may still generate."""
    batch: list[Share] = []
    left = max_tokens
    for work in running:
        lacking = len(work.tokens) - work.computed
        wanted = work.admit.sampling.max_tokens - work.num_generated - 1
        drafts = 0 if work.catching_up else max(min(num_drafts, wanted, left - 1), 0)
        count = min(lacking, max(left, 0 if batch else 1))
        if count:
            batch.append((work, count, drafts))
            left -= count + drafts
    return batch
