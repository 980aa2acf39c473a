"""SubComm: some ranks of a group as a group of their own, without a further connection."""

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen
from torch import Tensor

from kvflow.comm.protocol import Comm, CommError, check_all_gather, check_all_to_all, check_counts


@frozen(eq=False)
class SubComm:
    """The group of `ranks` (ascending, this one among them) inside `parent`.

    Every collective is one of the parent in which ranks send rows to their own sub-group only. So
    all ranks of the parent, each a member of one sub-group, make the same calls at the same time;
    how many rows is each sub-group's own business."""

    parent: Comm
    ranks: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        ordered = all(a < b for a, b in pairwise(self.ranks))
        inside = all(0 <= r < self.parent.size for r in self.ranks)
        if not ordered or not inside or self.parent.rank not in self.ranks:
            raise CommError(
                f"sub-group {list(self.ranks)} of rank {self.parent.rank}: ranks must ascend in "
                f"[0, {self.parent.size}) and hold this one"
            )

    @property
    def rank(self) -> int:
        return self.ranks.index(self.parent.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        check_counts("all_gather", counts, self.size)
        check_all_gather(rows, counts, self.rank)
        copies = rows.repeat(self.size, *[1] * (rows.dim() - 1))
        sent = self._widened([len(rows)] * self.size)
        return self.parent.all_to_all(copies, sent, self._widened(counts))[0]

    def all_to_all(
        self, rows: Tensor, counts: Sequence[int], received: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        check_counts("all_to_all", counts, self.size)
        check_all_to_all(rows, counts)
        expected = None if received is None else self._widened(received)
        got, came = self.parent.all_to_all(rows, self._widened(counts), expected)
        return got, [came[r] for r in self.ranks]

    def barrier(self) -> None:
        self.parent.barrier()

    def channel(self) -> "SubComm":
        return SubComm(self.parent.channel(), self.ranks)

    def _widened(self, counts: Sequence[int]) -> list[int]:
        """Counts by rank of the parent: none for those outside."""
        wide = [0] * self.parent.size
        for rank, count in zip(self.ranks, counts, strict=True):
            wide[rank] = count
        return wide


def consecutive_group(comm: Comm, size: int) -> SubComm:
    """The sub-group of `size` consecutive ranks that this one lies in. Raises `CommError` for a
    size that does not divide the ranks."""
    if size < 1 or comm.size % size:
        raise CommError(f"sub-groups of {size} ranks must divide a group of {comm.size}")
    first = comm.rank // size * size
    return SubComm(comm, tuple(range(first, first + size)))
