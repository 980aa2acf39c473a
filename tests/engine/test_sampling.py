"""Sampling: greedy ties, the distribution that is asked for, and nothing but (seed, position)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.engine.api import InvalidRequest, SamplingParams
from kvflow.engine.finish import finish_reason
from kvflow.engine.sampling import sample

LOGITS = [1.5, 0.0, 2.0, -1.0, 2.0, 0.5]
# 0.999 quantile of chi-square by degrees of freedom (any table)
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def params(**changes):
    return SamplingParams(**({"max_tokens": 4} | changes))


def nucleus(temperature, top_p):
    """Probabilities by id, the slow way: take the likeliest until their mass reaches top_p."""
    weights = [math.exp(x / temperature) for x in LOGITS]
    probs = [w / sum(weights) for w in weights]
    kept, mass = {}, 0.0
    for token in sorted(range(len(probs)), key=lambda i: (-probs[i], i)):
        if mass >= top_p:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return {token: p / mass for token, p in kept.items()}


@given(st.lists(st.sampled_from([-1.0, 0.0, 2.5]), min_size=1, max_size=12), st.integers(0, 1000))
def test_greedy_takes_the_smallest_id_among_equals(logits, position):
    got = sample(torch.tensor(logits), position, params(temperature=0, seed=9))
    assert got.token == logits.index(max(logits))
    assert got.position == position


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.3)])
def test_draws_follow_the_distribution(temperature, top_p, by):
    """Chi-square over 4000 draws at other positions, or with other seeds."""
    draws, logits = 4000, torch.tensor(LOGITS)
    counts = dict.fromkeys(range(len(LOGITS)), 0)
    for i in range(draws):
        seed, position = (11, i) if by == "position" else (i, 11)
        p = params(temperature=temperature, top_p=top_p, seed=seed)
        counts[sample(logits, position, p).token] += 1
    expected = nucleus(temperature, top_p)
    assert {t for t, n in counts.items() if n} <= set(expected)
    if len(expected) > 1:
        chi = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
        assert chi < CHI_SQUARE[len(expected) - 1]


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40))
def test_a_draw_is_a_function_of_seed_and_position(seed, position):
    p, logits = params(seed=seed), torch.linspace(0, 1, 50)
    first = sample(logits, position, p)
    np.random.seed(3)
    torch.manual_seed(3)
    assert sample(logits, position, p) == first
    assert sample(logits.to(torch.float64), position, p).token == first.token


def test_other_seeds_and_positions_draw_otherwise():
    logits = torch.zeros(1000)
    by_seed = {sample(logits, 5, params(seed=s)).token for s in range(64)}
    by_position = {sample(logits, i, params(seed=5)).token for i in range(64)}
    assert len(by_seed) > 50
    assert len(by_position) > 50
    swapped = [(sample(logits, i, params(seed=j)).token) for i, j in ((1, 2), (2, 1))]
    assert swapped[0] != swapped[1]


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-12])
def test_a_vanishing_temperature_is_greedy(temperature):
    got = {
        sample(torch.tensor([0.5, 3.0, 1.0]), i, params(temperature=temperature)).token
        for i in range(20)
    }
    assert got == {1}


def test_extreme_parameters_draw_a_real_token():
    for temperature, top_p in ((1e300, 1.0), (1.0, 5e-324), (1.0, 1.0)):
        for logits in ([0.0], [-1e30, 0.0, -1e30], [3e38, -3e38]):
            got = sample(torch.tensor(logits), 3, params(temperature=temperature, top_p=top_p))
            assert 0 <= got.token < len(logits)
    tiny = sample(torch.tensor(LOGITS), 3, params(top_p=5e-324))
    assert tiny.token == 2  # the likeliest alone, the smaller id of two


def test_logprobs_are_of_the_model_and_best_first():
    got = sample(torch.tensor(LOGITS), 3, params(temperature=0.7, seed=4, num_logprobs=3))
    total = math.log(sum(math.exp(x) for x in LOGITS))
    assert got.logprob == pytest.approx(LOGITS[got.token] - total)
    assert [t for t, _ in got.top_logprobs] == [2, 4, 0]  # equal ones by id
    for token, logprob in got.top_logprobs:
        assert logprob == pytest.approx(LOGITS[token] - total)
    assert sample(torch.tensor(LOGITS), 3, params(num_logprobs=0)).top_logprobs == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**63),
        ("stop_token_ids", (-1,)),
        ("num_logprobs", 21),
    ],
)
def test_unlawful_parameters_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as caught:
        params(**{field: value})
    assert caught.value.param == ("logprobs" if field == "num_logprobs" else field)


@pytest.mark.parametrize(
    ("token", "count", "changes", "reason"),
    [
        (1, 1, {}, "stop"),
        (1, 1, {"ignore_eos": True}, None),
        (1, 4, {"ignore_eos": True}, "length"),
        (7, 1, {"stop_token_ids": [7], "ignore_eos": True}, "stop"),
        (7, 4, {"stop_token_ids": [7]}, "stop"),  # a stop wins over the length
        (5, 3, {}, None),
        (5, 4, {}, "length"),
    ],
)
def test_finish_reasons(token, count, changes, reason):
    assert finish_reason(token, count, params(**changes), frozenset([1])) == reason
