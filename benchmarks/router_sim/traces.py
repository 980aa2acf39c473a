"""Recorded agent sessions as trees of turns whose prompts are chains of blocks.

Sessions are anonymised one by one, so no two share an id. What real sessions share is put back: the
first `tool_tokens + system_tokens` tokens of a session's first prompt are the same for all sessions
of a model, and likewise for sub-agents. A block's name stands for the whole prefix that ends in it.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

BLOCK = 64


@frozen(eq=False)
class Turn:
    """One request: it starts `think` seconds after the turn before it ended. `children` are
    sub-agents, each a list of turns, which start when this turn ends; the next turn waits for
    them."""

    chain: tuple[bytes, ...]
    num_tokens: int
    out_tokens: int
    think: float
    children: list[list["Turn"]] = field(factory=list)


@frozen(eq=False)
class Session:
    name: str
    turns: list[Turn]

    def walk(self) -> Iterator[Turn]:
        return walk(self.turns)


def walk(turns: list[Turn]) -> Iterator[Turn]:
    for turn in turns:
        yield turn
        for child in turn.children:
            yield from walk(child)


def read(path: Path) -> list[dict[str, Any]]:
    """The sessions of a compact file, one JSON object a line."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@define(eq=False)
class Names:
    """One name for every prefix of any session: a trie of (name of the prefix before, block)."""

    _known: dict[tuple[bytes, object], bytes] = field(factory=dict)
    _count: int = 0

    def after(self, parent: bytes, block: object) -> bytes:
        name = self._known.get((parent, block))
        if name is None:
            name = self._known[parent, block] = self._count.to_bytes(6, "big")
            self._count += 1
        return name


def load(
    records: list[dict[str, Any]], copies: int, max_think: float, block_size: int = BLOCK
) -> list[Session]:
    """Sessions with think times of at most `max_think` seconds and chains of `block_size` tokens a
    block, a multiple of the record's 64. Copies of a session share what all sessions share."""
    names = Names()
    return [
        _Reader(record, f"{record['id']} {copy}", names, max_think, block_size // BLOCK).session()
        for copy in range(copies)
        for record in records
    ]


@define(eq=False)
class _Reader:
    """Decodes one session. Its requests name earlier ones' ids, in depth-first order."""

    record: dict[str, Any]
    name: str
    names: Names
    max_think: float
    every: int  # blocks of the record in one of the engines'
    ids: list[list[int]] = field(factory=list)
    chains: list[tuple[bytes, ...]] = field(factory=list)
    shared: dict[int, tuple[str, int]] = field(
        factory=dict
    )  # id -> (prefix, place) of all sessions

    def session(self) -> Session:
        return Session(self.name, self._turns(self.record, "main"))

    def _turns(self, part: dict[str, Any], kind: str) -> list[Turn]:
        turns: list[Turn] = []
        first = len(self.ids)
        for request in part["requests"]:
            if request["type"] == "subagent":
                child = self._turns(request, "sub-agent")
                if turns and child:
                    turns[-1].children.append(child)
                continue
            if len(self.ids) == first:
                prefix = part["tool_tokens"] + part["system_tokens"]
                self._share(request, f"{kind} {request['model']}", prefix // BLOCK)
            turns.append(self._turn(request))
        return turns

    def _decode(self, request: dict[str, Any]) -> list[int]:
        ref, lcp, runs = request["h"]
        ids = list(self.ids[ref][:lcp]) if ref >= 0 else []
        for start, count in runs:
            ids.extend(range(start, start + count))
        return ids

    def _share(self, request: dict[str, Any], prefix: str, num_blocks: int) -> None:
        for place, block in enumerate(self._decode(request)[:num_blocks]):
            self.shared.setdefault(block, (prefix, place))

    def _turn(self, request: dict[str, Any]) -> Turn:
        ids = self._decode(request)
        num_tokens = max(1, request["in"])
        stop = min(len(ids), num_tokens // BLOCK) // self.every
        ref, lcp, _ = request["h"]
        chain = list(self.chains[ref][: min(lcp // self.every, stop)]) if ref >= 0 else []
        for k in range(len(chain), stop):
            block = ids[k * self.every : (k + 1) * self.every]
            said = tuple(self.shared.get(one, (self.name, one)) for one in block)
            chain.append(self.names.after(chain[-1] if chain else b"", said))
        self.ids.append(ids)
        self.chains.append(tuple(chain))
        think = min(self.max_think, request.get("think_time") or 0.0)
        return Turn(tuple(chain), num_tokens, max(1, request.get("out") or 1), think)
