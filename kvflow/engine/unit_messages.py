"""What a decode engine and its front say about rows in host tiers. See `kvflow.engine.messages`."""

from msgspec import Struct

from kvflow.engine.step_messages import UnitRows


class AskUnits(Struct, frozen=True, tag=True):
    """From a decode engine: a request of these tokens holds its first `start` positions and blocks
    for all; have a tier keep what it has of the others. `Units` answers it."""

    request_id: str
    tokens: list[int]
    start: int
    salt: str | None


class Units(Struct, frozen=True, tag=True):
    """To a decode engine: what it asked for, in units of the tier of this name, which keeps them
    until `UnitsRead`; None if there is nothing. `num_disk` of the positions came from files."""

    request_id: str
    tier: str
    rows: UnitRows | None
    num_disk: int = 0


class UnitsRead(Struct, frozen=True, tag=True):
    """From a decode engine: none of its ranks reads the request's units any more."""

    request_id: str


class Restore(Struct, frozen=True):
    """To every rank of a decode group: bring rows from units of a tier into these blocks."""

    request_id: str
    tier: str
    rows: UnitRows
    tables: dict[str, list[int]]


class Restored(Struct, frozen=True):
    """From every rank of a decode group: its part of a `Restore` is over. `refused`: the units did
    not hold, after the reading, what they should."""

    request_id: str
    refused: bool
