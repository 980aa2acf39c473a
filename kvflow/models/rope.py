"""Rotary embedding over adjacent pairs (x0, x1), (x2, x3), ..., kept in place.

HF rotates the same pairs but stores [evens | odds]; the in-place order is the one vLLM caches.
Scores are equal either way, cache bytes are not: the order is part of a cache's content.
"""

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Rotation:
    """cos and sin of ``position * theta^(-2i/d)``: ``[n, d/2]`` each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> "Rotation":
        """For int64 positions ``[n]``; angles are computed in `dtype`, as HF does in float32."""
        exponents = torch.arange(0, dim, 2, dtype=dtype) / dim
        angles = positions.to(dtype)[:, None] * (1.0 / theta**exponents)
        return cls(angles.cos(), angles.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates the last axis (d) of ``[n, d]`` or ``[n, heads, d]``."""
        cos, sin = self.cos, self.sin
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
