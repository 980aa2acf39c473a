"""Segment: local query rows of one request."""

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.errors import LayoutError
from kvflow.layouts.sharding import Ints


@frozen(eq=False)
class Segment:
    """Consecutive local query rows that belong to one request.

    `positions` (int64 ``[m]``) are absolute and ascending, not necessarily contiguous: under PCP
    a rank holds two chunks of a request. `context_len` counts the tokens visible after this step,
    the new tokens of all ranks included. `host` are the same positions where the host plans with
    them, so that a step need not ask the device. Raises `LayoutError` for positions outside it."""

    request_idx: int
    positions: Tensor = field()
    context_len: int
    host: Ints = field(init=False)

    def __attrs_post_init__(self) -> None:
        p = self.positions
        if p.dtype != torch.int64 or p.dim() != 1:
            raise LayoutError(f"positions are {p.dtype} {list(p.shape)}, must be int64 [m]")
        host: Ints = p.cpu().numpy()
        object.__setattr__(self, "host", host)
        if len(host) == 0:
            return
        first, last = int(host[0]), int(host[-1])
        if first < 0 or last >= self.context_len:
            raise LayoutError(
                f"positions {first}..{last} of request {self.request_idx}, "
                f"must lie in [0, context_len = {self.context_len})"
            )
        if len(host) > 1 and not bool(np.all(host[1:] > host[:-1])):
            raise LayoutError(f"positions of request {self.request_idx} must ascend, got {p}")

    def __len__(self) -> int:
        return len(self.host)
