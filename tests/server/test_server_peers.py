"""Against transformers' own chat templating, and under many clients at once."""

import asyncio
import json
import random

import httpx
import pytest
from server_helpers import ScriptedEngine, served, wait_until

from kvflow.server import load_tokenizer

GLM_LIKE = """\
[gMASK]<sop>
{%- macro visible(content) -%}{{ content | trim }}{%- endmacro -%}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if m.role == 'user' -%}
<|user|>
{{ visible(m.content) }}{{ '/nothink' if enable_thinking is defined and not enable_thinking }}
    {%- elif loop.index0 < ns.last -%}
<|assistant|>{{ {"said": m.content, "<&>": 'é'} | tojson }}
    {%- else -%}
<|{{ m.role }}|>{{ m.content }}
    {%- endif -%}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ eos_token }}{% endif %}
"""


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_templates_render_as_in_transformers(tokenizer_dir, tmp_path, variables):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config["chat_template"] = GLM_LIKE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [
        {"role": "system", "content": " <b> "},
        {"role": "user", "content": " one\n"},
        {"role": "assistant", "content": 'two "é" <3'},
        {"role": "user", "content": "\nthree 🙂"},
    ]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for generate in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **variables
        )
        ours = load_tokenizer(tmp_path)
        text = ours.render_chat(
            messages, {"tools": None, "add_generation_prompt": generate, **variables}
        )
        assert text == expected
        assert list(ours.encode(text, add_special_tokens=False)) == theirs.encode(
            text, add_special_tokens=False
        )


def test_many_clients_some_of_whom_leave(tokenizer):
    engine = ScriptedEngine(tokenizer.vocab_size, delay_s=0.001)
    draw = random.Random(5)

    async def one(client, idx):
        body = {"prompt": [5 + idx], "seed": idx, "n": 1 + idx % 3, "max_tokens": 20}
        body["stream"] = stream = draw.random() < 0.7
        try:
            async with asyncio.timeout(draw.choice([0.05, 20])):
                response = await client.post("/v1/completions", json=body)
        except TimeoutError:
            return 0
        assert response.status_code == 200
        if stream:
            assert response.text.endswith("data: [DONE]\n\n")
        return body["n"]

    async def scenario(url):
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=20) as client:
            finished = await asyncio.gather(*(one(client, idx) for idx in range(40)))
            await wait_until(lambda: not engine.live)
            text = (await client.get("/metrics")).text
        return sum(finished), text

    finished, text = served(engine, tokenizer, scenario)
    assert finished > 0
    assert "kvflow_choices_running 0.0" in text
    assert len(engine.seen) >= finished
    assert len(engine.seen) - len(engine.aborted) >= finished
