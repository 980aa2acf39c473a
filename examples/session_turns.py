"""What an agent session consists of: turns that begin like earlier ones, scaled to an engine's
longest request, and their texts. `examples/sessions/cut.py` makes the files.
"""

import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from attrs import evolve, field, frozen

from kvflow.errors import KvflowError
from kvflow.launch.config import LaunchConfig

MIN_ANSWER = 4
"""Tokens of the shortest answers, so that something is left for decode."""


class Encoder(Protocol):
    """What makes tokens of text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]: ...


@frozen
class Turn:
    """A prompt of `prompt_size` tokens, of which the first `shared` are those of the prompt and
    the answer of the turn `extends`, and an answer of `max_tokens`. It begins when the turns
    `after` have ended."""

    name: str
    extends: str | None
    shared: int
    after: tuple[str, ...]
    prompt_size: int
    max_tokens: int

    @property
    def agent(self) -> str:
        return self.name.partition("/")[0]

    @property
    def end(self) -> int:
        """Its positions, prompt and answer."""
        return self.prompt_size + self.max_tokens


@frozen
class Session:
    """Turns, each after those that it names, and the text of each agent: the name of a module of
    Python's standard library, whose source it is. `added`: the tokens that each turn adds to what
    it shares, by the turn's name."""

    text: Mapping[str, str]
    turns: tuple[Turn, ...]
    added: Mapping[str, tuple[int, ...]] = field(factory=dict)

    @staticmethod
    def load(path: Path) -> "Session":
        """From a file that `examples/sessions/cut.py` wrote."""
        told = json.loads(path.read_text())
        turns = [
            Turn(t["name"], t["extends"], t["shared"], tuple(t["after"]), t["in"], t["out"])
            for t in told["turns"]
        ]
        return Session(told["text"], tuple(turns))

    @property
    def longest(self) -> int:
        """Positions of the longest turn, prompt and answer."""
        return max(turn.end for turn in self.turns)

    def scaled(self, max_model_len: int) -> "Session":
        """The same session with its longest turn at `max_model_len` tokens or little less: lengths
        in proportion, rounded down, but at least one new token a turn and `MIN_ANSWER`. Raises
        `KvflowError` where that leaves no room."""
        for size in range(max_model_len, max_model_len // 2, -1):
            scaled = self._scaled(size, self.longest)
            if scaled.longest <= max_model_len:
                return scaled
        raise KvflowError(f"max_model_len = {max_model_len} is too short for the session")

    def _scaled(self, numerator: int, denominator: int) -> "Session":
        told = {turn.name: turn for turn in self.turns}
        done: dict[str, Turn] = {}
        for turn in self.turns:
            shared = turn.shared * numerator // denominator
            if turn.extends is not None:
                end = done[turn.extends].end
                shared = end if turn.shared == told[turn.extends].end else min(shared, end)
            size = max(turn.prompt_size * numerator // denominator, shared + 1)
            num = max(turn.max_tokens * numerator // denominator, MIN_ANSWER)
            done[turn.name] = evolve(turn, shared=shared, prompt_size=size, max_tokens=num)
        return evolve(self, turns=tuple(done.values()))

    def with_texts(self, encoder: Encoder) -> "Session":
        """The same session with tokens: its agents' texts, cut where a turn ends. Raises
        `KvflowError` for a text that is too short."""
        left = {
            agent: encoder.encode(source_of(module), add_special_tokens=False)
            for agent, module in self.text.items()
        }
        begin = encoder.encode("", add_special_tokens=True)
        added = {}
        for turn in self.turns:
            text = left[turn.agent] if turn.extends is not None else begin + left[turn.agent]
            size = turn.prompt_size - turn.shared
            if len(text) < size:
                raise KvflowError(f"turn {turn.name} adds {size} tokens, its text has {len(text)}")
            added[turn.name], left[turn.agent] = text[:size], text[size:]
        return evolve(self, added=added)


def load_session(path: Path, launch: LaunchConfig, encoder: Encoder) -> Session:
    """The session of a file, scaled to the deployment's longest request, with its texts. Raises
    `KvflowError` for a file that holds none, and `OSError` for none at all."""
    try:
        session = Session.load(path).scaled(launch.max_model_len)
    except (ValueError, KeyError, TypeError) as error:
        raise KvflowError(f"{path} holds no session: {type(error).__name__} {error}") from error
    return session.with_texts(encoder)


def source_of(module: str) -> str:
    """The source of a module of the standard library."""
    return inspect.getsource(importlib.import_module(module))
