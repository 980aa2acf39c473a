"""Row-wise operations whose bits do not depend on what else is in the batch."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from kvflow.models.product import LANE, Matrices, pad_to

UNDIVIDED = 1 << 14
"""Elements that torch does not divide between threads: it cuts where it likes, and functions treat
what is left over of a vector differently. A multiple of `LANE`."""


@frozen(eq=False)
class Linear:
    """``x @ weight`` with a weight ``[in, out]``."""

    matrix: Matrices
    num_out: int

    @classmethod
    def from_hf(cls, weight: Tensor) -> "Linear":
        """From a weight stored ``[out, in]``."""
        return cls(Matrices.of(weight.t()), len(weight))

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[n, in] -> [n, out]``."""
        out = self.matrix.one(x)
        return out if out.shape[1] == self.num_out else out[:, : self.num_out]


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
        """x ``[n, in]`` -> one ``[n, out]`` view for every weight."""
        return self.linear(x).split_with_sizes(self.sizes, -1)


@frozen(eq=False)
class RmsNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis. Numbers are kept as tensors, which
    cost a short step less than numbers that become tensors in every call."""

    weight: Tensor
    share: Tensor
    eps: Tensor

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "RmsNorm":
        return cls(weight, weight.new_tensor(1 / len(weight)), weight.new_tensor(eps))

    def __call__(self, x: Tensor) -> Tensor:
        scale = (x * x).sum(-1, keepdim=True).mul_(self.share).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@frozen(eq=False)
class Mlp:
    """``down(silu(gate(x)) * up(x))``; gate and up are one product, each padded to whole lanes."""

    gate_up: Matrices
    down: Matrices

    @classmethod
    def from_hf(cls, gate: Tensor, up: Tensor, down: Tensor) -> "Mlp":
        """From weights stored ``[out, in]``."""
        halves = [pad_to(half.t(), LANE, dim=1) for half in (gate, up)]
        return cls(Matrices.of(torch.cat(halves, 1)), Matrices.of(pad_to(down.t(), LANE)))

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[n, hidden] -> [n, hidden]``."""
        return self.down.one(gated(self.gate_up.one(x)))[:, : x.shape[1]]


def gated(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[..., gate | up]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return each_element(partial(F.silu, inplace=True), gate.contiguous()).mul_(up)


def each_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Changes every element of a contiguous `x`, whose last axis is whole lanes, by a function that
    works in place; `x` itself. An element's bits depend on nothing but the element."""
    if x.numel() <= UNDIVIDED:
        return function(x)
    for part in torch.split(x.view(-1), UNDIVIDED):
        function(part)
    return x
