"""Sampling: a token is a function of (logits, parameters, seed, position) and nothing else."""

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


def sample(logits: Tensor, position: int, params: SamplingParams) -> Sampled:
    """Chooses the token at `position` from `logits` [vocab].

    Temperature 0 takes the largest logit, the smallest id among equals. Otherwise one uniform
    draw, counter-based on (seed, position), is inverted through the cumulative distribution over
    the nucleus: the smallest set of most likely tokens whose mass reaches `top_p` (ids break ties).
    """
    scores = logits.detach().to(torch.float64)
    if params.temperature == 0:
        token = int(torch.nonzero(scores == scores.max())[0])
    else:
        token = _draw(
            (scores - scores.max()) / params.temperature, params.top_p, params.seed, position
        )
    if params.num_logprobs is None:
        return Sampled(token, position)
    logprobs = torch.log_softmax(scores, dim=-1)
    best = torch.sort(logprobs, descending=True, stable=True).indices[: params.num_logprobs]
    top = tuple((int(i), float(logprobs[i])) for i in best)
    return Sampled(token, position, float(logprobs[token]), top)


def _draw(scores: Tensor, top_p: float, seed: int, position: int) -> int:
    order = torch.sort(scores, descending=True, stable=True).indices
    probs = torch.softmax(scores[order], dim=-1)
    mass = torch.cumsum(probs, dim=-1)
    kept = int((mass < top_p).sum()) + 1
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64)))
    u = float(generator.random()) * float(mass[: min(kept, len(mass))][-1])
    return int(order[min(int((mass <= u).sum()), kept - 1, len(mass) - 1)])
