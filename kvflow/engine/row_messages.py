"""What engines say about rows that move between them. See `kvflow.engine.messages`."""

from typing import Any

from msgspec import Struct


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


class Connected(Struct, frozen=True, tag=True):
    """From a rank, for its group: all ranks of an engine can be reached."""

    engine: str


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


class AskLoan(Struct, frozen=True, tag=True):
    """From a decode engine: have a lender keep what it knows of a request's prompt. `Loaned`
    answers it."""

    request_id: str
    lender: str


class Loaned(Struct, frozen=True, tag=True):
    """To a decode engine: what it asked to be lent, None if there is nothing."""

    request_id: str
    source: Source | None


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
