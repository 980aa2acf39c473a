"""Verification: the distribution of what comes out, and what counts as accepted."""

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from engine_world import reference_model
from spec_world import VOCAB, layout_of, one_rank

from kvflow.engine.api import SamplingParams
from kvflow.engine.messages import StepItem
from kvflow.engine.sampling import Sampled
from kvflow.engine.spec.counters import SpecCounters
from kvflow.errors import KvflowError

PROMPT = [7, 80, 211, 9, 300, 41]
GREEDY = SamplingParams(9, temperature=0, ignore_eos=True)


def quantile(freedom):
    """About the 0.999 quantile of chi-square (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def runner_for(tokens, script=None):
    layout = layout_of(reference_model("float64", "float64").spec, 4)
    return one_rank("float64", 4, layout.num_blocks_for(tokens), script)


def table(runner, tokens):
    n = runner.memory.layout.num_blocks_for(tokens)["kv"]
    return {"kv": list(range(n))}


def exact_probs(tokens, sampling):
    """Of the token behind `tokens`, by a forward pass alone and plain numpy."""
    runner = runner_for(len(tokens))
    seen = []
    logits = runner.model.logits

    def spy(hidden):
        seen.append(logits(hidden))
        return seen[-1]

    object.__setattr__(runner, "model", Spied(runner.model, spy))
    runner.run([StepItem("x", 0, tokens, None, table(runner, len(tokens)), GREEDY)])
    scores = seen[0][-1].numpy().astype(np.float64) / sampling.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    order = np.lexsort((np.arange(VOCAB), -probs))
    kept = order[: int(np.searchsorted(np.cumsum(probs[order]), sampling.top_p)) + 1]
    nucleus = np.zeros(VOCAB)
    nucleus[kept] = probs[kept] / probs[kept].sum()
    return nucleus


class Spied:
    """A model whose logits are looked at."""

    def __init__(self, model, logits):
        self._model, self.logits = model, logits

    def __getattr__(self, name):
        return getattr(self._model, name)


def chi_square(counts, probs):
    """Tokens that are expected 5 times one by one and the rest together, and the degrees of
    freedom."""
    top = np.flatnonzero(probs * counts.sum() >= 5)
    seen = np.append(counts[top], counts.sum() - counts[top].sum())
    wanted = np.append(probs[top], max(1 - probs[top].sum(), 0)) * counts.sum()
    real = wanted > 1e-9
    assert not seen[~real].any()
    return float(((seen - wanted)[real] ** 2 / wanted[real]).sum()), int(real.sum()) - 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "draft_rank"), [(1.0, 1.0, 0), (1.0, 0.9, 1), (0.6, 1.0, 2)]
)
def test_tokens_and_acceptance_follow_the_model(temperature, top_p, draft_rank):
    """Many seeds of one request in a step, with one of the three likeliest tokens as its
    draft: the first token is distributed as the model says, the draft is accepted as often as the
    model gives it, and the token behind it is distributed as the model says behind it."""
    count, short = 400, PROMPT[:2]
    sampling = SamplingParams(9, temperature, top_p, ignore_eos=True)
    draft = []
    runner = runner_for(4 * count, lambda name, position, place: draft[0])

    def step(start, tokens, params):
        items = [
            StepItem(f"s{i}", start, tokens, None, {"kv": [i]}, params(i), num_drafts=1)
            for i in range(count)
        ]
        return runner.run(items)

    first = step(0, short, lambda seed: GREEDY)["s0"][0].token
    before = [*short, first]
    probs = exact_probs(before, sampling)
    draft.append(int(np.argsort(-probs, kind="stable")[draft_rank]))
    out = step(2, [first], lambda seed: evolve(sampling, seed=seed))
    assert runner.counters.proposed == {0: count}

    counts = np.bincount([run[0].token for run in out.values()], minlength=VOCAB)
    value, freedom = chi_square(counts, probs)
    assert value < quantile(freedom)

    accepted = sum(len(run) == 2 for run in out.values())
    assert runner.counters.accepted == {0: accepted}
    expected = count * probs[draft[0]]
    variance = max(expected * (1 - probs[draft[0]]), 1e-9)
    assert (accepted - expected) ** 2 / variance < quantile(1)
    assert accepted > 20

    behind = np.bincount([r[1].token for r in out.values() if len(r) == 2], minlength=VOCAB)
    value, freedom = chi_square(behind, exact_probs([*before, *draft], sampling))
    assert value < quantile(freedom)


def test_counters():
    counters = SpecCounters()
    assert counters.acceptance_length == 0
    for drafts, accepted in [(3, 3), (3, 0), (3, 1), (0, 0), (1, 1)]:
        counters.count(drafts, accepted)
    assert counters.proposed == {0: 4, 1: 3, 2: 3}
    assert counters.accepted == {0: 3, 1: 1, 2: 1}
    assert counters.acceptance_length == (4 + 1 + 2 + 1 + 2) / 5
    assert counters.values() == {
        "spec_steps": 5,
        "spec_emitted_tokens": 10,
        "spec_draft_tokens": 10,
        "spec_accepted_tokens": 5,
        "spec_draft_tokens.0": 4,
        "spec_draft_tokens.1": 3,
        "spec_draft_tokens.2": 3,
        "spec_accepted_tokens.0": 3,
        "spec_accepted_tokens.1": 1,
        "spec_accepted_tokens.2": 1,
    }


def test_logprobs_of_a_run():
    """Each token of an accepted run has the log-probabilities of its own row."""
    truth = {}
    runner = runner_for(20, lambda name, position, place: truth[position])
    wanted = SamplingParams(9, 0, ignore_eos=True, num_logprobs=2)
    alone = runner_for(20)
    tokens, said = list(PROMPT), []
    for start in (0, *range(len(PROMPT), len(PROMPT) + 4)):
        item = StepItem("x", start, tokens[start:], None, table(alone, 20), wanted)
        said += alone.run([item])["x"]
        tokens.append(said[-1].token)
    truth |= dict(enumerate(tokens)) | {len(PROMPT) + 3: 0}
    n = len(PROMPT)
    assert runner.run([StepItem("x", 0, PROMPT, None, table(runner, 20), wanted)])["x"] == said[:1]
    item = StepItem("x", n, tokens[n : n + 1], None, table(runner, 20), wanted, num_drafts=3)
    assert runner.run([item])["x"] == said[1:2]  # nothing is kept yet
    item = StepItem(
        "x", n + 1, tokens[n + 1 : n + 2], None, table(runner, 20), wanted, num_drafts=3
    )
    assert runner.run([item])["x"] == said[2:4]  # the second draft is wrong
    assert all(len(s.top_logprobs) == 2 and s.logprob == s.top_logprobs[0][1] for s in said)


def test_logits_that_are_no_numbers_are_an_error():
    runner = runner_for(20)
    nan = Spied(runner.model, lambda hidden: torch.full((len(hidden), VOCAB), torch.nan))
    object.__setattr__(runner, "model", nan)
    with pytest.raises(KvflowError, match="'x': the logits at position 5 are not finite"):
        runner.run([StepItem("x", 0, PROMPT, None, table(runner, 20), GREEDY)])


@pytest.mark.parametrize("seed", range(4))
def test_a_token_is_drawn_for_its_own_position(seed):
    """The uniform number is that of (seed, the token's position): the prompt's length."""
    sampling = SamplingParams(9, 2.0, 1.0, seed, ignore_eos=True)
    runner = runner_for(len(PROMPT))
    run = runner.run([StepItem("x", 0, PROMPT, None, table(runner, len(PROMPT)), sampling)])["x"]
    mass = np.cumsum(np.sort(exact_probs(PROMPT, sampling))[::-1])
    order = np.argsort(-exact_probs(PROMPT, sampling), kind="stable")
    philox = np.random.Philox(key=np.array([seed, len(PROMPT)], np.uint64))
    place = int(np.searchsorted(mass, np.random.Generator(philox).random(), side="right"))
    assert run == [Sampled(int(order[place]), len(PROMPT))]
