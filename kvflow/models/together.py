"""Choosing for a batch of requests with few new tokens each: all their keys are scored at once.

Which query meets which tile of keys follows from positions alone, so it is laid out on the host,
once for all layers of a step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvflow.models.indexer import KEY_TILE, first_positions, tile_scores, topk_positions
from kvflow.models.kvstep import IndexQueries
from kvflow.models.segment import Segment
from kvflow.models.selection import Fetch

FEW_QUERIES = 8
"""Queries of a request up to which its keys are scored together with those of other requests."""


@frozen(eq=False)
class Together:
    """`fetches` bring whole tiles of keys, the last key repeated. Pair i scores query
    ``query[i]`` of the step against tile ``tile[i]`` (None: tile i), and its scores go to place
    ``place[i]`` of ``[scored queries, num_tiles]``. `first` are, by segment, how many queries see
    no more than topk positions."""

    segments: tuple[Segment, ...]
    topk: int
    fetches: tuple[Fetch, ...]
    query: Tensor
    tile: Tensor | None
    place: Tensor
    num_tiles: int
    positions: Tensor
    first: tuple[int, ...]

    @classmethod
    def of(cls, segments: Sequence[Segment], topk: int) -> "Together":
        first = tuple(int(np.searchsorted(s.host, topk)) for s in segments)
        scored = [s.host[f:] for s, f in zip(segments, first, strict=True)]
        lengths = [len(p) and int(p[-1]) // KEY_TILE + 1 for p in scored]
        widest = max(lengths, default=0)
        fetches, query, tile, place = [], [], [], []
        num_fetched, num_scored, start = 0, 0, 0
        for s, f, mine, length in zip(segments, first, scored, lengths, strict=True):
            if length:
                keys = np.minimum(np.arange(length * KEY_TILE), s.context_len - 1)
                fetches.append(Fetch(s.request_idx, torch.from_numpy(keys)))
            for i, position in enumerate(mine.tolist()):
                seen = np.arange(position // KEY_TILE + 1)
                query.append(np.full(len(seen), start + f + i))
                tile.append(num_fetched + seen)
                place.append((num_scored + i) * widest + seen)
            num_fetched += length
            num_scored += len(mine)
            start += len(s)
        tiles = _joined(tile)
        in_order = np.array_equal(tiles, np.arange(num_fetched))
        return cls(
            tuple(segments), topk, tuple(fetches), torch.from_numpy(_joined(query)),
            None if in_order else torch.from_numpy(tiles), torch.from_numpy(_joined(place)),
            widest, torch.from_numpy(_joined(scored)), first,
        )  # fmt: skip

    def choose(self, keys: Tensor, asked: IndexQueries) -> list[Tensor]:
        """`KVStep.topk` for the keys of `fetches`, ``[n, d]``."""
        best = self._best(keys, asked) if len(self.positions) else None
        chosen, start = [], 0
        for s, first in zip(self.segments, self.first, strict=True):
            k, num = min(self.topk, s.context_len), len(s) - first
            parts = [first_positions(s.positions[:first], k)] if first or not num else []
            if best is not None and num:
                parts.append(best[start : start + num])
            chosen.append(parts[0] if len(parts) == 1 else torch.cat(parts))
            start += num
        return chosen

    def _best(self, keys: Tensor, asked: IndexQueries) -> Tensor:
        tiles = keys.view(-1, KEY_TILE, keys.shape[1])
        if self.tile is not None:
            tiles = tiles.index_select(0, self.tile)
        products = tile_scores(
            asked.queries.index_select(0, self.query),
            asked.weights.index_select(0, self.query),
            tiles.transpose(1, 2),
        )
        num = len(self.positions)
        scores = products.new_full((num * self.num_tiles, KEY_TILE), -torch.inf)
        scores = scores.index_copy_(0, self.place, products).view(num, -1)
        future = torch.arange(scores.shape[1]) > self.positions[:, None]
        return topk_positions(scores.masked_fill_(future, -torch.inf), self.topk)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
