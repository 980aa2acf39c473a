"""Choosing positions part by part: keys of some positions give candidates, candidates merge.

A query's choice among all keys is its choice among the best of every part, so parts may lie on
other ranks or come one after the other. Scores are those of `index_scores`, whatever part a key
is in.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvflow.kernels.codec import decode_index_key
from kvflow.layouts.record import Record
from kvflow.models.indexer import QUERY_CHUNK, index_scores, key_tiles, topk_positions


@frozen(eq=False)
class Candidates:
    """Some of the best positions of each query: scores ``[m, c]``, -inf where the query does not
    see the position, and positions int64 ``[m, c]``, ascending."""

    scores: Tensor
    positions: Tensor


@frozen(eq=False)
class Keys:
    """Index keys ready to score: tiles, and the ascending position of each, int64 ``[n]``."""

    tiles: Tensor
    positions: Tensor

    @classmethod
    def decode(
        cls, record: Record, packed: Tensor, positions: Tensor, dtype: torch.dtype
    ) -> "Keys":
        """From packed rows uint8 ``[n, nbytes]``."""
        return cls(key_tiles(decode_index_key(record, packed, dtype)), positions)


def candidates(
    keys: Keys, queries: Tensor, weights: Tensor, positions: Tensor, k: int
) -> Candidates:
    """The best ``min(k, n)`` of `keys` for each query: queries ``[m, heads, d]``, weights
    ``[m, heads]``, positions int64 ``[m]`` ascending."""
    num = min(k, len(keys.positions))
    best = keys.positions[:num].repeat(len(queries), 1)
    scores = queries.new_full(best.shape, -torch.inf)
    seen = torch.searchsorted(keys.positions, positions, right=True)
    first = int(torch.searchsorted(seen, 1))
    for lo in range(first, len(queries), QUERY_CHUNK):
        part = slice(lo, min(lo + QUERY_CHUNK, len(queries)))
        # A query that sees n keys is to `index_scores` one at the n-th key's place.
        every = index_scores(queries[part], weights[part], keys.tiles, seen[part] - 1)
        columns = topk_positions(every[:, : len(keys.positions)], num)
        best[part], scores[part] = keys.positions[columns], every.gather(1, columns)
    return Candidates(scores, best)


def merged(parts: Sequence[Candidates], k: int) -> Candidates:
    """The best k of all parts, which share no position: score descending, position ascending.
    Fewer where the parts hold fewer."""
    if len(parts) == 1 and parts[0].positions.shape[1] <= k:
        return parts[0]
    positions, order = torch.cat([p.positions for p in parts], 1).sort(dim=1)
    scores = torch.cat([p.scores for p in parts], 1).gather(1, order)
    if positions.shape[1] <= k:
        return Candidates(scores, positions)
    columns = topk_positions(scores, k)
    return Candidates(scores.gather(1, columns), positions.gather(1, columns))
