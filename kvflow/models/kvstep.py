"""KVStep: what a forward pass needs from whoever owns the KV cache, for one step.

The model neither knows blocks nor ranks' shards: it hands over the packed rows of its own new
tokens and asks for the packed rows of a request's positions.
"""

from typing import Protocol

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


class KVStep(Protocol):
    """The KV cache during one forward pass. Components are named as in `KVCacheSpec`.

    For each component of each layer, in layer order (``latent.i``, then ``indexer.i`` where the
    layer has one), the model calls `publish`, then any number of `rows`, then `release`."""

    def publish(self, component: str, rows: Tensor) -> None:
        """Stores the packed rows of this rank's new tokens, uint8 ``[n_local, nbytes]``, in the
        order of the segments. A collective: every rank calls it for every component in the same
        order, with 0 rows too. Afterwards the rows of all ranks are readable."""
        ...

    def rows(self, component: str, request_idx: int, positions: Tensor | None) -> Tensor:
        """Packed rows, uint8 ``[m, nbytes]``, at `positions` (int64 ``[m]``, any order, repeats
        allowed), or of the whole context ``0..context_len`` for None. Not a collective."""
        ...

    def release(self, component: str) -> None:
        """The model reads no more of this component in this step."""
        ...
