"""Selection: what a top-k means for the rows that attention reads.

Leader layers derive it once from their top-k; the layers that share it reuse it as it is. Each
query's rows are padded to a size that depends on that query alone, so that its attention has the
same shape, hence the same bits, in every batch.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvflow.models.kvstep import KVStep, Segment

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
    """What to fetch, in order, and which of the fetched rows each query reads."""

    fetches: tuple[Fetch, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, chosen: Sequence[Tensor], segments: Sequence[Segment], topk: int) -> "Selection":
        """From each segment's chosen positions ``[m, k]`` (ascending, then zeros).

        A context is fetched whole when that is no more than its queries' rows together."""
        fetches, rows, counts, start = [], [], [], 0
        width = group_size(max((c.shape[1] for c in chosen), default=0), topk)
        for segment, positions in zip(segments, chosen, strict=True):
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
            counts.append((segment.positions + 1).clamp(max=topk))
            start += num_fetched
        if not rows:
            return cls((), ())
        return cls(tuple(fetches), _grouped(torch.cat(rows), torch.cat(counts), topk))

    def read(self, component: str, kv: KVStep) -> Tensor | None:
        """The fetched packed rows of a component, concatenated; None when there are none."""
        if not self.fetches:
            return None
        return torch.cat([kv.rows(component, f.request_idx, f.positions) for f in self.fetches])


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
