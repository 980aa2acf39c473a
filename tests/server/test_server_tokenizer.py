"""Reading a model directory's tokenizer and chat template."""

import json

import pytest

from kvflow.server import load_tokenizer
from kvflow.server.template import ChatTemplate, TemplateError
from kvflow.server.tokenizer import TokenizerError


def test_special_tokens_and_limits_are_read(tokenizer):
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token is None
    assert len(tokenizer.special_ids) == 4
    assert tokenizer.vocab_size == tokenizer.encoder.get_vocab_size(with_added_tokens=True)
    assert tokenizer.encode("hi<|end|>", add_special_tokens=False)[-1] in tokenizer.special_ids


def test_chat_template_renders_the_conversation(tokenizer):
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "<b>"}]
    text = tokenizer.render_chat(messages, {"add_generation_prompt": True})
    assert text == "<|system|>\nbe brief<|end|>\n<|user|>\n<b><|end|>\n<|assistant|>\n"


def test_a_separate_template_file_wins(tokenizer_dir, tmp_path):
    for path in tokenizer_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages | tojson }}")
    text = load_tokenizer(tmp_path).render_chat([{"role": "user", "content": "<é>"}], {})
    assert text == '<|end|>[{"role": "user", "content": "<é>"}]'


def test_truncation_in_the_file_is_undone(tokenizer_dir, tmp_path):
    description = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description | {"truncation": cut}))
    ids = load_tokenizer(tmp_path).encode("one two three four", add_special_tokens=True)
    assert len(ids) > 2


def test_other_decoders_are_refused(tokenizer_dir, tmp_path):
    description = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    description["decoder"] = {"type": "ByteFallback"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(TokenizerError, match="ByteFallback"):
        load_tokenizer(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(TokenizerError, match="list"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_cannot_escape_and_their_refusals_are_errors(source):
    with pytest.raises(TemplateError):
        ChatTemplate(source).render({"messages": []})


def test_a_broken_template_is_an_error_at_construction():
    with pytest.raises(TemplateError, match="compile"):
        ChatTemplate("{% if %}")
