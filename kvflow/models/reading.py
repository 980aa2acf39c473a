"""Choosing and attending for a cache whose rows can simply be read, wherever they lie.

What a `KVStep` does with rows at hand; one that moves queries or rows first uses the same
functions on what it then has, so that every way gives the same bits.
"""

from collections.abc import Callable, Sequence

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
from kvflow.models.ops import LANE, pad_to
from kvflow.models.segment import Segment
from kvflow.models.selection import Group, Selection

ReadRows = Callable[[int, Tensor | None], Tensor]
"""(request_idx, positions int64 [m] in any order or None for the whole context) -> packed rows
uint8 [m, nbytes]."""

MAX_GATHERED = 1 << 22
"""Elements of cache rows gathered at once; bounds the memory of one attention step."""


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
    chosen = first_positions(s.positions, k)
    # A query that sees at most topk positions takes them all: nothing to score.
    first = int(torch.searchsorted(s.positions, q.topk))
    if first == len(s):
        return chosen
    tiles = key_tiles(decode_index_key(record, read(s.request_idx, None), q.queries.dtype))
    for lo in range(first, len(s), QUERY_CHUNK):
        part = slice(lo, min(lo + QUERY_CHUNK, len(s)))
        scores = index_scores(q.queries[part], q.weights[part], tiles, s.positions[part])
        chosen[part] = topk_positions(scores, k)
    return chosen


def attend_by_reading(
    record: Record, read: ReadRows, queries: Tensor, selection: Selection
) -> Tensor:
    """`KVStep.attend` over latent rows that are read as `selection` says."""
    out = queries.new_zeros(*queries.shape[:2], latent_rank(record))
    if selection.fetches:
        packed = torch.cat([read(f.request_idx, f.positions) for f in selection.fetches])
        table = decode_latent(record, packed, queries.dtype)
        for group in selection.groups:
            attend(queries, table, group, out)
    return out


def attend(queries: Tensor, table: Tensor, group: Group, out: Tensor) -> None:
    """Softmax attention of a group's queries over its rows of `table`, written into `out`.

    queries ``[n, h, R + dr]`` already scaled, table ``[t, R + dr]``, out ``[n, h, R]``."""
    num_heads, dim = queries.shape[1:]
    step = max(1, MAX_GATHERED // (group.size * dim))
    columns = torch.arange(group.size)
    for lo in range(0, len(group.queries), step):
        mine = group.queries[lo : lo + step]
        rows = group.rows[lo : lo + step]
        keys = table.index_select(0, rows.flatten()).view(len(rows), group.size, dim)
        q = pad_to(queries[mine].transpose(1, 2), LANE, dim=2).contiguous()
        scores = torch.bmm(keys, q).transpose(1, 2)[:, :num_heads].contiguous()
        unused = columns >= group.counts[lo : lo + step, None, None]
        weights = scores.masked_fill_(unused, -torch.inf).softmax(-1)
        out[mine] = torch.bmm(weights, keys[..., : out.shape[2]])
