"""The DSA indexer: which earlier positions each query attends to.

``score(query, key) = sum_h w_h * relu(q_h . k)``. Keys are scored in tiles anchored at position
0 and each query is its own fixed-shape product, so a score has the same bits whatever else is in
the batch. Top-k order is (score descending, position ascending).
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvflow.kernels.codec import encode_index_key
from kvflow.layouts.record import Record
from kvflow.layouts.sharding import Ints
from kvflow.models.config import GlmConfig
from kvflow.models.kvstep import IndexQueries, KVStep, Segment
from kvflow.models.ops import Linear, layer_norm
from kvflow.models.product import pad_to
from kvflow.models.rope import Rotation

KEY_TILE = 240
"""Keys of one score tile. A multiple of 48, so that every kernel works on whole panels and a key's
score has the same bits in every column: shards may tile their own keys."""

QUERY_CHUNK = 128
"""Queries scored together; bounds the scores held at once to QUERY_CHUNK x context."""


@frozen(eq=False)
class Indexer:
    """Index queries, keys and top-k of a "full" layer."""

    component: str
    record: Record
    wq_b: Linear
    k_norm: tuple[Tensor, Tensor]
    config: GlmConfig

    def key_rows(self, key: Tensor, rotation: Rotation) -> Tensor:
        """Packed index keys of ``[n, d]``: uint8 ``[n, nbytes]``. Unlike in attention, the rotated
        dims come first."""
        key = layer_norm(key, *self.k_norm, self.config.latent_norm_eps)
        self._rotate(key, rotation)
        return encode_index_key(self.record, key)

    def topk(
        self,
        weights: Tensor,
        q_residual: Tensor,
        rotation: Rotation,
        segments: Sequence[Segment],
        kv: KVStep,
    ) -> list[Tensor]:
        """Per segment, int64 ``[m, min(topk, context_len)]``: the chosen positions of each query,
        ascending, followed by zeros where fewer than topk positions are visible. weights
        ``[n, heads]`` have every scale in them. A collective over `kv`, to be called where
        a context of the step exceeds the top-k."""
        c = self.config
        queries = self.wq_b(q_residual).view(-1, c.index_n_heads, c.index_head_dim)
        self._rotate(queries.transpose(0, 1), rotation)
        asked = IndexQueries(queries, weights, c.index_topk)
        return kv.topk(self.component, asked, segments)

    def _rotate(self, x: Tensor, rotation: Rotation) -> None:
        turned = x[..., : self.config.qk_rope_head_dim]
        turned.copy_(rotation(turned))


def key_tiles(keys: Tensor) -> Tensor:
    """Keys ``[L, d]`` -> ``[ceil(L / KEY_TILE), d, KEY_TILE]``, zeros beyond L."""
    return pad_to(keys, KEY_TILE).view(-1, KEY_TILE, keys.shape[1]).transpose(1, 2)


def index_scores(
    queries: Tensor, weights: Tensor, tiles: Tensor, positions: Ints | Tensor
) -> Tensor:
    """Scores ``[m, num_tiles * KEY_TILE]``, -inf at positions a query must not see.

    queries ``[m, heads, d]``, weights ``[m, heads]``, positions int64 ``[m]`` ascending; those of
    a device are asked for."""
    host = positions if isinstance(positions, np.ndarray) else positions.cpu().numpy()
    num_keys = len(tiles) * KEY_TILE
    scores = queries.new_full((len(queries), num_keys), -torch.inf)
    num_visible = int(host[-1]) // KEY_TILE + 1
    if len(queries) < num_visible:
        for i, position in enumerate(host.tolist()):
            seen = tiles[: position // KEY_TILE + 1]
            products = tile_scores(queries[i, None], weights[i, None], seen)
            scores[i, : len(seen) * KEY_TILE] = products.flatten()
    else:
        for i, tile in enumerate(tiles[:num_visible]):
            first = int(np.searchsorted(host, i * KEY_TILE))
            products = tile_scores(queries[first:], weights[first:], tile[None])
            scores[first:, i * KEY_TILE : (i + 1) * KEY_TILE] = products
    future = torch.arange(num_keys) > torch.from_numpy(host)[:, None]
    return scores.masked_fill_(future, -torch.inf)


def tile_scores(queries: Tensor, weights: Tensor, tiles: Tensor) -> Tensor:
    """One query against one tile, many times: ``[b, KEY_TILE]`` for b queries and b tiles, or b
    of one and one of the other."""
    num = max(len(queries), len(tiles))
    products = torch.bmm(
        queries.expand(num, *queries.shape[1:]), tiles.expand(num, *tiles.shape[1:])
    )
    heads = weights[:, None].expand(num, 1, weights.shape[1])
    return torch.bmm(heads, products.relu_())[:, 0]


def topk_positions(scores: Tensor, k: int) -> Tensor:
    """The k best positions of each row of ``[m, n]``, as int64 ``[m, k]`` ascending. Of equal
    scores the lower position wins, and a NaN is better than all: what it comes from is attended
    to, and spoils what is its own. Every row must have at least k scores above -inf.

    All shapes follow from those of the arguments, so the host waits for nothing: how many are
    above the k-th best score is counted, the first of its equals fill up, and running counts say
    where each chosen position goes."""
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    threshold = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > threshold, scores == threshold
    wanted = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= wanted))
    place = (chosen.cumsum(-1) - 1).masked_fill_(~chosen, k)
    columns = torch.arange(scores.shape[1]).expand(scores.shape)
    return columns.new_empty(len(scores), k + 1).scatter_(1, place, columns)[:, :k]


def first_positions(positions: Tensor, k: int) -> Tensor:
    """0, 1, ... up to each query's own position, then zeros: int64 ``[m, k]``."""
    columns = torch.arange(k)
    return torch.where(columns <= positions[:, None], columns, 0)
