"""Attention over rows that have been brought together: the whole of it, or a shard's part.

A rank that holds some of a query's rows gives the softmax over those and the logarithm of its
denominator; `kvflow.transfers.operators.merge` makes the whole of such parts.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvflow.kernels.codec import decode_latent, latent_rank
from kvflow.layouts.record import Record
from kvflow.models.product import LANE, pad_to
from kvflow.models.reading import MAX_GATHERED, attend
from kvflow.models.selection import Group, group_size, group_sizes
from kvflow.transfers.operators.elementary import logarithm
from kvflow.transfers.operators.merge import PartialAttention

Natural = PartialAttention[Literal["e"]]
"""Partial attention with natural logarithms."""


def groups_of(rows: Tensor, counts: Tensor, topk: int) -> tuple[Group, ...]:
    """Queries by the size they are padded to: `rows` int64 ``[n, widest group]`` index rows, the
    first ``counts[i]`` of each are real."""
    sizes = torch.from_numpy(group_sizes(counts.numpy(), topk))
    groups = []
    for size in torch.unique(sizes).tolist():
        queries = torch.argwhere(sizes == size).flatten()
        groups.append(Group(queries, rows[queries, :size], counts[queries]))
    return tuple(groups)


def attend_rows(record: Record, packed: Tensor, queries: Tensor, groups: Sequence[Group]) -> Tensor:
    """Attention of queries ``[n, h, R + dr]`` over rows of `packed` uint8 ``[t, nbytes]`` as the
    groups say: ``[n, h, R]``. The bits are those of `attend_by_reading`."""
    rank = latent_rank(record)
    if not groups:
        return queries.new_zeros(*queries.shape[:2], rank)
    return attend(queries, decode_latent(record, packed, queries.dtype), groups, rank)


def attend_part(
    record: Record, packed: Tensor, queries: Tensor, index: Tensor, counts: Tensor, topk: int
) -> Natural:
    """Partial attention of queries ``[n, h, R + dr]``, already scaled, each over ``counts[i]``
    (int64 ``[n]``, at most topk, 0 included) rows of `packed` uint8 ``[t, nbytes]``; `index` int64
    names them, query after query. A query without rows gives zeros and an lse of -inf."""
    out = queries.new_zeros(*queries.shape[:2], latent_rank(record))
    lse = queries.new_full(queries.shape[:2], -torch.inf)
    some = counts.nonzero().flatten()
    if len(some):
        table = decode_latent(record, packed, queries.dtype)
        held = counts[some]
        width = group_size(int(held.max()), topk)
        # Padding repeats a row of its own: weight 0 does not hide what is NaN.
        nth = torch.minimum(torch.arange(width), held[:, None] - 1)
        rows = index[(held.cumsum(0) - held)[:, None] + nth]
        for g in groups_of(rows, held, topk):
            _attend_part(queries, table, Group(some[g.queries], g.rows, g.counts), out, lse)
    return PartialAttention(out, lse, "e")


def _attend_part(queries: Tensor, table: Tensor, group: Group, out: Tensor, lse: Tensor) -> None:
    """As `kvflow.models.reading.attend`, with the logarithm of the denominator."""
    num_heads, dim = queries.shape[1:]
    step = max(1, MAX_GATHERED // (group.size * dim))
    columns = torch.arange(group.size)
    for lo in range(0, len(group.queries), step):
        mine, rows = group.queries[lo : lo + step], group.rows[lo : lo + step]
        keys = table.index_select(0, rows.flatten()).view(len(rows), group.size, dim)
        q = pad_to(queries[mine].transpose(1, 2), LANE, dim=2).contiguous()
        scores = torch.bmm(keys, q).transpose(1, 2)[:, :num_heads].contiguous()
        unused = columns >= group.counts[lo : lo + step, None, None]
        scores.masked_fill_(unused, -torch.inf)
        top = scores.amax(-1)
        total = (scores - top[..., None]).exp().sum(-1)
        lse[mine] = top + logarithm(total.double(), "e").to(lse.dtype)
        out[mine] = torch.bmm(scores.softmax(-1), keys[..., : out.shape[2]])
