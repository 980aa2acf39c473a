"""The tokenizer of a model directory: text to ids, ids to bytes, messages to a prompt."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from attrs import field, frozen

from kvflow.errors import KvflowError
from kvflow.server.template import ChatTemplate


class TokenizerError(KvflowError, ValueError):
    """A tokenizer that cannot be read, or is of a kind that is not served."""


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level BPE alphabet that GPT-2 introduced.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + idx): byte for idx, byte in enumerate(others)
    }


@frozen(eq=False)
class TextTokenizer:
    """A byte-level BPE tokenizer and the chat template that belongs to it.

    token_bytes: the bytes of every id, b"" for ids without a token.
    special_ids: ids of special tokens, which text output skips.
    chat_template: None when the model has none.
    """

    encoder: tokenizers.Tokenizer
    token_bytes: tuple[bytes, ...] = field(repr=False)
    special_ids: frozenset[int]
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the greatest token id."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        return tuple(self.encoder.encode(text, add_special_tokens=add_special_tokens).ids)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token; b"" for an id that the vocabulary does not have."""
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence; broken UTF-8 becomes U+FFFD."""
        kept = (t for t in tokens if not (skip_special and t in self.special_ids))
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", errors="replace")

    def render_chat(self, messages: list[dict[str, str]], variables: Mapping[str, Any]) -> str:
        """The prompt text of a conversation.

        `variables` are the template's, beside messages, bos_token and eos_token. Raises
        `TokenizerError` without a template, `TemplateError` when it refuses the messages.
        """
        if self.chat_template is None:
            raise TokenizerError("the model has no chat template")
        special = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        return self.chat_template.render({**variables, **special, "messages": messages})


def load_tokenizer(directory: str | Path) -> TextTokenizer:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a model directory.

    Raises `TokenizerError` when a file is missing or broken, or the decoder is not ByteLevel.
    """
    directory = Path(directory)
    description = _read_json(directory / "tokenizer.json")
    config_path = directory / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.exists() else {}
    decoder = (description.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise TokenizerError(f"{directory}: decoder is {decoder!r}, but only 'ByteLevel' is served")
    encoder = tokenizers.Tokenizer.from_str(json.dumps(description))
    encoder.no_truncation()
    encoder.no_padding()
    added = description.get("added_tokens", [])
    template = _template_source(directory, config)
    return TextTokenizer(
        encoder=encoder,
        token_bytes=_token_bytes(encoder, {t["id"]: t["content"] for t in added}),
        special_ids=frozenset(t["id"] for t in added if t["special"]),
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        chat_template=ChatTemplate(template) if template is not None else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, but must hold an object")
    return value


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    separate = directory / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {item["name"]: item["template"] for item in source}.get("default")
    return source


def _token_bytes(encoder: tokenizers.Tokenizer, added: dict[int, str]) -> tuple[bytes, ...]:
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    alphabet = byte_level_alphabet()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        plain = token in added or any(char not in alphabet for char in text)
        table[token] = text.encode() if plain else bytes(alphabet[char] for char in text)
    return tuple(table)
