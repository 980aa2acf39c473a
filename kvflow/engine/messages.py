"""What engines and their ranks say to each other. msgpack on every wire, threads included.

Only logical positions cross the wire, and block ids solely inside a binding: the tables of the
very engine a message goes to, or the source tables a transfer plan is bound with.
"""

from typing import Any

import msgspec
from msgspec import Struct

from kvflow.engine.api import SamplingParams
from kvflow.engine.sampling import Sampled
from kvflow.router.events import KVEvents


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
    what they should; they must be computed anew. `failed` says why requests have no token."""

    step_id: int
    rank: int
    sampled: dict[str, Sampled]
    seconds: float
    refused: list[str] = []
    move_seconds: float = 0.0
    failed: dict[str, str] = {}


class LayersDone(Struct, frozen=True, tag=True):
    """From a prefill rank: its part of the first `num_layers` layers of the step that runs is in
    its blocks."""

    step_id: int
    rank: int
    num_layers: int


class AttachTier(Struct, frozen=True, tag=True):
    """To a prefill rank: map the host tier's memory, units of `unit_size` tokens."""

    name: str
    unit_size: int
    num_units: int


class Source(Struct, frozen=True):
    """Where the positions [start, stop) of a request lie: in blocks of an engine, by its block
    tables. `digest` is that of the plan which moves them to the receiver, as the front derived
    it."""

    engine: str
    tables: dict[str, list[int]]
    start: int
    stop: int
    digest: str


class Connect(Struct, frozen=True, tag=True):
    """To a rank: another engine's layout, its pool sizes, and its ranks' exports."""

    engine: str
    layout: dict[str, Any]
    num_blocks: dict[str, int]
    exports: dict[int, bytes]


class PullRows(Struct, frozen=True, tag=True):
    """To a rank: bring the positions [start, stop) of a request from a source into these blocks,
    of these components; of none named, of all."""

    request_id: str
    source: Source
    start: int
    stop: int
    tables: dict[str, list[int]]
    components: list[str] = []


class RowsPulled(Struct, frozen=True, tag=True):
    """From a prefill rank: its part of a `PullRows` is over, and nothing of it can still arrive.
    `report` is None and `error` says why if it failed."""

    request_id: str
    rank: int
    report: dict[str, Any] | None
    error: str | None


class PushRows(Struct, frozen=True, tag=True):
    """To a prefill rank: bring the positions [start, stop) of a request from these blocks into
    those of a reader, by its `target` tables."""

    request_id: str
    reader: str
    start: int
    stop: int
    tables: dict[str, list[int]]
    target: dict[str, list[int]]
    components: list[str] = []


class RowsPushed(Struct, frozen=True, tag=True):
    """From a prefill rank: its part of a `PushRows` is over, and nothing of it can still arrive."""

    request_id: str
    rank: int
    report: dict[str, Any] | None
    error: str | None


class AskPush(Struct, frozen=True, tag=True):
    """From a decode engine: have an engine push the positions [start, stop) of a request into
    these blocks. `Pushed` answers it."""

    request_id: str
    engine: str
    start: int
    stop: int
    target: dict[str, list[int]]
    components: list[str] = []


class Pushed(Struct, frozen=True, tag=True):
    """To a decode engine: what it asked to be pushed is there on all its ranks, or has failed and
    can arrive no more."""

    request_id: str
    report: dict[str, Any] | None
    error: str | None


class Admit(Struct, frozen=True, tag=True):
    """To a decode engine: take over a request. Its prompt's rows come from `sources`, each behind
    what those before it and the engine's own cache have; of the last one the positions below
    `readable` are there, `Readable` says when there are more. Without sources the engine computes
    the prompt. `first_token` is None until prefill has sampled it."""

    request_id: str
    prompt: list[int]
    first_token: int | None
    sampling: SamplingParams
    sources: list[Source]
    readable: int
    salt: str | None = None


class Readable(Struct, frozen=True, tag=True):
    """To a decode engine: the positions below `stop` of a request are computed, or of the last of
    them only the first `num_layers` layers; with the last position comes the first token."""

    request_id: str
    stop: int
    first_token: int | None = None
    num_layers: int | None = None


class Lend(Struct, frozen=True, tag=True):
    """To a decode engine: keep what is known of this prompt for a reader, until `EndLoan`."""

    loan_id: str
    prompt: list[int]
    salt: str | None


class EndLoan(Struct, frozen=True, tag=True):
    """To a decode engine: nobody reads these rows any more."""

    loan_id: str


class Lent(Struct, frozen=True, tag=True):
    """From a decode engine: the first `length` positions lie in these blocks; 0 if it has none,
    and then nothing is kept."""

    loan_id: str
    tables: dict[str, list[int]]
    length: int


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


class TransferEnded(Struct, frozen=True, tag=True):
    """From a decode engine: it will not read the request's blocks in `engine` again. `report` is
    None and `error` says why if the transfer failed or never began; `num_held` are the positions
    that it had already and did not ask for."""

    request_id: str
    engine: str
    src_ranks: list[int]
    report: dict[str, Any] | None
    error: str | None
    num_held: int = 0


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
    | Lend
    | EndLoan
    | Abort
    | Shutdown
)
FromRank = (
    Ready
    | StepDone
    | LayersDone
    | RowsPulled
    | RowsPushed
    | AskPush
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
