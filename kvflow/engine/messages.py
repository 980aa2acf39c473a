"""What engines and their ranks say to each other. msgpack on every wire, threads included.

Only logical positions cross the wire, and block ids solely inside a binding: the tables of the
very engine a message goes to, or the source tables a transfer plan is bound with.
"""

from typing import Any

import msgspec
from msgspec import Struct

from kvflow.engine.api import SamplingParams
from kvflow.engine.sampling import Sampled


class BlockCopy(Struct, frozen=True):
    """Rows that a request takes over from blocks of another table before it computes: by group,
    ranges of positions and the first entries of the table they lie in."""

    spans: dict[str, list[tuple[int, int]]]
    tables: dict[str, list[int]]


class UnitRows(Struct, frozen=True):
    """The positions [start, stop) of a request in units of the host tier: the first unit begins at
    `start`. `labels` are what the units must be labelled with when they are read."""

    start: int
    stop: int
    units: list[int]
    labels: list[bytes] = []


class StepItem(Struct, frozen=True):
    """One request's share of a step: `tokens` at positions [start, start + len(tokens)).
    `next_token` is the prompt's token behind them, None if `sampling` decides it in this step.
    `tables` are the request's block tables by group. Before any rank computes come `copy`, then
    `load`; behind come `store`. Up to `num_drafts` drafts are tried behind the token that is
    sampled."""

    request_id: str
    start: int
    tokens: list[int]
    next_token: int | None
    tables: dict[str, list[int]]
    sampling: SamplingParams | None
    copy: BlockCopy | None = None
    load: UnitRows | None = None
    store: list[UnitRows] = []
    num_drafts: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class RunStep(Struct, frozen=True, tag=True):
    """To a prefill rank: join this step. Every rank of the group gets the same message."""

    step_id: int
    items: list[StepItem]


class StepDone(Struct, frozen=True, tag=True):
    """From a prefill rank: the tokens it sampled, by request, and the seconds it computed and the
    seconds it copied, loaded and stored rows. `refused` names requests whose loads did not hold
    what they should; they must be computed anew."""

    step_id: int
    rank: int
    sampled: dict[str, Sampled]
    seconds: float
    refused: list[str] = []
    move_seconds: float = 0.0


class AttachTier(Struct, frozen=True, tag=True):
    """To a prefill rank: map the host tier's memory, units of `unit_size` tokens."""

    name: str
    unit_size: int
    num_units: int


class Source(Struct, frozen=True):
    """Where a prefilled request lies: the block tables and the valid length of the source
    binding. `digest` is the transfer plan's, as the sender derived it."""

    tables: dict[str, list[int]]
    length: int
    digest: str


class Connect(Struct, frozen=True, tag=True):
    """To a decode rank: a prefill engine's layout, its pool sizes, and its ranks' exports."""

    layout: dict[str, Any]
    num_blocks: dict[str, int]
    exports: dict[int, bytes]


class Admit(Struct, frozen=True, tag=True):
    """To a decode rank: take over a request behind its first token."""

    request_id: str
    prompt: list[int]
    first_token: int
    sampling: SamplingParams
    source: Source


class Abort(Struct, frozen=True, tag=True):
    """To a decode rank: nobody listens to this request any more."""

    request_id: str


class Shutdown(Struct, frozen=True, tag=True):
    """To a rank: finish what runs and end."""


class Ready(Struct, frozen=True, tag=True):
    """From a rank: it serves a cache of this layout with this many blocks. `export` describes
    the cache to endpoints elsewhere, `endpoint` is this one's name."""

    layout: dict[str, Any]
    num_blocks: dict[str, int]
    endpoint: str
    export: bytes


class Generated(Struct, frozen=True, tag=True):
    """From a decode rank: one more token of a request."""

    request_id: str
    sampled: Sampled
    finish_reason: str | None


class TransferEnded(Struct, frozen=True, tag=True):
    """From a decode rank: it will not read the request's source blocks again. `report` is None
    and `error` says why if the transfer failed or never began."""

    request_id: str
    src_ranks: list[int]
    report: dict[str, Any] | None
    error: str | None


class RequestFailed(Struct, frozen=True, tag=True):
    """From a decode rank: the request ended without a result; its blocks are free again."""

    request_id: str
    error: str
    overloaded: bool = False


class Gauges(Struct, frozen=True, tag=True):
    """From a rank: numbers that go up and down, and numbers that only ever grow, by name."""

    values: dict[str, float]
    counters: dict[str, float] = {}


class RankFailed(Struct, frozen=True, tag=True):
    """From a rank: it cannot go on."""

    error: str


ToRank = RunStep | AttachTier | Connect | Admit | Abort | Shutdown
FromRank = Ready | StepDone | Generated | TransferEnded | RequestFailed | Gauges | RankFailed


_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """msgpack of a message."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """The message to a rank; raises `msgspec.ValidationError` for anything else."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """The message from a rank; raises `msgspec.ValidationError` for anything else."""
    return _from_rank.decode(data)
