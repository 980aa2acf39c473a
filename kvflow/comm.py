"""Comm: the few collectives that models and gathers need, and who offers them.

Row counts may differ by rank, zero included. A rank with nothing to say still makes every call.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """A group of `size` ranks seen from `rank`; tensors are rows ``[n, ...]``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of every rank, in rank order: ``[sum(counts), ...]``. `counts` is known to all
        ranks alike and ``counts[rank] == len(rows)``."""
        ...

    def all_to_all(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Sends ``counts[r]`` consecutive rows to rank r. The split sizes are exchanged first.
        Returns the rows received, in rank order, and how many came from each rank."""
        ...

    def barrier(self) -> None: ...
