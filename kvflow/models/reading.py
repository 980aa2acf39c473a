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
    out = queries.new_empty(*queries.shape[:2], latent_rank(record))
    if selection.fetches:
        table = decode_latent(record, read(selection.fetches), queries.dtype)
        for group in selection.groups:
            attend(queries, table, group, out)
    return out


def attend(queries: Tensor, table: Tensor, group: Group, out: Tensor) -> None:
    """Softmax attention of a group's queries over its rows of `table`, written into `out`.

    queries ``[n, h, R + dr]`` already scaled, table ``[t, R + dr]``, out ``[n, h, R]``. Every
    score is a dot product of its own and every output a sum in the order of the rows, so rows are
    read where they lie and heads do not know of each other."""
    num_heads, dim = queries.shape[1:]
    size, rank = group.size, out.shape[2]
    mine = queries.index_select(0, group.queries)
    if len(table) < size:  # a sparse row cannot name more columns than there are
        table = F.pad(table, (0, 0, 0, size - len(table)))
    step = max(1, MAX_SCORES // (size * num_heads))
    for lo in range(0, len(mine), step):
        part = slice(lo, min(lo + step, len(mine)))
        num = part.stop - part.start
        rows, begins = group.by_head(part, num_heads)
        scores = _scores(mine[part].reshape(num * num_heads, dim), table, rows, begins)
        scores = scores.view(num, num_heads, size)
        if not group.is_full:
            scores.masked_fill_(group.unused[part], -torch.inf)
        weights = scores.softmax(-1).flatten()
        sums = F.embedding_bag(rows, table, begins[:-1], mode="sum", per_sample_weights=weights)
        sums = sums.view(num, num_heads, dim)[..., :rank]
        out.index_copy_(0, group.queries[part], sums)


def _scores(queries: Tensor, table: Tensor, rows: Tensor, begins: Tensor) -> Tensor:
    """Dot products of query i with rows ``rows[begins[i]:begins[i + 1]]`` of the table."""
    where = torch.sparse_csr_tensor(
        begins,
        rows,
        queries.new_zeros(len(rows)),
        (len(queries), len(table)),
        check_invariants=False,
    )
    scores: Tensor = torch.sparse.sampled_addmm(where, queries, table.t(), beta=0.0).values()
    return scores


with warnings.catch_warnings():  # torch says once that sparse rows are young
    warnings.simplefilter("ignore")
    _scores(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([0]), torch.tensor([0, 1]))
