"""The law of the merge of partial attention: equal to one softmax over the union of the shards.

The oracle is that softmax, in float64, of all tokens at once; it knows no shards and no lse.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor

from kvflow.comm import Comm, run_ranks
from kvflow.testing.images import LawError
from kvflow.transfers.operators import PartialAttention, ReduceScatter, merge_partials

AnyPartial = PartialAttention[Any]
Scatter = Callable[[Sequence[AnyPartial]], Sequence[AnyPartial]]
"""What each rank has -> what each rank ends with."""


@frozen(eq=False)
class Attention:
    """A problem: scores [q, h, n] and values [n, h, dv] in float64, and the shard (0..size-1) that
    holds each of the n tokens; -1 is a token that nobody attends to."""

    scores: Tensor
    values: Tensor
    shard: Tensor
    size: int

    def whole(self) -> Tensor:
        """Softmax attention over all tokens: float64 [q, h, dv], zeros where there are none."""
        return _softmax(self.scores, self.values, self.shard >= 0)

    def partial(self, shard: int, base: Literal["e", "2"], dtype: torch.dtype) -> AnyPartial:
        """What a rank with one shard has, worked out in float64 and rounded to `dtype`. An empty
        shard holds NaN where its output would be: nobody may read it."""
        mine = self.shard == shard
        out = _softmax(self.scores, self.values, mine)
        if not mine.any():
            out = torch.full_like(out, torch.nan)
        masked = self.scores.masked_fill(~mine, -torch.inf)
        lse = torch.logsumexp(masked, -1) if self.scores.shape[-1] else _nothing(self.scores)
        if base == "2":
            return PartialAttention(out.to(dtype), (lse / log(2.0)).to(dtype), "2")
        return PartialAttention(out.to(dtype), lse.to(dtype), "e")


def _nothing(scores: Tensor) -> Tensor:
    return scores.new_full(scores.shape[:2], -torch.inf)


def _softmax(scores: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    q, h, _ = scores.shape
    if not kept.any():
        return scores.new_zeros(q, h, values.shape[-1])
    weights = torch.softmax(scores[..., kept], -1)
    return torch.einsum("qhn,nhd->qhd", weights, values[kept])


def check_reduce_scatter(
    scatter: Scatter,
    problem: Attention,
    axis: Literal["head", "token"],
    counts: Sequence[int],
    *,
    base: Literal["e", "2"] = "e",
    dtype: torch.dtype = torch.float64,
) -> None:
    """Gives every rank its partial attention, lets `scatter` merge, and compares: what the ranks
    end with must be `merge_partials` of everything, bit for bit, and the plain softmax within the
    rounding of `dtype`. Raises `LawError` naming rank, token, head."""
    parts = [problem.partial(shard, base, dtype) for shard in range(problem.size)]
    merged = merge_partials(parts)
    whole, tolerance = problem.whole(), 64 * torch.finfo(dtype).eps
    scale = float(problem.values.abs().max()) if problem.values.numel() else 1.0
    dim, start = 1 if axis == "head" else 0, 0
    for rank, (mine, count) in enumerate(zip(scatter(parts), counts, strict=True)):
        for what, got, all_of in (("out", mine.out, merged.out), ("lse", mine.lse, merged.lse)):
            must = all_of.narrow(dim, start, count)
            if got.shape != must.shape or got.dtype != must.dtype:
                raise LawError(
                    f"rank {rank}: {what} is {got.dtype} {list(got.shape)}, must be {must.dtype} "
                    f"{list(must.shape)}"
                )
            if not torch.equal(got, must):
                at = (got != must).nonzero()[0].tolist()
                raise LawError(
                    f"rank {rank}: {what}{at} is {got[tuple(at)]}, the merge of all is "
                    f"{must[tuple(at)]}"
                )
        wrong = (mine.out.double() - whole.narrow(dim, start, count)).abs() > tolerance * scale
        if wrong.any() or mine.out.isnan().any():
            at = (wrong | mine.out.isnan()).nonzero()[0].tolist()
            raise LawError(
                f"rank {rank}: out{at} is {mine.out[tuple(at)]}, one softmax over all tokens is "
                f"{whole.narrow(dim, start, count)[tuple(at)]}"
            )
        start += count


def scatter_on_threads(make: Callable[[Comm], ReduceScatter[Any]]) -> Scatter:
    """Runs a `ReduceScatter` on every rank, a thread each. `make` builds the stage of one rank."""

    def scatter(parts: Sequence[AnyPartial]) -> Sequence[AnyPartial]:
        return run_ranks(len(parts), lambda comm: make(comm).execute(parts[comm.rank]))

    return scatter
