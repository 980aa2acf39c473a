"""Requests hold what every wire can carry, or are refused by the name of the field."""

import numpy as np
import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st

from kvflow.engine.api import InvalidRequest, Request, SamplingParams
from kvflow.engine.messages import Admit, Source, decode_to_rank, encode

PLAIN = SamplingParams(4)
INT_KINDS = (int, np.int64, np.int32, np.uint32)
FLOAT_KINDS = (float, np.float64, np.float32, np.float16)

numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none()
anything = numbers | st.text(max_size=3) | st.just(10**5000) | st.just(np.True_) | st.just(b"x")
texts = st.text(st.characters(codec=None), max_size=3)  # lone surrogates among them


def ints(low, high):
    return st.builds(lambda kind, n: kind(n), st.sampled_from(INT_KINDS), st.integers(low, high))


def floats(low, high):
    one = st.floats(low, high, width=16)
    return st.builds(lambda kind, x: kind(x), st.sampled_from(FLOAT_KINDS), one)


lawful = st.builds(
    SamplingParams,
    ints(1, 99),
    floats(0, 2) | st.integers(0, 10**300),
    floats(0.125, 1),
    ints(0, 99),
    st.lists(ints(0, 99), max_size=3) | st.just(np.arange(3)),
    st.booleans(),
    st.none() | ints(0, 20),
)
unchecked = st.fixed_dictionaries(
    {"max_tokens": anything},
    optional={
        "temperature": anything,
        "top_p": anything,
        "seed": anything,
        "stop_token_ids": st.lists(anything, max_size=2) | anything,
        "ignore_eos": anything,
        "num_logprobs": anything,
    },
)


def assert_travels(request):
    """The rank gets an equal request, of Python's own types."""
    prompt, sampling = list(request.prompt), request.sampling
    source = Source("prefill-0", {}, 0, len(prompt), "d")
    salt = request.cache_salt
    sent = Admit(request.request_id, prompt, 1, sampling, source, len(prompt), salt)
    got = decode_to_rank(encode(sent))
    assert got == sent
    assert got.salt == salt
    assert {type(token) for token in (*got.prompt, *request.prompt)} == {int}
    for f in fields(SamplingParams):
        assert type(getattr(got.sampling, f.name)) is type(getattr(sampling, f.name))


@given(lawful, st.lists(ints(0, 2**31 - 1), min_size=1, max_size=4))
def test_numbers_of_all_kinds_become_pythons_own(sampling, prompt):
    request = Request(np.str_("name"), prompt, sampling, np.str_("salt"))
    assert type(request.request_id) is type(request.cache_salt) is str
    assert request.prompt == tuple(int(token) for token in prompt)
    assert_travels(request)


@given(unchecked, texts, st.lists(anything, max_size=3) | anything, texts | anything)
def test_what_is_not_refused_travels(sampling, name, prompt, salt):
    try:
        request = Request(name, prompt, SamplingParams(**sampling), salt)
    except InvalidRequest as error:
        refused = error
    else:
        assert_travels(request)
        return
    assert refused.param in str(refused)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((5, True), r"prompt\[1\] is True \(bool\)"),
        ((5, 6, np.True_), r"prompt\[2\] is .*True"),
        ((1.0,), r"prompt\[0\] is 1\.0 \(float\)"),
        (np.ones(2), r"prompt\[0\] is .*1\.0.* \(float64\)"),
        ((-1,), r"prompt\[0\] is -1 .* in \[0, 2\*\*31\)"),
        ((2**31,), r"prompt\[0\] is 2147483648"),
        ((10**5000,), r"prompt\[0\] is an int of 16610 bits"),
        ("text", r"prompt\[0\] is 't' \(str\)"),
        (None, "prompt is None"),
        ((), "at least one token id"),
    ],
)
def test_prompts_of_anything_but_token_ids_are_refused(prompt, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        Request("a", prompt, PLAIN)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("param", "args"),
    [
        ("request_id", ("\ud800", (1,), PLAIN)),
        ("request_id", ("", (1,), PLAIN)),
        ("request_id", (7, (1,), PLAIN)),
        ("cache_salt", ("a", (1,), PLAIN, "x\udfff")),
        ("cache_salt", ("a", (1,), PLAIN, b"x")),
        ("sampling", ("a", (1,), {"max_tokens": 4})),
    ],
)
def test_fields_that_no_wire_carries_are_refused(param, args):
    with pytest.raises(InvalidRequest, match=f"{param} is ") as caught:
        Request(*args)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 10**400},
        {"temperature": float("inf")},
        {"temperature": True},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": float("nan")},
        {"seed": 1.0},
        {"seed": 2**63},
        {"max_tokens": np.float64(4)},
        {"max_tokens": False},
        {"stop_token_ids": (3, True)},
        {"stop_token_ids": 3},
        {"ignore_eos": 1},
    ],
)
def test_sampling_values_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=rf"^{name}(\[1\])? is ") as caught:
        SamplingParams(**({"max_tokens": 4} | wrong))
    assert caught.value.param == name
