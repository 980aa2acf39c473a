"""Row-wise operations whose bits do not depend on what else is in the batch.

A matrix product may add up a row's terms in another order when the number of rows changes. Here
rows are padded to whole tiles once per step, and every product runs on tiles of one fixed shape,
as a batch of equal matrix products; so a token's numbers are the same alone, in a prompt, on any
rank. Weights are kept ``[in, out]`` and contiguous, with `out` padded to whole lanes: other
shapes select kernels that look at alignment.
"""

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

ROW_TILE = 16
"""Rows of one tile: costs little over one row in decode, fills the registers in prefill."""

LANE = 8
"""Output columns come in multiples of this."""


def pad_to(x: Tensor, multiple: int, *, dim: int = 0) -> Tensor:
    """Zeros appended along `dim` up to a multiple; `x` itself when it already is one."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def pad_rows(x: Tensor) -> Tensor:
    """Zero rows appended up to whole tiles: ``[n, ...] -> [n_padded, ...]``."""
    return pad_to(x, ROW_TILE)


@frozen(eq=False)
class Linear:
    """``x @ weight``: weight ``[in, out padded to LANE]``, x ``[n_padded, in]``."""

    weight: Tensor
    num_out: int

    @classmethod
    def from_hf(cls, weight: Tensor) -> "Linear":
        """From a weight stored ``[out, in]``."""
        return cls(pad_to(weight.t(), LANE, dim=1).contiguous(), len(weight))

    def __call__(self, x: Tensor) -> Tensor:
        num_in, num_lanes = self.weight.shape
        num_tiles = len(x) // ROW_TILE
        if num_tiles == 0:
            return x.new_zeros(0, self.num_out)
        tiles = x.contiguous().view(num_tiles, ROW_TILE, num_in)
        out = torch.bmm(tiles, self.weight.expand(num_tiles, num_in, num_lanes))
        out = out.view(len(x), num_lanes)
        return out if num_lanes == self.num_out else out[:, : self.num_out].contiguous()


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix per head: x ``[n_padded, h, a]``, weight ``[h, a, b]`` -> ``[n_padded, h, b]``."""
    out = x.new_empty(len(x), weight.shape[0], weight.shape[2])
    for start in range(0, len(x), ROW_TILE):
        tile = x[start : start + ROW_TILE].transpose(0, 1).contiguous()
        out[start : start + ROW_TILE] = torch.bmm(tile, weight).transpose(0, 1)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


@frozen(eq=False)
class Mlp:
    """``down(silu(gate(x)) * up(x))``; gate and up are one product."""

    gate_up: Linear
    down: Linear

    @classmethod
    def from_hf(cls, gate: Tensor, up: Tensor, down: Tensor) -> "Mlp":
        """From weights stored ``[out, in]``."""
        return cls(Linear.from_hf(torch.cat([gate, up])), Linear.from_hf(down))

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[n_padded, hidden] -> [n_padded, hidden]``."""
        gate, up = (part.contiguous() for part in self.gate_up(x).chunk(2, dim=-1))
        return self.down(F.silu(gate) * up)
