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
    """``exp(i * position * theta^(-2k/d))`` for pair k of d/2: complex ``[n, d / 2]``."""

    turn: Tensor

    @classmethod
    def at(cls, positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> "Rotation":
        """For int64 positions ``[n]``; angles are computed in `dtype`, as HF does in float32."""
        # Whole tiles of rows: cos and sin may treat what is left over of a vector differently.
        rows = pad_to(positions, ROW_TILE).to(dtype)[:, None]
        angles = rows * _frequencies(dim, theta, dtype, positions.device)
        return cls(torch.complex(angles.cos(), angles.sin())[: len(positions)])

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates the last axis (d) of ``[..., n, d]``: ``(a, b) -> (a cos - b sin, b cos + a
        sin)``."""
        # A copy: numbers that are read as complex ones must begin at an even place.
        copy = x.clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(copy.view(*x.shape[:-1], x.shape[-1] // 2, 2))
        pairs.mul_(self.turn)
        return copy


@cache
def _frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)
