"""Sampling: greedy ties, the distribution that is asked for, and nothing but (seed, position)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.engine.api import InvalidRequest, SamplingParams
from kvflow.engine.finish import finish_reason
from kvflow.engine.sampling import Draws, Sampled, choose, logprobs, uniform

LOGITS = [1.5, 0.0, 2.0, -1.0, 2.0, 0.5]
# 0.999 quantile of chi-square by degrees of freedom (any table)
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def params(**changes):
    return SamplingParams(**({"max_tokens": 4} | changes))


def sample(logits, position, p):
    """One row alone."""
    token = choose(logits[None], Draws.of([(p, position)]))
    if p.num_logprobs is None:
        return Sampled(int(token), position)
    own, *said = logprobs(logits[None], token, p.num_logprobs)[0].tolist()
    top = tuple(zip(map(int, said[: p.num_logprobs]), said[p.num_logprobs :], strict=True))
    return Sampled(int(token), position, own, top)


def by_hand(logits, position, p):
    """The token, one row and one number at a time; u as numpy's Philox says."""
    scores = logits.to(torch.float64)
    if p.temperature == 0:
        return logits.tolist().index(logits.max().item())
    scores = (scores - scores.max()) / p.temperature
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    probs = torch.softmax(scores[order], 0)
    mass = torch.cumsum(probs, 0).tolist()
    kept = next((i for i, total in enumerate(mass) if total >= p.top_p), len(mass) - 1)
    philox = np.random.Philox(key=np.array([p.seed, position], np.uint64))
    u = np.random.Generator(philox).random() * mass[kept]
    return order[next((i for i, total in enumerate(mass[:kept]) if total > u), kept)]


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
    rows = []
    for i in range(draws):
        seed, position = (11, i) if by == "position" else (i, 11)
        rows.append((params(temperature=temperature, top_p=top_p, seed=seed), position))
    tokens = choose(logits.expand(draws, -1), Draws.of(rows))
    counts = dict(enumerate(tokens.bincount(minlength=len(LOGITS)).tolist()))
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


@given(st.data())
def test_rows_are_chosen_together_as_one_by_one(data):
    """Greedy and drawn rows mixed, ties included."""
    vocab = data.draw(st.integers(1, 40))
    rows = data.draw(st.integers(0, 9))
    value = st.one_of(st.sampled_from([0.0, 1.0, -3.0]), st.floats(-9, 9, width=32))
    logits = [data.draw(st.lists(value, min_size=vocab, max_size=vocab)) for _ in range(rows)]
    wishes = [
        params(
            temperature=data.draw(st.sampled_from([0, 0.3, 1.0, 4.0])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.2, 1e-9])),
            seed=data.draw(st.integers(0, 2**63 - 1)),
        )
        for _ in range(rows)
    ]
    at = [data.draw(st.integers(0, 2**40)) for _ in range(rows)]
    together = torch.tensor(logits, dtype=torch.float32).view(rows, vocab)
    got = choose(together, Draws.of(list(zip(wishes, at, strict=True)))).tolist()
    assert got == [by_hand(together[i], at[i], wishes[i]) for i in range(rows)]


def test_tokens_of_earlier_versions_are_drawn_still():
    """Golden: seeded draws of a fixed table of logits."""
    logits = torch.sin(torch.arange(64) * 0.37) * 3
    wish = params(seed=1234, temperature=0.8, top_p=0.95)
    drawn = [sample(logits, i, wish).token for i in range(12)]
    assert drawn == [5, 21, 39, 57, 5, 54, 54, 36, 39, 22, 23, 4]
    assert uniform(1, 2) == 0.30931491118583454
    assert uniform(2**63 - 1, 2**40) == 0.8413283553663722


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


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_no_token(temperature, value):
    logits = torch.tensor([LOGITS, [0.0, value, 0, 0, 9, 0], LOGITS])
    rows = [(params(temperature=temperature), i) for i in range(3)]
    tokens = choose(logits, Draws.of(rows)).tolist()
    assert tokens[1] == len(LOGITS)
    assert [tokens[0], tokens[2]] == [sample(logits[i], i, rows[i][0]).token for i in (0, 2)]


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
