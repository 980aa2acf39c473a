"""`/v1/chat/completions` through the real `openai` client."""

import math

from server_helpers import ScriptedEngine, token_ids, with_httpx, with_openai

MODEL = "tiny/scripted"
HELLO = [{"role": "user", "content": "hello"}]


def engine_of(tokenizer, **kwargs):
    return ScriptedEngine(tokenizer.vocab_size, **kwargs)


def test_streamed_and_whole_answers_agree(tokenizer):
    script = (*token_ids(tokenizer, "naïve 🙂 café"), 0)
    engine = engine_of(tokenizer, script=script)

    async def scenario(client):
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_openai(engine, tokenizer, scenario)
    message = whole.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert (message.role, message.content) == ("assistant", "naïve 🙂 café")
    assert whole.choices[0].finish_reason == "stop"
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.object == "chat.completion"


def test_the_prompt_is_what_the_template_says(tokenizer):
    engine = engine_of(tokenizer)
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, "brief"]},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
    ]

    async def scenario(client):
        await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)

    with_openai(engine, tokenizer, scenario)
    text = (
        "<|system|>\nbe\nbrief<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\nyes<|end|>\n"
        "<|user|>\ngo<|end|>\n<|assistant|>\n"
    )
    assert engine.seen[0].prompt == token_ids(tokenizer, text)


def test_length_defaults_to_what_fits(tokenizer):
    engine = engine_of(tokenizer, max_model_len=60)

    async def scenario(client):
        free = await client.chat.completions.create(model=MODEL, messages=HELLO)
        newer = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=3
        )
        return free, newer

    free, newer = with_openai(engine, tokenizer, scenario)
    assert free.usage.total_tokens == 60
    assert free.choices[0].finish_reason == "length"
    assert newer.usage.completion_tokens == 3


def test_logprobs_both_ways(tokenizer):
    engine = engine_of(tokenizer)

    async def scenario(client):
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "seed": 1, "n": 2}
        body |= {"logprobs": True, "top_logprobs": 3}
        whole = await client.chat.completions.create(**body)
        streamed = {0: [], 1: []}
        async for chunk in await client.chat.completions.create(stream=True, **body):
            for choice in chunk.choices:
                if choice.logprobs:
                    streamed[choice.index] += choice.logprobs.content
        return whole, streamed

    whole, streamed = with_openai(engine, tokenizer, scenario)
    for choice in whole.choices:
        content = choice.logprobs.content
        assert content == streamed[choice.index]
        assert len(content) == 4
        for entry in content:
            assert math.exp(entry.logprob) <= 1
            assert len(entry.top_logprobs) == 3
            assert entry.token == bytes(entry.bytes).decode(errors="replace")


def test_bodies_of_load_generators(tokenizer):
    engine = engine_of(tokenizer, script=(5, 0, 6))

    async def scenario(client):
        body = {
            "model": MODEL,
            "messages": HELLO,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "max_tokens": 8,
            "ignore_eos": True,
            "user": "x",
            "metadata": {"a": "b"},
            "a_field_nobody_knows": 1,
            "temperature": None,
            "tools": [],
            "response_format": {"type": "text"},
        }
        return await client.post("/v1/chat/completions", json=body)

    response = with_httpx(engine, tokenizer, scenario)
    assert response.status_code == 200
    assert '"completion_tokens":8' in response.text.split("\n\n")[-3]
    assert '"completion_tokens":1,' in response.text.split("\n\n")[0]


def test_template_variables_reach_the_template(tokenizer_dir, tmp_path):
    from kvflow.server import load_tokenizer

    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    source = "{{ messages[0].content }}{{ mood }}{{ reasoning_effort }}{{ add_generation_prompt }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = load_tokenizer(tmp_path)
    engine = engine_of(tokenizer)

    async def scenario(client):
        extra = {"chat_template_kwargs": {"mood": "calm", "messages": "no"}}
        extra["add_generation_prompt"] = False
        await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=1, reasoning_effort="low", extra_body=extra
        )

    with_openai(engine, tokenizer, scenario)
    assert tokenizer.decode(engine.seen[0].prompt) == "hellocalmlowFalse"
