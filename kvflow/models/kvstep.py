"""KVStep: what a forward pass needs from whoever owns the KV cache, for one step.

The model neither knows blocks nor ranks' shards. It hands over the packed rows of its own new
tokens, asks which positions its index queries choose, and asks for attention over chosen
positions. Whether rows move to queries, queries to rows, or rows from a host pool to a device is
decided behind this protocol.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen
from torch import Tensor

from kvflow.models.segment import Segment
from kvflow.models.selection import Selection

__all__ = ["IndexQueries", "KVStep", "Segment"]


@frozen(eq=False)
class IndexQueries:
    """Index queries of this rank's new tokens, in the order of the segments, rotated and ready to
    score: queries ``[n, heads, d]``, head weights ``[n, heads]`` with every scale in them, and the
    number of positions each query chooses."""

    queries: Tensor
    weights: Tensor
    topk: int


class KVStep(Protocol):
    """The KV cache during one forward pass. Components are named as in `KVCacheSpec`.

    Layer by layer the model calls `publish` of ``latent.i`` and, where the layer has one, of
    ``indexer.i``; then `topk` of the indexer where `max_context_len` exceeds the top-k; then
    `attend`; then `release` of what it published. All but `release` are collectives: every rank
    makes the same calls in the same order, with 0 rows too."""

    @property
    def max_context_len(self) -> int:
        """The longest context_len among the step's requests, those of other ranks included: all
        ranks see the same number."""
        ...

    def publish(self, component: str, rows: Tensor) -> None:
        """Stores the packed rows of this rank's new tokens, uint8 ``[n_local, nbytes]``, in the
        order of the segments. Afterwards the rows of all ranks can be chosen and attended to."""
        ...

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        """Per segment, int64 ``[m, min(topk, context_len)]``: the positions each query chooses
        among those up to its own, ascending, followed by zeros where fewer are visible. Order is
        (score descending, position ascending)."""
        ...

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        """Softmax attention of this rank's queries over their selected rows of a latent component:
        queries ``[n, h, R + dr]``, already scaled, -> ``[n, h, R]``."""
        ...

    def release(self, component: str) -> None:
        """The model reads no more of this component in this step."""
        ...
