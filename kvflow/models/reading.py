"""Choosing and attending for a cache whose rows can simply be read, wherever they lie.

What a `KVStep` does with rows at hand; one that moves queries or rows first uses the same
functions on what it then has, so that every way gives the same bits.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvflow.kernels.codec import decode_index_key, decode_latent, latent_rank
from kvflow.layouts.record import Record
from kvflow.models.indexer import (
    QUERY_CHUNK,
    first_positions,
    index_scores,
    key_tiles,
    topk_positions,
)
from kvflow.models.kvstep import IndexQueries
from kvflow.models.product import row_sums
from kvflow.models.segment import Segment
from kvflow.models.selection import Fetch, Group, Selection

ReadRows = Callable[[int, Tensor | None], Tensor]
"""(request_idx, positions int64 [m] in any order or None for the whole context) -> packed rows
uint8 [m, nbytes]."""

ReadFetches = Callable[[Sequence[Fetch]], Tensor]
"""Packed rows of several fetches, one behind the other."""

MAX_GATHERED = 1 << 22
MAX_SCORES = 1 << 18
"""Scores computed at once; bounds the memory of one attention step."""


def topk_by_reading(
    record: Record, read: ReadRows, queries: IndexQueries, segments: Sequence[Segment]
) -> list[Tensor]:
    """`KVStep.topk` over index keys that are read whole, request by request."""
    chosen, start = [], 0
    for s in segments:
        mine = slice(start, start + len(s))
        part = IndexQueries(queries.queries[mine], queries.weights[mine], queries.topk)
        chosen.append(_segment_topk(record, read, part, s))
        start += len(s)
    return chosen


def _segment_topk(record: Record, read: ReadRows, q: IndexQueries, s: Segment) -> Tensor:
    k = min(q.topk, s.context_len)
    # A query that sees at most topk positions takes them all: nothing to score.
    first = int(np.searchsorted(s.host, q.topk))
    if first == len(s):
        return first_positions(s.positions, k)
    chosen = s.positions.new_empty(len(s), k)
    chosen[:first] = first_positions(s.positions[:first], k)
    tiles = key_tiles(decode_index_key(record, read(s.request_idx, None), q.queries.dtype))
    for lo in range(first, len(s), QUERY_CHUNK):
        part = slice(lo, min(lo + QUERY_CHUNK, len(s)))
        scores = index_scores(q.queries[part], q.weights[part], tiles, s.host[part])
        chosen[part] = topk_positions(scores, k)
    return chosen


def attend_by_reading(
    record: Record, read: ReadRows, queries: Tensor, selection: Selection
) -> Tensor:
    """`KVStep.attend` over latent rows that are read as `selection` says."""

    def read_all(fetches: Sequence[Fetch]) -> Tensor:
        return torch.cat([read(f.request_idx, f.positions) for f in fetches])

    return attend_by_fetching(record, read_all, queries, selection)


def attend_by_fetching(
    record: Record, read: ReadFetches, queries: Tensor, selection: Selection
) -> Tensor:
    """The same where rows of several requests can be read at once."""
    rank = latent_rank(record)
    if not selection.fetches:
        return queries.new_empty(*queries.shape[:2], rank)
    table = decode_latent(record, read(selection.fetches), queries.dtype)
    return attend(queries, table, selection.groups, rank)


def attend(queries: Tensor, table: Tensor, groups: Sequence[Group], rank: int) -> Tensor:
    """Softmax attention of queries ``[n, h, R + dr]``, already scaled, over rows of `table`
    ``[t, R + dr]``: ``[n, h, R]``, where `rank` is R and the groups hold all queries.

    Every score is a dot product of its own and every output a sum in the order of the rows, so
    rows are read where they lie and heads do not know of each other."""
    widest = max((group.size for group in groups), default=0)
    if len(table) < widest:  # a sparse row cannot name more columns than there are
        table = F.pad(table, (0, 0, 0, widest - len(table)))
    heads = queries.transpose(0, 1)  # head by head, as they are computed and used
    out = heads.new_empty(*heads.shape[:2], rank)
    for group in groups:
        step = max(1, MAX_SCORES // (group.size * len(heads)))
        for lo in range(0, len(group.queries), step):
            part = slice(lo, min(lo + step, len(group.queries)))
            mine = group.places(part)
            some = heads[:, mine] if isinstance(mine, slice) else heads.index_select(1, mine)
            out[:, mine] = _attend(some, table, group, part)[..., :rank]
    return out.transpose(0, 1)


def _attend(queries: Tensor, table: Tensor, group: Group, part: slice) -> Tensor:
    """Of some queries of a group, ``[h, m, R + dr]`` as they are."""
    num_heads, num, dim = queries.shape
    reads = group.reads(part, num_heads, table)
    mine = queries.reshape(-1, dim)
    scores = torch.sparse.sampled_addmm(reads.where, mine, table.t(), beta=0.0).values()
    scores = scores.view(num_heads, num, group.size)
    if not group.is_full:
        scores.masked_fill_(group.unused[part], -torch.inf)
    sums = row_sums(table, reads.rows, reads.begins, scores.softmax(-1).view(-1))
    return sums.view(num_heads, num, dim)


with warnings.catch_warnings():  # torch says once that sparse rows are young
    warnings.simplefilter("ignore")
    one = torch.zeros(1, dtype=torch.int64)
    Group(one, one[None], one + 1).reads(slice(0, 1), 1, torch.zeros(1, 1))
