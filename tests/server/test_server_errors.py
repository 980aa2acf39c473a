"""Every refusal: its status, the field it names and the numbers it tells."""

import openai
import pytest
from server_helpers import ScriptedEngine, with_httpx, with_openai

from kvflow.server import ServerConfig

MODEL = "tiny/scripted"
COMPLETION = {"model": MODEL, "prompt": "a", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def engine_of(tokenizer, **kwargs):
    return ScriptedEngine(tokenizer.vocab_size, **kwargs)


def answers(tokenizer, requests, config=None, **kwargs):
    """Send (method, path, kwargs) one after the other; check the form of every error."""
    engine = engine_of(tokenizer, **kwargs)

    async def scenario(client):
        return [await client.request(method, path, **kw) for method, path, kw in requests]

    responses = with_httpx(engine, tokenizer, scenario, config)
    for response in responses:
        if response.status_code >= 400:
            assert set(response.json()) == {"error"}
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in response.text
    return responses


BAD_EVERYWHERE = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "include_usage"),
    ({"model": 5}, "model"),
    ({"kvflow_report": "x"}, "kvflow_report"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"cache_salt": 5}, "cache_salt"),
]
BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"min_tokens": False}, "min_tokens"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output"),
]
BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": 1}]}, "messages[0].name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
        "messages[0].tool_calls",
    ),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
]


def test_bad_parameters_are_named(tokenizer):
    cases = [("/v1/completions", COMPLETION, BAD_EVERYWHERE + BAD_COMPLETIONS)]
    cases.append(("/v1/chat/completions", CHAT, BAD_EVERYWHERE + BAD_CHATS))
    for path, good, bad in cases:
        requests = [("POST", path, {"json": good | wrong}) for wrong, _ in bad]
        for response, (wrong, param) in zip(answers(tokenizer, requests), bad, strict=True):
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (wrong, error)
            assert error["type"] == "invalid_request_error"
            assert param.split(".")[-1].split("[")[0] in error["message"]


def test_a_prompt_that_is_too_long_tells_both_numbers(tokenizer):
    bodies = [
        COMPLETION | {"prompt": [5] * 30, "max_tokens": 11},
        COMPLETION | {"prompt": [5] * 40, "max_tokens": None},
        CHAT | {"messages": [{"role": "user", "content": "z" * 99}], "max_tokens": None},
    ]
    paths = ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
    requests = [("POST", p, {"json": b}) for p, b in zip(paths, bodies, strict=True)]
    first, second, third = (
        r.json()["error"] for r in answers(tokenizer, requests, max_model_len=40)
    )
    assert {e["code"] for e in (first, second, third)} == {"context_length_exceeded"}
    for part in ("30 tokens", "max_tokens is 11", "= 41", "at most 40"):
        assert part in first["message"]
    assert first["param"] == "max_tokens"
    assert (second["param"], third["param"]) == ("prompt", "messages")


def test_exactly_full_is_served(tokenizer):
    body = COMPLETION | {"prompt": [5] * 30, "max_tokens": 10}
    requests = [("POST", "/v1/completions", {"json": body})]
    assert answers(tokenizer, requests, max_model_len=40)[0].status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10**5, b'{"a": NaN}'],
)
def test_bodies_that_are_no_json_object(tokenizer, content):
    (response,) = answers(tokenizer, [("POST", "/v1/completions", {"content": content})])
    assert response.status_code == 400


def test_unknown_models_routes_and_methods(tokenizer):
    requests = [
        ("POST", "/v1/completions", {"json": COMPLETION | {"model": "gpt-9"}}),
        ("GET", "/v1/models/gpt-9", {}),
        ("GET", "/v1/nothing", {}),
        ("GET", "/v1/completions", {}),
        ("DELETE", "/v1/models", {}),
    ]
    responses = answers(tokenizer, requests)
    assert [response.status_code for response in responses] == [404, 404, 404, 405, 405]
    assert responses[0].json()["error"]["code"] == "model_not_found"
    assert "gpt-9" in responses[0].json()["error"]["message"]
    assert "POST" in responses[3].headers["allow"]


def test_bodies_that_are_too_large(tokenizer):
    async def pieces():
        for _ in range(19):
            yield b"x" * 100

    config = ServerConfig(max_body_nbytes=1000)
    requests = [
        ("POST", "/v1/completions", {"content": b"x" * 1001}),
        ("POST", "/v1/completions", {"content": pieces()}),
        ("POST", "/v1/completions", {"content": b"x" * 1000}),
    ]
    announced, streamed, fitting = answers(tokenizer, requests, config)
    assert [r.status_code for r in (announced, streamed, fitting)] == [413, 413, 400]
    assert "1001" in announced.json()["error"]["message"]
    assert "1000" in announced.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_429(tokenizer, stream):
    engine = engine_of(tokenizer, capacity=1, delay_s=0.05)

    async def scenario(client):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**COMPLETION, n=2, stream=stream)
        return caught.value

    error = with_openai(engine, tokenizer, scenario)
    assert (error.status_code, error.code, error.type) == (429, "overloaded", "rate_limit_error")
    assert "at most 1" in error.message
    assert error.response.headers["retry-after"] == "1"


def test_overload_after_another_choice_has_streamed_is_an_error_event(tokenizer):
    engine = engine_of(tokenizer, capacity=1, refuse_after=2)

    async def scenario(client):
        body = COMPLETION | {"n": 2, "stream": True}
        return await client.post("/v1/completions", json=body)

    *_, error, done, end = with_httpx(engine, tokenizer, scenario).text.split("\n\n")
    assert '"code":"overloaded"' in error
    assert (done, end) == ("data: [DONE]", "")


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_own_rules_are_400(tokenizer, stream):
    request = ("POST", "/v1/completions", {"json": COMPLETION | {"stream": stream}})
    (response,) = answers(tokenizer, [request], refuse=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [{"fail_at": 0}, {"unfinished": True}])
def test_a_failure_before_the_first_token_is_500_without_details(tokenizer, stream, fault, caplog):
    body = COMPLETION | {"stream": stream, "max_tokens": 1}
    (response,) = answers(tokenizer, [("POST", "/v1/completions", {"json": body})], **fault)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "internal error" in caplog.text


async def rest_of(stream):
    return [chunk async for chunk in stream]


def test_a_failure_in_the_middle_ends_the_stream_with_an_error(tokenizer, caplog):
    engine = engine_of(tokenizer, fail_at=3)

    async def scenario(client):
        stream = await client.chat.completions.create(**CHAT | {"max_tokens": 9}, stream=True)
        await anext(stream)
        with pytest.raises(openai.APIError) as caught:
            await rest_of(stream)
        return caught.value

    error = with_openai(engine, tokenizer, scenario)
    assert "secret" not in str(error)
    assert "secret" in caplog.text


def test_an_engine_that_is_not_well(tokenizer):
    sick, fine = (
        answers(tokenizer, [("GET", "/health", {})], well=well)[0] for well in (False, True)
    )
    assert (sick.status_code, fine.status_code) == (503, 200)
    assert fine.json() == {"status": "ok"}


def test_models_tokenize_detokenize(tokenizer):
    text = "naïve 🙂"
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    requests = [
        ("GET", "/v1/models", {}),
        ("GET", f"/v1/models/{MODEL}", {}),
        ("POST", "/tokenize", {"json": {"prompt": text}}),
        ("POST", "/tokenize", {"json": {"messages": CHAT["messages"]}}),
        ("POST", "/detokenize", {"json": {"tokens": ids}}),
        ("POST", "/tokenize", {"json": {}}),
        ("POST", "/detokenize", {"json": {"tokens": "x"}}),
    ]
    models, model, tokens, chat, back, no_prompt, no_tokens = answers(tokenizer, requests)
    assert models.json()["data"] == [model.json()]
    assert (model.json()["id"], model.json()["max_model_len"]) == (MODEL, 512)
    assert tokens.json() == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert tokenizer.decode(chat.json()["tokens"]) == "\na\n\n"
    assert back.json() == {"prompt": text}
    assert [r.json()["error"]["param"] for r in (no_prompt, no_tokens)] == ["prompt", "tokens"]
