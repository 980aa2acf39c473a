"""What is kept between steps, and which requests can draft from it."""

import pytest
import torch
from spec_world import one_rank

from kvflow.engine.api import SamplingParams
from kvflow.engine.messages import StepItem
from kvflow.engine.spec.kept import Kept, KeptStates
from kvflow.models.config import ConfigError

GREEDY = SamplingParams(8, 0, ignore_eos=True)


def item(start, tokens=(5,), sampling=GREEDY, num_drafts=2):
    return StepItem("a", start, list(tokens), None, {"kv": [0]}, sampling, num_drafts=num_drafts)


def test_drafts_need_the_state_before_one_newest_token_at_the_same_home():
    states = KeptStates()
    assert not states.can_draft(item(10), (0,))
    states.keep("a", Kept((0,), 7, 3, torch.arange(3.0)[:, None]))
    for start in (8, 9, 10):  # whatever part of the last step's run was taken
        assert states.can_draft(item(start), (0,))
        assert states.before(item(start)).tolist() == [[start - 8.0]]
    assert not states.can_draft(item(7), (0,))
    assert not states.can_draft(item(11), (0,))
    assert not states.can_draft(item(10), (1,))
    assert not states.can_draft(item(10), (0, 1))
    assert not states.can_draft(item(10, (5, 6)), (0,))
    assert not states.can_draft(item(10, sampling=None), (0,))
    states.forget("a")
    states.forget("a")
    assert not states.can_draft(item(10), (0,))
    assert len(states) == 0


def test_states_are_kept_for_those_who_ask_and_as_long_as_they_stay():
    states = KeptStates()
    assert not states.wanted(item(3, num_drafts=0))
    assert states.wanted(item(3))
    assert not states.wanted(item(3, sampling=None))
    states.keep("a", Kept((0,), 3, 1, None))
    assert states.wanted(item(4, num_drafts=0))


def runner_over(num_tokens):
    return one_rank("float64", 4, {"kv": num_tokens // 4})


def step(runner, start, tokens, num_drafts, name="a"):
    blocks = {"kv": list(range(runner.memory.cache.pages["latent.0"].num_slots // 4))}
    one = StepItem(name, start, tokens, None, blocks, GREEDY, num_drafts=num_drafts)
    plan = runner.plan([one])
    return plan.items[0].num_drafts, [s.token for s in runner.run([one])[name]]


def test_the_first_step_tries_none_and_so_does_the_first_after_leaving():
    runner = runner_over(32)
    tried, run = step(runner, 0, [5, 6, 7], 2)
    assert tried == 0
    tried, run = step(runner, 3, run[-1:], 2)
    assert tried == 2
    tried, run = step(runner, 3 + len(run), run[-1:], 0)
    assert tried == 0
    runner.forget("a")
    tried, run = step(runner, 3, [9], 2)
    assert tried == 0


def test_prefill_keeps_nothing():
    runner = runner_over(32)
    step(runner, 0, [5, 6, 7], 0)
    assert len(runner._kept) == 0


def test_a_model_without_an_mtp_layer_tries_none():
    runner = runner_over(32)
    runner.model = WithoutMtp(runner.model)
    _, run = step(runner, 0, [5, 6, 7], 2)
    tried, run = step(runner, 3, run[-1:], 2)
    assert tried == 0


class WithoutMtp:
    """The same model as far as drafts are concerned."""

    mtp = None

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ConfigError, match=r"span 0\.\.320, must lie in \[0, vocab_size = 320\)"):
        step(runner_over(32), 0, [5, 320], 0)
