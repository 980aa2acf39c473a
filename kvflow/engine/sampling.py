"""Sampling: a token is a function of (logits, parameters, seed, position) and nothing else.

Uniform numbers are drawn on the host before a step, for positions that are known by then; what is
left for the step are tensor operations that wait for nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvflow.engine.api import SamplingParams


@frozen
class Sampled:
    """A chosen token at a position, with log-probabilities if they were asked for."""

    token: int
    position: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of its own for every (seed, position): one draw of Philox4x64."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64)))
    return float(generator.random())


@frozen(eq=False)
class Draws:
    """How each row of a step's logits becomes a token. Rows not in `drawn` (int64 ``[d]``) are
    greedy; `temperature`, `top_p` and `uniforms` float64 ``[d, 1]`` are of those that are."""

    drawn: Tensor
    temperature: Tensor
    top_p: Tensor
    uniforms: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[SamplingParams, int]]) -> "Draws":
        """From the parameters of each row and the position its token will have."""
        drawn = [i for i, (params, _) in enumerate(rows) if params.temperature != 0]
        numbers = [
            (rows[i][0].temperature, rows[i][0].top_p, uniform(rows[i][0].seed, rows[i][1]))
            for i in drawn
        ]
        columns = torch.tensor(numbers, dtype=torch.float64).view(-1, 3, 1).unbind(1)
        return cls(torch.tensor(drawn, dtype=torch.int64), *columns)


def choose(logits: Tensor, draws: Draws) -> Tensor:
    """The tokens int64 ``[m]`` for `logits` ``[m, vocab]``.

    Temperature 0 takes the largest logit, the smallest id among equals. Otherwise the row's
    uniform number is inverted through the cumulative distribution over the nucleus: the smallest
    set of most likely tokens whose mass reaches `top_p` (ids break ties). A row with a NaN or an
    infinity becomes `vocab`, which is no token."""
    scores = logits.detach()
    tokens = scores.argmax(1)
    if len(draws.drawn):
        rows = scores.index_select(0, draws.drawn).to(torch.float64)
        rows = (rows - rows.amax(1, keepdim=True)) / draws.temperature
        tokens.index_copy_(0, draws.drawn, _draw(rows, draws))
    has_numbers = (scores * 0).sum(1) == 0  # NaN where one is none
    return torch.where(has_numbers, tokens, scores.shape[1])


def _draw(scores: Tensor, draws: Draws) -> Tensor:
    ordered, order = torch.sort(scores, dim=1, descending=True, stable=True)
    mass = torch.cumsum(torch.softmax(ordered, 1), 1)
    last = (mass < draws.top_p).sum(1, keepdim=True).clamp_(max=scores.shape[1] - 1)
    threshold = draws.uniforms * mass.gather(1, last)
    place = torch.minimum((mass <= threshold).sum(1, keepdim=True), last)
    return order.gather(1, place)[:, 0]


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """What the model says of `logits` ``[m, vocab]`` before temperature, float64
    ``[m, 1 + 2 * count]``: the log-probability of each row's token, the ids of the `count` most
    likely tokens (ids break ties), and their log-probabilities."""
    values = torch.log_softmax(logits.detach().to(torch.float64), 1)
    ordered, order = torch.sort(values, dim=1, descending=True, stable=True)
    chosen = values.gather(1, tokens[:, None])
    return torch.cat([chosen, order[:, :count].to(torch.float64), ordered[:, :count]], 1)
