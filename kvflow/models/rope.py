"""Rotary embedding over adjacent pairs (x0, x1), (x2, x3), ..., kept in place.

HF rotates the same pairs but stores [evens | odds]; the in-place order is the one vLLM caches.
Scores are equal either way, cache bytes are not: the order is part of a cache's content.
"""

from functools import cache

import torch
from attrs import frozen
from torch import Tensor

from kvflow.models.product import ROW_TILE, pad_to


@frozen(eq=False)
class Rotation:
    """cos and sin of ``position * theta^(-2i/d)``, each value twice, the first sine of a pair
    negated: ``[n, d]`` each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> "Rotation":
        """For int64 positions ``[n]``; angles are computed in `dtype`, as HF does in float32."""
        # Whole tiles of rows: cos and sin may treat what is left over of a vector differently.
        rows = pad_to(positions, ROW_TILE).to(dtype)[:, None]
        angles = rows * _frequencies(dim, theta, dtype, positions.device)
        cos, sin = angles.cos()[: len(positions)], angles.sin()[: len(positions)]
        return cls(torch.stack([cos, cos], -1).flatten(1), torch.stack([-sin, sin], -1).flatten(1))

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates the last axis (d) of ``[..., n, d]``: ``(a, b) -> (a cos - b sin, b cos + a
        sin)``."""
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        return pairs.flip(-1).flatten(-2).mul_(self.sin).add_(x * self.cos)


@cache
def _frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)
