"""The plain values: what they refuse, and what a call's tally and log probabilities say."""

import math

import pytest

from kvflow.engine.api import InvalidRequest, Metric, Request, SamplingParams, TokenOutput
from kvflow.errors import CapacityError
from kvflow.server.errors import as_api_error
from kvflow.server.fields import Fields
from kvflow.server.logprobs import chat_logprobs, completion_logprobs
from kvflow.server.protocol import Model, read_completion
from kvflow.server.tally import Tally

WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": math.inf}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"num_logprobs": 21}, "logprobs"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG)
def test_wrong_sampling_params_are_named(wrong, param):
    with pytest.raises(InvalidRequest, match=param) as caught:
        SamplingParams(**{"max_tokens": 1} | wrong)
    assert caught.value.param == param


def test_a_request_needs_an_id_and_a_prompt():
    sampling = SamplingParams(1)
    for request_id, prompt, param in (("", [1], "request_id"), ("a", [], "prompt")):
        with pytest.raises(InvalidRequest) as caught:
            Request(request_id, prompt, sampling)
        assert caught.value.param == param


def test_values_are_frozen_and_hold_tuples():
    request = Request("a", [1, 2], SamplingParams(1, stop_token_ids=[3]))
    assert (request.prompt, request.sampling.stop_token_ids) == ((1, 2), (3,))
    assert hash(request) == hash(Request("a", (1, 2), SamplingParams(1, stop_token_ids=(3,))))
    assert Metric("m", "help", "gauge", []).samples == ()
    with pytest.raises(AttributeError):
        request.prompt = ()


def test_a_capacity_error_that_is_no_overload_is_internal(caplog):
    assert as_api_error(CapacityError("workspace")).status == 500
    assert "workspace" in caplog.text


def test_usage_counts_a_prompt_once_and_its_least_reuse(tokenizer):
    model = Model("m", 100, tokenizer)
    call = read_completion(Fields({"prompt": [[5] * 8, [6] * 4], "n": 2}), model)
    tally = Tally(call)
    for choice, cached in zip(call.choices, (6, 2, 3, 4), strict=True):
        for idx, reused in enumerate((cached, 99)):
            position = len(choice.request.prompt) + idx
            output = TokenOutput("x", 9, position, cached_tokens=reused)
            tally.add(choice, output)
    assert tally.usage() == {
        "prompt_tokens": 12,
        "completion_tokens": 8,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 2 + 3},
    }


def test_minus_infinity_is_said_as_openai_says_it(tokenizer):
    output = TokenOutput("x", 9, 1, logprob=-math.inf, top_logprobs=((9, -math.inf),))
    assert completion_logprobs(tokenizer, [output], 0)["token_logprobs"] == [-9999.0]
    (entry,) = chat_logprobs(tokenizer, [output])["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
