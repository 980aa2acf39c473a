"""Words of a text form, and the error that points at one of them."""

import itertools
import json
import re
from typing import NoReturn

from attrs import frozen

from kvflow.errors import LayoutError

MAX_DIGITS = 19
"""Enough for every position and every byte of an address space."""
_OPEN = {"(": ")", "[": "]", "{": "}"}


class TextError(LayoutError):
    """A text that says no layout: the message points at the word."""


@frozen
class Word:
    """A piece of a text and the place where it begins."""

    text: str
    column: int
    whole: str

    @classmethod
    def alone(cls, text: str) -> "Word":
        """A whole text as one word."""
        return cls(text, 0, text)

    def fail(self, expected: str) -> NoReturn:
        """Raises `TextError` naming this word, its column (from 1) and what was expected."""
        raise TextError(
            f"{self.text!r} at column {self.column + 1} of {self.whole!r}: expected {expected}"
        )

    def sub(self, start: int, stop: int | None = None) -> "Word":
        """The part ``[start, stop)`` of this word."""
        return Word(self.text[start:stop], self.column + start, self.whole)

    def split(self, separator: str) -> "list[Word]":
        """The parts between separators that stand outside brackets and quotes."""
        edges = [-1, *_outside(self, separator), len(self.text)]
        return [self.sub(a + 1, b) for a, b in itertools.pairwise(edges)]

    def call(self) -> "tuple[str, list[Word]] | None":
        """``name(a,b)`` as its name and arguments, None for a word of another shape."""
        name, bracket, rest = self.text.partition("(")
        if not rest.endswith(")") or len(_outside(self, bracket)) != 1:
            return None
        inner = self.sub(len(name) + 1, -1)
        return name, inner.split(",") if inner.text else []

    def number(self, what: str, low: int = 0) -> int:
        """This word as an integer of at least `low`."""
        digits = re.fullmatch(r"[0-9]+", self.text)
        if digits and len(self.text) > MAX_DIGITS:
            self.fail(f"{what}, a number of at most {MAX_DIGITS} digits, got {len(self.text)}")
        if not digits or int(self.text) < low:
            self.fail(f"{what}, a whole number of at least {low}")
        return int(self.text)


def words_of(text: str) -> list[Word]:
    """The words between spaces that stand outside brackets and quotes. Raises `TextError` for a
    text without words, or with a bracket or quote that is not closed."""
    if not isinstance(text, str):
        raise TextError(f"expected a text, got {text!r}")
    words = [w for w in Word.alone(text).split(" ") if w.text]
    if not words:
        raise TextError("an empty text says nothing")
    return words


def unquoted(word: Word) -> str:
    """A plain word, or one in quotes as in JSON."""
    if not word.text.startswith('"'):
        return word.text
    try:
        return str(json.loads(word.text))
    except json.JSONDecodeError:
        word.fail("a text in quotes as in JSON")


def _outside(word: Word, separator: str) -> list[int]:
    """Where `separator`, perhaps an opening bracket, stands outside brackets and quotes."""
    closing: list[tuple[str, int]] = []
    found, escaped = [], False
    quoted: int | None = None
    for at, c in enumerate(word.text):
        if quoted is not None:
            quoted = None if c == '"' and not escaped else quoted
            escaped = c == "\\" and not escaped
            continue
        if c == separator and not closing:
            found.append(at)
        if c == '"':
            quoted = at
        elif c in _OPEN:
            closing.append((_OPEN[c], at))
        elif c in _OPEN.values() and (not closing or closing.pop()[0] != c):
            word.sub(at).fail(f"no {c!r} here: it closes nothing that is open")
    if quoted is not None:
        word.sub(quoted).fail("a closing quote")
    if closing:
        sign, at = closing[-1]
        word.sub(at).fail(f"a closing {sign!r}")
    return found
