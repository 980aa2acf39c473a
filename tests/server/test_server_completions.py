"""`/v1/completions` through the real `openai` client."""

import asyncio

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_helpers import ScriptedEngine, served, token_ids, with_httpx, with_openai

MODEL = "tiny/scripted"


def engine_of(tokenizer, **kwargs):
    return ScriptedEngine(tokenizer.vocab_size, **kwargs)


async def whole_and_streamed(client, **body):
    """(text of choice 0, its finish reason) both ways; the streamed one with its pieces."""
    whole = await client.completions.create(model=MODEL, **body)
    pieces, reason, usage = [], None, None
    options = {"include_usage": True}
    async for chunk in await client.completions.create(
        model=MODEL, stream=True, stream_options=options, **body
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.text)
            reason = choice.finish_reason or reason
    choice = whole.choices[0]
    assert (choice.text, choice.finish_reason) == ("".join(pieces), reason)
    assert whole.usage == usage
    return whole, pieces


def test_text_and_usage(tokenizer):
    engine = engine_of(tokenizer, script=(*token_ids(tokenizer, "return x\n"), 0))

    async def scenario(client):
        return await whole_and_streamed(client, prompt="def main", max_tokens=50)

    whole, _ = with_openai(engine, tokenizer, scenario)
    num_prompt = len(token_ids(tokenizer, "def main"))
    assert whole.choices[0].text == "return x\n"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.object == "text_completion"
    usage = whole.usage
    assert usage.prompt_tokens == num_prompt
    assert usage.completion_tokens == len(engine.script)
    assert usage.total_tokens == num_prompt + len(engine.script)
    assert usage.prompt_tokens_details.cached_tokens == num_prompt // 2


@settings(max_examples=6, deadline=None)
@given(text=st.text(alphabet="aé東🙂👧\n ", min_size=1, max_size=12), length=st.integers(1, 30))
def test_pieces_are_the_text_across_utf8_borders(tokenizer, text, length):
    single = {value: idx for idx, value in enumerate(tokenizer.token_bytes) if len(value) == 1}
    script = tuple(single[bytes([byte])] for byte in text.encode())[:length]
    engine = engine_of(tokenizer, script=script)

    async def scenario(client):
        return await whole_and_streamed(client, prompt="x", max_tokens=len(script))

    whole, pieces = with_openai(engine, tokenizer, scenario)
    assert whole.choices[0].text == text.encode()[:length].decode(errors="replace")
    assert not any("\ufffd" in piece for piece in pieces[:-1])


STOPPED = [
    ("END", "quick fox\njumps 1", "END"),
    (["zzz", "1END", "E"], "quick fox\njumps 1", "E"),  # "E" is complete before "1END"
    (["1END", "END"], "quick fox\njumps ", "1END"),
    (["fox\nju"], "quick ", "fox\nju"),
    (["nowhere", "tail!"], "quick fox\njumps 1END tail", None),
]


@pytest.mark.parametrize(("stop", "text", "matched"), STOPPED)
def test_stop_strings_are_not_emitted(tokenizer, stop, text, matched):
    script = (*token_ids(tokenizer, "quick fox\njumps 1END tail"), 0)
    engine = engine_of(tokenizer, script=script)

    async def scenario(client):
        return await whole_and_streamed(client, prompt="x", max_tokens=60, stop=stop)

    whole, _ = with_openai(engine, tokenizer, scenario)
    choice = whole.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", matched)
    assert len(engine.aborted) == (2 if matched else 0)


def test_stop_token_ids_and_ignore_eos(tokenizer):
    word = token_ids(tokenizer, "a")[0]
    engine = engine_of(tokenizer, script=(5, 0, 6, word, 7))

    async def scenario(client):
        extra = {"ignore_eos": True, "stop_token_ids": [word]}
        return await whole_and_streamed(client, prompt="x", max_tokens=9, extra_body=extra)

    whole, _ = with_openai(engine, tokenizer, scenario)
    choice = whole.choices[0]
    assert choice.text == tokenizer.decode([5, 6])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", word)
    assert whole.usage.completion_tokens == 4


def test_special_tokens_show_when_asked_for(tokenizer):
    engine = engine_of(tokenizer, script=(0, 1))

    async def scenario(client):
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        return await whole_and_streamed(client, prompt="x", max_tokens=2, extra_body=extra)

    whole, _ = with_openai(engine, tokenizer, scenario)
    assert whole.choices[0].text == "<|end|><|user|>"


def test_every_form_of_prompt(tokenizer):
    engine = engine_of(tokenizer)
    ids = [list(token_ids(tokenizer, text)) for text in ("one", "the quick")]

    async def scenario(client):
        forms = ["one", ["one", "the quick"], ids[0], ids]
        return [await client.completions.create(model=MODEL, prompt=p, max_tokens=3) for p in forms]

    answers = with_openai(engine, tokenizer, scenario)
    assert [len(answer.choices) for answer in answers] == [1, 2, 1, 2]
    prompts = [list(request.prompt) for request in engine.seen]
    assert prompts == [ids[0], *ids, ids[0], *ids]
    assert answers[1].usage.prompt_tokens == sum(map(len, ids))


def test_n_choices_of_each_prompt_have_their_own_seeds(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        body = {"prompt": ["a", "b"], "n": 3, "seed": 7, "max_tokens": 8}
        one = await client.completions.create(model=MODEL, **body)
        two = await client.completions.create(model=MODEL, **body)
        streamed: dict[int, str] = {}
        async for chunk in await client.completions.create(model=MODEL, stream=True, **body):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + choice.text
        return one, two, streamed

    one, two, streamed = with_openai(engine, tokenizer, scenario)
    texts = [choice.text for choice in one.choices]
    assert [choice.index for choice in one.choices] == list(range(6))
    assert texts == [choice.text for choice in two.choices]
    assert texts == [streamed[index] for index in range(6)]
    assert len(set(texts[:3])) == 3
    assert [request.sampling.seed for request in engine.seen[:6]] == [7, 8, 9, 7, 8, 9]
    assert one.usage.completion_tokens == 48


def test_without_a_seed_every_request_draws_one(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        for _ in range(2):
            await client.completions.create(model=MODEL, prompt="a", n=2, max_tokens=1)

    with_openai(engine, tokenizer, scenario)
    assert len({request.sampling.seed for request in engine.seen}) == 4


def test_negative_seeds_and_sampling_values_reach_the_engine(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        await client.completions.create(
            model=MODEL, prompt="a", seed=-1, temperature=0, top_p=0.5, max_tokens=1
        )

    with_openai(engine, tokenizer, scenario)
    sampling = engine.seen[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p) == (2**63 - 1, 0.0, 0.5)


def test_a_tenant_s_salt_reaches_the_engine(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        for salt in ({"cache_salt": "tenant"}, {}):
            await client.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_body=salt)

    with_openai(engine, tokenizer, scenario)
    assert [one.cache_salt for one in engine.seen] == ["tenant", None]


def test_default_length_is_16_or_what_fits(tokenizer):
    engine = engine_of(tokenizer, max_model_len=20)

    async def scenario(client):
        short = await client.completions.create(model=MODEL, prompt=[5, 6])
        long = await client.completions.create(model=MODEL, prompt=[5] * 15)
        newer = await client.completions.create(
            model=MODEL, prompt=[5], max_tokens=9, extra_body={"max_completion_tokens": 2}
        )
        return [answer.usage.completion_tokens for answer in (short, long, newer)]

    assert with_openai(engine, tokenizer, scenario) == [16, 5, 2]


def test_echo(tokenizer):
    engine = engine_of(tokenizer, script=token_ids(tokenizer, "ab"))

    async def scenario(client):
        text, _ = await whole_and_streamed(client, prompt="the ", echo=True, max_tokens=1)
        ids, _ = await whole_and_streamed(
            client, prompt=list(token_ids(tokenizer, "fox ")), echo=True, max_tokens=1
        )
        return text.choices[0].text, ids.choices[0].text

    first = tokenizer.decode(engine.script[:1])
    assert with_openai(engine, tokenizer, scenario) == ("the " + first, "fox " + first)


def test_logprobs_both_ways(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 5, "seed": 3, "logprobs": 2}
        whole = await client.completions.create(**body)
        tokens, values, offsets = [], [], []
        async for chunk in await client.completions.create(stream=True, **body):
            known = chunk.choices[0].logprobs
            tokens += known.tokens
            values += known.token_logprobs
            offsets += known.text_offset
        return whole.choices[0].logprobs, tokens, values, offsets

    known, tokens, values, offsets = with_openai(engine, tokenizer, scenario)
    assert (known.tokens, known.token_logprobs, known.text_offset) == (tokens, values, offsets)
    assert len(tokens) == 5
    assert offsets == [sum(map(len, tokens[:idx])) for idx in range(5)]
    assert all(value < 0 for value in values)
    assert all(t in best for t, best in zip(tokens, known.top_logprobs, strict=True))


def test_report_only_on_request(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "n": 2, "seed": 5}
        plain = await client.completions.create(**body)
        flag = {"kvflow_report": True}
        asked = await client.completions.create(**body, extra_body=flag)
        headers = {"x-kvflow-report": "1"}
        stream = await client.completions.create(**body, stream=True, extra_headers=headers)
        reports = [chunk.kvflow async for chunk in stream if chunk.model_extra.get("kvflow")]
        return plain, asked.kvflow["choices"], [r["choices"][0] for r in reports]

    plain, asked, streamed = with_openai(engine, tokenizer, scenario)
    assert "kvflow" not in plain.model_extra
    assert [entry["index"] for entry in asked] == [0, 1]
    assert [entry["seed"] for entry in asked] == [5, 6]
    assert asked[0]["transfer"] == {"nbytes": 640, "plan_digest": "ab12", "verified": True}
    assert sorted(entry["index"] for entry in streamed) == [0, 1]
    assert streamed[0]["transfer"]["nbytes"] == 640


def test_the_synchronous_client(tokenizer):
    engine = engine_of(tokenizer, script=token_ids(tokenizer, "jumps"))

    def blocking(url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="x", max_tokens=1, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    async def scenario(url):
        return await asyncio.to_thread(blocking, url)

    assert served(engine, tokenizer, scenario) == tokenizer.decode(engine.script[:1])


def test_the_bytes_of_a_stream(tokenizer):
    engine = engine_of(tokenizer, script=token_ids(tokenizer, "ab"))

    async def scenario(client):
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        return await client.post("/v1/completions", json=body)

    response = with_httpx(engine, tokenizer, scenario)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
