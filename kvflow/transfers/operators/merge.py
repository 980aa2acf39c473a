"""The merge of partial attention over token shards, and the ReduceScatter that carries it.

A rank that attends over its own shard of the context knows the softmax of that shard and the
logarithm of its denominator (lse). With m the largest lse and w_r = exp(lse_r - m), the whole is

    out = sum_r (w_r / sum_s w_s) out_r,   lse = m + log sum_s w_s.

Weights are float64; shards are added one after the other in rank order. A row's bits depend on
nothing but the row, and a shard without tokens (lse = -inf) changes none of them, whatever its
`out` holds.
"""

from collections.abc import Sequence
from math import log
from typing import Generic, Literal, TypeVar

import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.errors import LayoutError
from kvflow.transfers.operators.elementary import exponential, logarithm

E = Literal["e"]
Two = Literal["2"]
Base = TypeVar("Base", E, Two)
_LN_2 = log(2.0)
_FLOATS = (torch.float32, torch.float64)


@frozen(eq=False)
class PartialAttention(Generic[Base]):
    """Attention over some of the tokens.

    out: [q, h, dv]; lse: [q, h], the logarithm to `base` of the softmax denominator, -inf where no
    token was attended to. Both float32 or both float64, on one device. The base is part of the
    type: two bases do not merge. Raises `LayoutError` for anything else."""

    out: Tensor
    lse: Tensor
    base: Base = field()

    def __attrs_post_init__(self) -> None:
        if self.base not in ("e", "2"):
            raise LayoutError(f"the log base is {self.base!r}, must be 'e' or '2'")
        if self.out.ndim != 3 or self.lse.shape != self.out.shape[:2]:
            raise LayoutError(
                f"out is {list(self.out.shape)} and lse {list(self.lse.shape)}, must be "
                f"[q, h, dv] and [q, h]"
            )
        if self.out.dtype not in _FLOATS or self.lse.dtype != self.out.dtype:
            raise LayoutError(
                f"out is {self.out.dtype} and lse {self.lse.dtype}, must both be one of "
                f"{list(_FLOATS)}"
            )
        if self.out.device != self.lse.device:
            raise LayoutError(f"out is on {self.out.device}, lse on {self.lse.device}")

    def to_base_e(self) -> "PartialAttention[E]":
        """The same with natural logarithms; itself if it has them."""
        lse = self.lse * _LN_2 if self.base == "2" else self.lse
        return PartialAttention(self.out, lse, "e")

    def to_base_2(self) -> "PartialAttention[Two]":
        """The same with logarithms to base 2; itself if it has them."""
        lse = self.lse / _LN_2 if self.base == "e" else self.lse
        return PartialAttention(self.out, lse, "2")


def merge_partials(parts: Sequence[PartialAttention[Base]]) -> PartialAttention[Base]:
    """Attention over the union of disjoint shards, added in the order given (rank order).

    A row that is empty in every part gives zeros and lse -inf. An lse of +inf or NaN is no
    logarithm of a denominator: to look for one costs a pass over all rows, so it is not refused,
    and its row of the result (out and lse) is NaN, no other. Raises `LayoutError` for no parts,
    or parts of different shape, dtype or base."""
    if not parts:
        raise LayoutError("a merge needs one or more parts, got 0")
    first = parts[0]
    for i, part in enumerate(parts):
        for what, a, b in (
            ("base", first.base, part.base),
            ("dtype", first.out.dtype, part.out.dtype),
            ("shape", list(first.out.shape), list(part.out.shape)),
        ):
            if a != b:
                raise LayoutError(f"parts 0 and {i} do not merge: {what} is {a} here, {b} there")
    lses = [part.lse.double() for part in parts]
    top = lses[0]
    for lse in lses[1:]:
        top = torch.maximum(top, lse)
    shift = torch.where(top == -torch.inf, 0.0, top)
    weights = [exponential(lse - shift, first.base) for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    none = total == 0
    total = torch.where(none, 1.0, total)
    out = torch.zeros_like(first.out)
    for part, weight in zip(parts, weights, strict=True):
        share = (weight / total).to(out.dtype)[..., None]
        out = out + torch.where(share == 0, 0.0, share * part.out)
    lse = torch.where(none, -torch.inf, shift + logarithm(total, first.base))
    return PartialAttention(out, lse.to(out.dtype), first.base)


@frozen(eq=False)
class ReduceScatter(Generic[Base]):
    """Partial attention over each rank's shard -> the whole attention, of its own heads or tokens
    on each rank.

    Law: the parts that the ranks end with, side by side along `axis` in rank order, are
    `merge_partials` of what all ranks had, bit for bit. Rank r ends with ``counts[r]`` heads
    ("head") or tokens ("token"), 0 included. One all-to-all carries each partial value once;
    nothing is summed on the way. Raises `LayoutError` unless there is one count a rank."""

    comm: Comm
    axis: Literal["head", "token"]
    counts: tuple[int, ...] = field(converter=tuple)
    base: Base = field()

    def __attrs_post_init__(self) -> None:
        if self.axis not in ("head", "token"):
            raise LayoutError(f"axis is {self.axis!r}, must be 'head' or 'token'")
        if len(self.counts) != self.comm.size or any(n < 0 for n in self.counts):
            raise LayoutError(
                f"counts {list(self.counts)} must be {self.comm.size} numbers of at least 0, "
                f"one a rank"
            )
        if self.base not in ("e", "2"):
            raise LayoutError(f"the log base is {self.base!r}, must be 'e' or '2'")

    def execute(self, partial: PartialAttention[Base]) -> PartialAttention[Base]:
        """A collective. [q, h, dv] of this rank's shard -> [q, counts[rank], dv] or
        [counts[rank], h, dv] of all shards. Raises `LayoutError` before it starts for another
        base, or sizes that the counts do not add up to."""
        dim = 1 if self.axis == "head" else 0
        if partial.base != self.base:
            raise LayoutError(
                f"the partial attention has log base {partial.base}, the stage {self.base}"
            )
        if partial.lse.shape[dim] != sum(self.counts):
            raise LayoutError(
                f"{partial.lse.shape[dim]} {self.axis}s to scatter, counts "
                f"{list(self.counts)} add up to {sum(self.counts)}"
            )
        both = torch.cat([partial.out, partial.lse[..., None]], dim=-1).transpose(0, dim)
        arrived, _ = self.comm.all_to_all(both.contiguous(), self.counts)
        mine = self.counts[self.comm.rank]
        shards = arrived.view(self.comm.size, mine, *both.shape[1:]).transpose(1, 1 + dim)
        return merge_partials(
            [PartialAttention(s[..., :-1], s[..., -1], self.base) for s in shards.unbind()]
        )
