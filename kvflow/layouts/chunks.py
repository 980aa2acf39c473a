"""Shardings that deal consecutive chunks of a bounded interval: PCP's balanced chunks, and plain
contiguous ranges."""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.sharding import (
    ANY_STOP,
    Ints,
    IntsLike,
    Runs,
    as_ints,
    check_interval,
    interval_text,
    positions_of,
    range_of,
    shards_of,
)
from kvflow.layouts.values import integer, positive


class _Chunked(ABC):
    """Shared by the shardings that deal consecutive chunks: chunk k is positions
    ``[edges[k], edges[k+1])``, lies on shard ``chunk_shard[k]`` at local index ``chunk_local[k]``.
    """

    num_shards: int
    start: int
    stop: int

    @property
    @abstractmethod
    def edges(self) -> Ints:
        """The borders of the chunks, first to last."""

    @property
    @abstractmethod
    def chunk_shard(self) -> Ints:
        """The shard of each chunk."""

    @property
    def chunk_local(self) -> Ints:
        sizes, shard = np.diff(self.edges), self.chunk_shard
        local = np.zeros_like(sizes)
        for s in range(self.num_shards):
            mine = shard == s
            local[mine] = np.cumsum(sizes[mine]) - sizes[mine]
        return local

    @property
    def period(self) -> int:
        return 1

    def _chunk(self, positions: Ints) -> Ints:
        return np.searchsorted(self.edges, positions, side="right").astype(np.int64) - 1

    def owner(self, positions: IntsLike) -> Ints:
        return self.chunk_shard[self._chunk(positions_of(self, positions))]

    def local(self, positions: IntsLike) -> Ints:
        t = positions_of(self, positions)
        k = self._chunk(t)
        return self.chunk_local[k] + t - self.edges[k]

    def token(self, shard: IntsLike, local: IntsLike) -> Ints:
        s, j = np.broadcast_arrays(shards_of(self, shard), as_ints(local))
        held = self.local_len(self.stop, s)
        bad = (j < 0) | (j >= held)
        if bad.any():
            raise LayoutError(
                f"local index {int(j[bad][0])} of shard {int(s[bad][0])} is outside "
                f"[0, {int(held[bad][0])}) in {self}"
            )
        first, t = self.chunk_local, np.zeros(s.shape, np.int64)
        for k, owner in enumerate(self.chunk_shard):
            here = (s == owner) & (j >= first[k])  # what lies beyond, a later chunk sets again
            t[here] = self.edges[k] + j[here] - first[k]
        return t

    def local_len(self, length: int, shard: IntsLike) -> Ints:
        _, length = range_of(self, self.start, length)
        below = np.clip(length - self.edges[:-1], 0, np.diff(self.edges))
        total = np.bincount(self.chunk_shard, below, self.num_shards).astype(np.int64)
        return total[shards_of(self, shard)]

    def runs(self, start: int, stop: int) -> Runs:
        """One run for each chunk that meets the range."""
        start, stop = range_of(self, start, stop)
        low, high = np.maximum(self.edges[:-1], start), np.minimum(self.edges[1:], stop)
        kept = np.flatnonzero(low < high)
        local = (self.chunk_local + low - self.edges[:-1])[kept]
        shard = self.chunk_shard[kept]
        order = np.lexsort((local, shard))
        return Runs(
            shard[order],
            low[kept][order],
            np.ones(len(kept), np.int64),
            local[order],
            (high - low)[kept][order],
        )

    def borders(self, start: int, stop: int, stride: int) -> Ints:
        start, stop = range_of(self, start, stop)
        inside = np.unique(self.edges)
        return inside[(inside > start) & (inside < stop)]


@frozen
class BalancedChunks(_Chunked):
    """PCP: the positions ``[start, stop)`` of one request in one step, cut into 2P chunks; shard r
    takes chunks r and 2P-1-r, so causal work is balanced (arXiv 2411.01783).

    ``form="even"`` deals chunks whose sizes differ by at most 1; the remainder goes to the ranks
    in turn, beginning with rank ``rotate mod P``, so that shard sizes differ by at most 1 too. With
    `rotate` = the number of tokens of the step before this request, the loads of the whole step
    differ by at most 1. ``form="ceil"`` is vLLM's: chunks of ceil(q/2P), short tails at the end.

    >>> [int(n) for n in BalancedChunks(4, 0, 10).local_len(10, range(4))]
    [3, 3, 2, 2]
    """

    num_shards: int = field(converter=integer, validator=positive)
    start: int = field(default=0, converter=integer)
    stop: int = field(default=0, converter=integer)
    form: Literal["even", "ceil"] = "even"
    rotate: int = field(default=0, converter=integer)

    def __attrs_post_init__(self) -> None:
        check_interval(self, self.start, self.stop)
        if self.form not in ("even", "ceil"):
            raise LayoutError(f"BalancedChunks.form {self.form!r}, must be 'even' or 'ceil'")
        if self.stop == ANY_STOP:
            raise LayoutError("BalancedChunks needs a bounded interval, stop is missing")

    @property
    def edges(self) -> Ints:
        q, chunks = self.stop - self.start, 2 * self.num_shards
        if self.form == "ceil":
            size = -(-q // chunks)
            return self.start + np.minimum(np.arange(chunks + 1, dtype=np.int64) * size, q)
        base, rest = divmod(q, chunks)
        turn = (
            np.arange(self.num_shards, dtype=np.int64) - self.rotate % self.num_shards
        ) % self.num_shards
        late = (turn < rest).astype(np.int64)
        early = (turn + self.num_shards < rest).astype(np.int64)
        sizes = base + np.concatenate([early, late[::-1]])
        return np.concatenate([[self.start], self.start + np.cumsum(sizes)])

    @property
    def chunk_shard(self) -> Ints:
        ranks = np.arange(self.num_shards, dtype=np.int64)
        return np.concatenate([ranks, ranks[::-1]])

    def __str__(self) -> str:
        form = "" if self.form == "even" else f",{self.form}"
        rotate = f",rotate={self.rotate}" if self.rotate else ""
        return f"balanced({self.num_shards},{interval_text(self.start, self.stop)}{form}{rotate})"


@frozen
class Contiguous(_Chunked):
    """``[start, stop)`` cut into `num_shards` consecutive ranges; sizes differ by at most 1, the
    larger ones first."""

    num_shards: int = field(converter=integer, validator=positive)
    start: int = field(default=0, converter=integer)
    stop: int = field(default=0, converter=integer)

    def __attrs_post_init__(self) -> None:
        check_interval(self, self.start, self.stop)
        if self.stop == ANY_STOP:
            raise LayoutError("Contiguous needs a bounded interval, stop is missing")

    @property
    def edges(self) -> Ints:
        base, rest = divmod(self.stop - self.start, self.num_shards)
        k = np.arange(self.num_shards + 1, dtype=np.int64)
        return self.start + k * base + np.minimum(k, rest)

    @property
    def chunk_shard(self) -> Ints:
        return np.arange(self.num_shards, dtype=np.int64)

    def __str__(self) -> str:
        return f"contiguous({self.num_shards},{interval_text(self.start, self.stop)})"
