"""Segment: local query rows of one request."""

import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.errors import LayoutError


@frozen(eq=False)
class Segment:
    """Consecutive local query rows that belong to one request.

    `positions` (int64 ``[m]``) are absolute and ascending, not necessarily contiguous: under PCP
    a rank holds two chunks of a request. `context_len` counts the tokens visible after this step,
    the new tokens of all ranks included. Raises `LayoutError` for positions outside it."""

    request_idx: int
    positions: Tensor = field()
    context_len: int

    def __attrs_post_init__(self) -> None:
        p = self.positions
        if p.dtype != torch.int64 or p.dim() != 1:
            raise LayoutError(f"positions are {p.dtype} {list(p.shape)}, must be int64 [m]")
        if len(p) == 0:
            return
        first, last = int(p[0]), int(p[-1])
        if first < 0 or last >= self.context_len:
            raise LayoutError(
                f"positions {first}..{last} of request {self.request_idx}, "
                f"must lie in [0, context_len = {self.context_len})"
            )
        if len(p) > 1 and not bool((p[1:] > p[:-1]).all()):
            raise LayoutError(f"positions of request {self.request_idx} must ascend, got {p}")

    def __len__(self) -> int:
        return len(self.positions)
