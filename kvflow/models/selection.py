"""Selection: the positions that each query of a step attends to.

Leader layers derive it once from their top-k; the layers that share it reuse the same object.
Each query's rows are padded to a size that depends on that query's position alone, so that its
attention has the same shape, hence the same bits, in every batch. Sizes, counts and whom to fetch
follow from positions, which the host knows: only what has been chosen is device data.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor

from kvflow.layouts.sharding import Ints
from kvflow.models.segment import Segment

SMALLEST_GROUP = 16

WHOLE = 2
"""A context is fetched whole when its queries' rows together are more than so many times it."""


@frozen(eq=False)
class Fetch:
    """Rows of one request to read: at `positions`, or the whole context for None."""

    request_idx: int
    positions: Tensor | None


@frozen(eq=False)
class Reads:
    """The rows of a table that some queries read, head by head: `rows` int64 ``[h * m * size]``,
    those of one head and query from its place in `begins` on. `where`: the same as a sparse matrix
    of zeros."""

    rows: Tensor
    begins: Tensor
    where: Tensor


@frozen(eq=False)
class Group:
    """Queries that read equally many rows: `queries` int64 ``[m]`` are local rows, `rows` int64
    ``[m, size]`` index the fetched rows, of which the first ``counts[i]`` are real.

    `is_full`: whether all rows of all queries are known to be real; `first`: the queries are known
    to be first, first + 1, ... What is derived from these is kept, as layers share it."""

    queries: Tensor
    rows: Tensor
    counts: Tensor
    is_full: bool = False
    first: int | None = None
    _reads: dict[tuple[object, ...], Reads] = field(init=False, factory=dict)

    @property
    def size(self) -> int:
        return self.rows.shape[1]

    @cached_property
    def unused(self) -> Tensor:
        """Which rows are not real: bool ``[m, size]``."""
        return torch.arange(self.size) >= self.counts[:, None]

    def places(self, part: slice) -> slice | Tensor:
        """The local rows of some of the queries, as an index."""
        if self.first is None:
            return self.queries[part]
        return slice(self.first + part.start, self.first + part.stop)

    def reads(self, part: slice, num_heads: int, table: Tensor) -> Reads:
        """What some of the queries read of a table of this shape."""
        key = part.start, part.stop, num_heads, table.shape[0], table.dtype
        if key not in self._reads:
            num = part.stop - part.start
            rows = self.rows[part].expand(num_heads, num, self.size).flatten()
            begins = torch.arange(0, rows.shape[0] + 1, self.size)
            zeros, shape = table.new_zeros(rows.shape), (num * num_heads, table.shape[0])
            where = torch.sparse_csr_tensor(begins, rows, zeros, shape, check_invariants=False)
            self._reads[key] = Reads(rows, begins[:-1], where)
        return self._reads[key]

    def moved(self, places: Tensor) -> "Group":
        """The same where row i of the table stands at ``places[i]``, int64 ``[t]``."""
        rows = places.index_select(0, self.rows.flatten()).view(self.rows.shape)
        return Group(self.queries, rows, self.counts, self.is_full, self.first)


@frozen(eq=False)
class Part:
    """Rows of a segment, by their places in it and in the step, whose queries read `size` rows."""

    segment_idx: int
    size: int
    within: Ints
    queries: Ints


@frozen(eq=False)
class Shape:
    """What is known of a step's selections before anything is chosen."""

    segments: tuple[Segment, ...]
    topk: int

    @cached_property
    def host_counts(self) -> Ints:
        """How many rows each query reads: int64 ``[n]``."""
        parts = [np.minimum(s.host + 1, self.topk) for s in self.segments]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @cached_property
    def counts(self) -> Tensor:
        return torch.from_numpy(self.host_counts)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The step's queries by size and segment, those of one size behind each other."""
        parts, start = [], 0
        for i, s in enumerate(self.segments):
            sizes = group_sizes(self.host_counts[start : start + len(s)], self.topk)
            for size in np.unique(sizes).tolist():
                within = np.flatnonzero(sizes == size)
                parts.append(Part(i, size, within, within + start))
            start += len(s)
        return tuple(sorted(parts, key=lambda part: part.size))

    @cached_property
    def whole(self) -> frozenset[int]:
        """Indices of the segments whose context is fetched whole."""
        total = [0] * len(self.segments)
        for part in self.parts:
            total[part.segment_idx] += part.size * len(part.within)
        return frozenset(i for i, s in enumerate(self.segments) if total[i] > WHOLE * s.context_len)


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
    shape: Shape | None = None

    @classmethod
    def of(
        cls,
        chosen: Sequence[Tensor],
        segments: Sequence[Segment],
        topk: int,
        shape: Shape | None = None,
    ) -> "Selection":
        """From each segment's chosen positions; `shape` spares deriving it again."""
        shape = shape or Shape(tuple(segments), topk)
        return cls(shape.segments, tuple(chosen), shape.counts, topk, shape)

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        return self._read_plan[0]

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._read_plan[1]

    @cached_property
    def _read_plan(self) -> tuple[tuple[Fetch, ...], tuple[Group, ...]]:
        shape = self.shape or Shape(self.segments, self.topk)
        fetches, start = [], 0
        begins: dict[int, int] = {}
        for i in sorted(shape.whole):
            fetches.append(Fetch(self.segments[i].request_idx, None))
            begins[i] = start
            start += self.segments[i].context_len
        groups = []
        for size, parts in groupby(shape.parts, lambda part: part.size):
            mine, rows = list(parts), []
            for part in mine:
                if part.segment_idx in begins:
                    rows.append(self._rows(part) + begins[part.segment_idx])
                    continue
                request_idx = self.segments[part.segment_idx].request_idx
                fetches.append(Fetch(request_idx, self._rows(part).flatten()))
                count = size * len(part.within)
                rows.append(torch.arange(start, start + count).view(-1, size))
                start += count
            groups.append(_group(shape, mine, rows[0] if len(rows) == 1 else torch.cat(rows)))
        return tuple(fetches), tuple(groups)

    def _rows(self, part: Part) -> Tensor:
        """Positions that a part's queries read: int64 ``[m, size]``, zeros beyond the real ones."""
        chosen = self.chosen[part.segment_idx]
        if len(part.within) < len(chosen):
            chosen = chosen[torch.from_numpy(part.within)]
        missing = part.size - chosen.shape[1]
        return F.pad(chosen, (0, missing)) if missing > 0 else chosen[:, : part.size]


def group_size(count: int, topk: int) -> int:
    """Rows a query with `count` selected positions is padded to, at most topk: a multiple of a
    quarter of the next power of two, so that few sizes waste little."""
    step = max(SMALLEST_GROUP, (1 << max(count - 1, 0).bit_length()) // 4)
    return min(topk, -(-max(count, 1) // step) * step)


def group_sizes(counts: Ints, topk: int) -> Ints:
    """`group_size` of each count."""
    exponents = np.frexp(np.maximum(counts - 1, 0))[1].astype(np.int64)
    steps = np.maximum(SMALLEST_GROUP, (np.int64(1) << exponents) // 4)
    sizes: Ints = np.minimum(topk, -(-np.maximum(counts, 1) // steps) * steps)
    return sizes


def _group(shape: Shape, parts: Sequence[Part], rows: Tensor) -> Group:
    queries = np.concatenate([part.queries for part in parts])
    counts = shape.host_counts[queries]
    is_full = bool(np.all(counts == rows.shape[1]))
    lowest = int(queries[0])
    follow = np.array_equal(queries, np.arange(lowest, lowest + len(queries)))
    first = lowest if follow else None
    return Group(torch.from_numpy(queries), rows, torch.from_numpy(counts), is_full, first)
