"""KVMemory: who keeps the KV cache of one rank over all steps, and opens it for each step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from zlib import crc32

import numpy as np
from attrs import frozen

from kvflow.engine.messages import StepItem
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Ints, Replicated, Sharding
from kvflow.models.kvstep import KVStep
from kvflow.transfers.executors.base import RankCache


@frozen(eq=False)
class StepRequest:
    """One request of a step: tokens [start, stop) are new, dealt to the ranks by `queries`; tokens
    below `start` are cached. `tables` are its block tables by group."""

    request_id: str
    start: int
    stop: int
    queries: Placement
    tables: dict[str, list[int]]

    def local_positions(self, rank: int) -> Ints:
        """The new positions whose queries `rank` computes: int64, ascending."""
        if rank not in self.queries.all_ranks:
            return np.empty(0, np.int64)
        shard = self.queries.shard_of(rank)
        count = int(self.queries.sharding.local_len(self.stop, shard))
        return self.queries.sharding.token(shard, np.arange(count))


class KVMemory(Protocol):
    """The KV cache of one rank. All ranks of a group open the same steps."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def cache(self) -> RankCache:
        """The pages that transfers read and write."""
        ...

    @property
    def workspace_nbytes(self) -> int:
        """The largest workspace any step has held, in bytes."""
        ...

    @property
    def gauges(self) -> Mapping[str, float]:
        """What is held now, by name."""
        ...

    @property
    def totals(self) -> Mapping[str, float]:
        """What only ever grows, by name."""
        ...

    def open(self, requests: Sequence[StepRequest], write_only: frozenset[str]) -> KVStep:
        """The cache during one forward pass over `requests`. Components in `write_only` are
        published and not read in it."""
        ...

    def flush(self, request_id: str) -> None:
        """Every row of the request that a step has published is in `cache` afterwards, for
        whoever reads its pages. Does nothing for a request that no step has named."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has left this rank: whatever is kept for it besides its blocks can go; rows
        that are not in `cache` are lost (see `flush`)."""
        ...


Deal = Callable[[Sequence[StepItem]], list[Placement]]
"""Says, for each item of a step, which ranks compute which of its tokens. A function of the items,
which all ranks hold alike."""


def balanced_deal(ranks: Sequence[tuple[int, ...]]) -> Deal:
    """Each request's tokens in balanced chunks over groups of ranks (those of a group compute the
    same tokens); its remainder goes on where the last one's ended, so that the loads of all ranks
    differ by at most one token a step."""

    def deal(items: Sequence[StepItem]) -> list[Placement]:
        deals, before = [], 0
        for item in items:
            chunks: Sharding = Replicated(item.start, item.stop)
            if len(ranks) > 1:
                chunks = BalancedChunks(len(ranks), item.start, item.stop, rotate=before)
            deals.append(Placement(chunks, tuple(ranks)))
            before += item.stop - item.start
        return deals

    return deal


def by_request_deal(ranks: Sequence[tuple[int, ...]]) -> Deal:
    """All tokens of a request on one of several groups of ranks, the same in every step: a function
    of its id."""

    def deal(items: Sequence[StepItem]) -> list[Placement]:
        homes = [ranks[crc32(item.request_id.encode()) % len(ranks)] for item in items]
        return [
            Placement(Replicated(item.start, item.stop), (home,))
            for item, home in zip(items, homes, strict=True)
        ]

    return deal
