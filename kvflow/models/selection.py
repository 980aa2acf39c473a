"""Selection: the positions that each query of a step attends to.

Leader layers derive it once from their top-k; the layers that share it reuse the same object.
Each query's rows are padded to a size that depends on that query alone, so that its attention has
the same shape, hence the same bits, in every batch.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import frozen
from torch import Tensor

from kvflow.models.segment import Segment

SMALLEST_GROUP = 16


@frozen(eq=False)
class Fetch:
    """Rows of one request to read: at `positions`, or the whole context for None."""

    request_idx: int
    positions: Tensor | None


@frozen(eq=False)
class Group:
    """Queries that read equally many rows: `queries` int64 ``[m]`` are local rows, `rows` int64
    ``[m, size]`` index the fetched rows, of which the first ``counts[i]`` are real."""

    queries: Tensor
    rows: Tensor
    counts: Tensor

    @property
    def size(self) -> int:
        return self.rows.shape[1]


@frozen(eq=False)
class Selection:
    """What each local query attends to, by segment.

    chosen: for every segment int64 ``[m, k]``, ascending positions, then zeros. counts: int64
    ``[n]`` over all segments: how many of a query's positions are real. topk: the most there can
    be. `fetches` and `groups` say it for somebody who reads rows of one request after another:
    what to fetch, in order, and which of the fetched rows each query reads."""

    segments: tuple[Segment, ...]
    chosen: tuple[Tensor, ...]
    counts: Tensor
    topk: int

    @classmethod
    def of(cls, chosen: Sequence[Tensor], segments: Sequence[Segment], topk: int) -> "Selection":
        """From each segment's chosen positions."""
        counts = [(s.positions + 1).clamp(max=topk) for s in segments]
        joined = torch.cat(counts) if counts else torch.empty(0, dtype=torch.int64)
        return cls(tuple(segments), tuple(chosen), joined, topk)

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        return self._read_plan[0]

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._read_plan[1]

    @cached_property
    def _read_plan(self) -> tuple[tuple[Fetch, ...], tuple[Group, ...]]:
        """A context is fetched whole when that is no more than its queries' rows together."""
        fetches, rows, start = [], [], 0
        width = group_size(max((c.shape[1] for c in self.chosen), default=0), self.topk)
        for segment, positions in zip(self.segments, self.chosen, strict=True):
            if len(segment) == 0:
                continue
            if positions.numel() >= segment.context_len:
                fetches.append(Fetch(segment.request_idx, None))
                index, num_fetched = positions, segment.context_len
            else:
                fetches.append(Fetch(segment.request_idx, positions.flatten()))
                index, num_fetched = torch.arange(positions.numel()), positions.numel()
                index = index.view(positions.shape)
            padding = index.new_zeros(len(index), width - index.shape[1])
            rows.append(torch.cat([index, padding], 1) + start)
            start += num_fetched
        if not rows:
            return (), ()
        return tuple(fetches), _grouped(torch.cat(rows), self.counts, self.topk)


def group_size(count: int, topk: int) -> int:
    """Rows a query with `count` selected positions is padded to: a power of two, or topk."""
    return min(topk, max(SMALLEST_GROUP, 1 << max(count - 1, 0).bit_length()))


def _grouped(rows: Tensor, counts: Tensor, topk: int) -> tuple[Group, ...]:
    sizes = torch.tensor([group_size(n, topk) for n in counts.tolist()])
    groups = []
    for size in torch.unique(sizes).tolist():
        queries = (sizes == size).nonzero().flatten()
        groups.append(Group(queries, rows[queries, :size], counts[queries]))
    return tuple(groups)
