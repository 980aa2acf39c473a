"""LocalComm: a group of one."""

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from kvflow.comm.protocol import check_all_gather, check_all_to_all, check_counts, check_received


@frozen
class LocalComm:
    """The group whose only rank is this one; every collective returns a copy of its input."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        check_counts("all_gather", counts, 1)
        check_all_gather(rows, counts, 0)
        return rows.clone()

    def all_to_all(
        self, rows: Tensor, counts: Sequence[int], received: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        check_counts("all_to_all", counts, 1)
        check_all_to_all(rows, counts)
        if received is not None:
            check_received(counts, received)
        return rows.clone(), [len(rows)]

    def barrier(self) -> None:
        return None

    def channel(self) -> "LocalComm":
        return LocalComm()
