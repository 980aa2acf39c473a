"""Comm: the few collectives that models and gathers need.

Row counts may differ by rank, zero included. A rank with nothing to say still makes every call.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvflow.errors import KvflowError


class CommError(KvflowError, RuntimeError):
    """A collective that the ranks of a group did not make alike, or not at all."""


class PeerError(CommError):
    """Another rank of the group raised or left, so this rank's collective cannot complete."""


class Comm(Protocol):
    """A group of `size` ranks seen from `rank`; tensors are rows ``[n, ...]`` of any dtype."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of every rank, in rank order: ``[sum(counts), ...]``. `counts` is known to all
        ranks alike and ``counts[rank] == len(rows)``."""
        ...

    def all_to_all(
        self, rows: Tensor, counts: Sequence[int], received: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """Sends ``counts[r]`` consecutive rows to rank r. Returns the rows received, in rank
        order, and how many came from each rank. The split sizes are exchanged first, unless all
        ranks say what they will receive: `received`, given by all of them or by none."""
        ...

    def barrier(self) -> None: ...

    def channel(self) -> "Comm":
        """A further group of the same ranks, whose collectives have an order of their own: they
        may run, on another thread, while those of this group do. A collective."""
        ...


def check_rank(rank: int, size: int) -> None:
    """Raises `CommError` unless ``0 <= rank < size``."""
    if not 0 <= rank < size:
        raise CommError(f"rank {rank} of a group of {size}, must be in [0, {size})")


def check_counts(op: str, counts: Sequence[int], size: int) -> None:
    """Raises `CommError` unless `counts` holds one non-negative count per rank."""
    if len(counts) != size or any(c < 0 for c in counts):
        raise CommError(
            f"{op}: counts {list(counts)}, must be {size} non-negative numbers, one per rank"
        )


def check_all_gather(rows: Tensor, counts: Sequence[int], rank: int) -> None:
    """Raises `CommError` when the group-wide `counts` and this rank's rows disagree."""
    if counts[rank] != len(rows):
        raise CommError(
            f"all_gather: rank {rank} has {len(rows)} rows, counts say {counts[rank]}; "
            f"they must be equal"
        )


def check_all_to_all(rows: Tensor, counts: Sequence[int]) -> None:
    """Raises `CommError` unless the counts add up to the rows."""
    if sum(counts) != len(rows):
        raise CommError(
            f"all_to_all: counts {list(counts)} add up to {sum(counts)}, "
            f"rows are {len(rows)}; they must be equal"
        )


def check_received(received: Sequence[int], expected: Sequence[int]) -> None:
    """Raises `CommError` unless the peers send what this rank expects."""
    if list(received) != list(expected):
        raise CommError(
            f"all_to_all: this rank expects {list(expected)} rows, its peers send "
            f"{list(received)}; they must be equal"
        )
