"""Row-wise operations whose bits do not depend on what else is in the batch.

A matrix product may add up a row's terms in another order when the number of rows changes. Here
rows are padded to whole tiles once per step, and every product runs on tiles of one fixed shape,
as a batch of equal matrix products; so a token's numbers are the same alone, in a prompt, on any
rank. Weights are kept ``[in, out]`` and contiguous, with `out` padded to whole lanes: other
shapes select kernels that look at alignment.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

ROW_TILE = 8
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


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` on tiles of rows: x ``[n_padded, a]`` contiguous, weight ``[a, b]``."""
    num_tiles = len(x) // ROW_TILE
    if num_tiles == 0:
        return x.new_empty(0, weight.shape[1])
    tiles = x.view(num_tiles, ROW_TILE, x.shape[1])
    return torch.bmm(tiles, weight.expand(num_tiles, *weight.shape)).view(len(x), -1)


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
        out = tiled(x.contiguous(), self.weight)
        return out if out.shape[1] == self.num_out else out[:, : self.num_out].contiguous()


@frozen(eq=False)
class Fan:
    """Several products of the same rows, computed as one."""

    linear: Linear
    sizes: tuple[int, ...]

    @classmethod
    def from_hf(cls, weights: Sequence[Tensor]) -> "Fan":
        """From weights stored ``[out, in]``."""
        return cls(Linear.from_hf(torch.cat(list(weights))), tuple(map(len, weights)))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x ``[n_padded, in]`` -> one ``[n_padded, out]`` view for every weight."""
        return torch.split(self.linear(x), list(self.sizes), -1)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """One matrix per head: x ``[h, n_padded, a]``, or ``[n_padded, a]`` for all heads, weight
    ``[h, a, b]`` -> ``[h, n_padded, b]``. A head's product has the same shape whatever the number
    of heads, so heads can be dealt to ranks."""
    num_heads, num_in, num_out = weight.shape
    num_rows = x.shape[-2]
    x = x.contiguous().expand(num_heads, num_rows, num_in)
    if num_rows == ROW_TILE:
        return torch.bmm(x, weight)
    out = x.new_empty(num_heads, num_rows, num_out)
    if num_rows < num_heads * ROW_TILE:
        for start in range(0, num_rows, ROW_TILE):
            rows = slice(start, start + ROW_TILE)
            out[:, rows] = torch.bmm(x[:, rows], weight)
    else:
        for head in range(num_heads):
            out[head] = tiled(x[head], weight[head])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis."""
    scale = (x * x).sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@frozen(eq=False)
class Mlp:
    """``down(silu(gate(x)) * up(x))``; gate and up are one product, each padded to whole lanes."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def from_hf(cls, gate: Tensor, up: Tensor, down: Tensor) -> "Mlp":
        """From weights stored ``[out, in]``."""
        halves = [pad_to(half.t(), LANE, dim=1) for half in (gate, up)]
        inner = pad_to(down.t(), LANE)
        return cls(torch.cat(halves, 1).contiguous(), pad_to(inner, LANE, dim=1).contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[n_padded, hidden] -> [n_padded, hidden]``."""
        out = tiled(gated(tiled(x.contiguous(), self.gate_up)), self.down)
        return out if out.shape[1] == x.shape[1] else out[:, : x.shape[1]]


def gated(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[..., gate | up]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.contiguous()).mul_(up)
