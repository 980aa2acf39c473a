"""What engines and their ranks say to each other. msgpack on every wire, threads included.

Only logical positions cross the wire, and block ids solely inside a binding: the tables of the
very engine a message goes to, or the source tables a transfer plan is bound with.
"""

from typing import Any

import msgspec
from msgspec import Struct

from kvflow.engine.api import SamplingParams
from kvflow.engine.row_messages import (
    AskLoan,
    AskPush,
    Connect,
    Connected,
    EndLoan,
    Lend,
    Lent,
    Loaned,
    PullRows,
    Pushed,
    PushRows,
    RowsPulled,
    RowsPushed,
    Source,
    TransferEnded,
)
from kvflow.engine.sampling import Sampled
from kvflow.engine.step_messages import (
    AttachTier,
    BlockCopy,
    LayersDone,
    RunStep,
    StepDone,
    StepItem,
    UnitRows,
)
from kvflow.engine.unit_messages import AskUnits, Restore, Restored, Units, UnitsRead
from kvflow.router.events import KVEvents

__all__ = [
    "Abort",
    "Admit",
    "AskLoan",
    "AskPush",
    "AskUnits",
    "AttachTier",
    "BlockCopy",
    "Connect",
    "Connected",
    "EndLoan",
    "ForgetPrefixes",
    "FromRank",
    "Gauges",
    "Generated",
    "KVChanged",
    "LayersDone",
    "Lend",
    "Lent",
    "Loaned",
    "PullRows",
    "PushRows",
    "Pushed",
    "RankFailed",
    "Readable",
    "Ready",
    "RequestFailed",
    "Restore",
    "Restored",
    "RowsPulled",
    "RowsPushed",
    "RunStep",
    "Shutdown",
    "Source",
    "StepDone",
    "StepItem",
    "ToRank",
    "TransferEnded",
    "UnitRows",
    "Units",
    "UnitsRead",
    "decode_from_rank",
    "decode_to_rank",
    "encode",
]


class Admit(Struct, frozen=True, tag=True):
    """To a decode engine: take over a request. What its own cache lacks of the prompt comes from
    `source`, of which the positions below `readable` are there; `Readable` says when there are
    more. Without a source the engine computes the prompt. If `lender` holds more of the prompt,
    `lender_tokens`, than this engine does, it may be asked for (`AskLoan`). `first_token` is None
    until prefill has sampled it. `may_keep`: whether others may use the rows afterwards."""

    request_id: str
    prompt: list[int]
    first_token: int | None
    sampling: SamplingParams
    source: Source | None
    readable: int
    salt: str | None = None
    lender: str = ""
    lender_tokens: int = 0
    may_keep: bool = True


class Readable(Struct, frozen=True, tag=True):
    """To a decode engine: the positions below `stop` of a request are computed, or of the last of
    them only the first `num_layers` layers; with the last position comes the first token."""

    request_id: str
    stop: int
    first_token: int | None = None
    num_layers: int | None = None


class ForgetPrefixes(Struct, frozen=True, tag=True):
    """To a decode engine: what it has computed so far is nobody's prefix any more."""


class Abort(Struct, frozen=True, tag=True):
    """To a decode rank: nobody listens to this request any more."""

    request_id: str


class Shutdown(Struct, frozen=True, tag=True):
    """To a rank: finish what runs and end."""


class Ready(Struct, frozen=True, tag=True):
    """From a rank: it serves a cache of this layout with this many blocks. `exports` describe its
    cache, and those of the ranks that it speaks for, to endpoints elsewhere, by rank; `endpoint`
    is the name of its own."""

    layout: dict[str, Any]
    num_blocks: dict[str, int]
    endpoint: str
    exports: dict[int, bytes]


class Generated(Struct, frozen=True, tag=True):
    """From a decode engine: one more token of a request. With the first one `cached_tokens` says
    how many of the prompt's tokens the engine had and did not compute, if it computed the others
    itself."""

    request_id: str
    sampled: Sampled
    finish_reason: str | None
    cached_tokens: int = 0


class RequestFailed(Struct, frozen=True, tag=True):
    """From a decode rank: the request ended without a result; its blocks are free again.
    `spoilt`: its tokens, if there is no telling whether their rows, which tiers hold under `salt`,
    are what they should be."""

    request_id: str
    error: str
    spoilt: list[int] = []
    salt: str | None = None


class Gauges(Struct, frozen=True, tag=True):
    """From a rank: numbers that go up and down, and numbers that only ever grow, by name."""

    values: dict[str, float]
    counters: dict[str, float] = {}


class RankFailed(Struct, frozen=True, tag=True):
    """From a rank: it cannot go on."""

    error: str


class KVChanged(Struct, frozen=True, tag=True):
    """From a decode engine: what its cache holds from now on, and what no more."""

    events: KVEvents


ToRank = (
    RunStep
    | AttachTier
    | Connect
    | PullRows
    | PushRows
    | Admit
    | Readable
    | Pushed
    | Loaned
    | Units
    | ForgetPrefixes
    | Lend
    | EndLoan
    | Abort
    | Shutdown
)
FromRank = (
    Ready
    | Connected
    | StepDone
    | LayersDone
    | RowsPulled
    | RowsPushed
    | AskPush
    | AskLoan
    | AskUnits
    | UnitsRead
    | Generated
    | TransferEnded
    | RequestFailed
    | Lent
    | KVChanged
    | Gauges
    | RankFailed
)


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
