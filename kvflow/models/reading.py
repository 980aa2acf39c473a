"""Choosing and attending for a cache whose rows can simply be read, wherever they lie.

What a `KVStep` does with rows at hand; one that moves queries or rows first uses the same
functions on what it then has, so that every way gives the same bits.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
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
from kvflow.models.ops import pad_to
from kvflow.models.segment import Segment
from kvflow.models.selection import Fetch, Group, Selection

ReadRows = Callable[[int, Tensor | None], Tensor]
"""(request_idx, positions int64 [m] in any order or None for the whole context) -> packed rows
uint8 [m, nbytes]."""

ReadFetches = Callable[[Sequence[Fetch]], Tensor]
"""Packed rows of several fetches, one behind the other."""

MAX_GATHERED = 1 << 19
"""Elements of cache rows gathered at once: about what a core's cache holds."""

HEAD_TILE = 4
"""Heads that attend together; missing ones are zeros. A head's numbers depend neither on its
place nor on the others."""


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

    queries ``[n, h, R + dr]`` already scaled, table ``[t, R + dr]``, out ``[n, h, R]``."""
    num_heads, dim = queries.shape[1:]
    size, rank = group.size, out.shape[2]
    mine = pad_to(queries.index_select(0, group.queries), HEAD_TILE, dim=1)
    result = out.new_empty(len(mine), mine.shape[1], rank)
    unused = None if group.is_full else torch.arange(size) >= group.counts[:, None, None]
    step = max(1, MAX_GATHERED // (size * dim))
    for lo in range(0, len(mine), step):
        part = slice(lo, min(lo + step, len(mine)))
        keys = _group_rows(table, group, part)
        for head in range(0, mine.shape[1], HEAD_TILE):
            heads = slice(head, head + HEAD_TILE)
            scores = torch.bmm(mine[part, heads], keys.transpose(1, 2))
            if unused is not None:
                scores.masked_fill_(unused[part], -torch.inf)
            result[part, heads] = torch.bmm(scores.softmax(-1), keys[..., :rank])
    out.index_copy_(0, group.queries, result[:, :num_heads])


def _group_rows(table: Tensor, group: Group, part: slice) -> Tensor:
    """Rows of some of a group's queries: ``[m, size, R + dr]``."""
    num, size, dim = part.stop - part.start, group.size, table.shape[1]
    if group.first is not None:
        start = group.first + part.start * size
        return table[start : start + num * size].view(num, size, dim)
    return table.index_select(0, group.rows[part].flatten()).view(num, size, dim)
