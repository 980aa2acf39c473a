"""StepRunner: one rank's part of a step, the same for prefill ranks and decode ranks."""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field

from kvflow.comm import Comm
from kvflow.engine.messages import StepItem
from kvflow.engine.pagedstep import PagedStep, StepRequest
from kvflow.engine.sampling import Sampled, sample
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import KVLayout
from kvflow.models.glm import Glm
from kvflow.models.segment import Segment
from kvflow.transfers.executors.base import RankCache


@define(eq=False)
class StepRunner:
    """Runs steps of a model over one rank's cache. Queries are dealt to the ranks of `comm` in
    balanced chunks; everything is derived from the items, which all ranks hold alike."""

    model: Glm
    layout: KVLayout
    cache: RankCache
    comm: Comm
    workspace_nbytes: int = field(init=False, default=0)

    def run(self, items: Sequence[StepItem]) -> dict[str, Sampled]:
        """Computes the items' tokens, stores their KV, and samples where an item asks for it.
        Returns the tokens sampled on this rank: the one that holds a request's last position."""
        deals = _deal(items, self.comm.size)
        mine = [self._local(deal) for deal in deals]
        requests = [
            StepRequest(item.start, item.stop, deal, item.tables)
            for item, deal in zip(items, deals, strict=True)
        ]
        mtp = frozenset(self.layout.spec.select(part="mtp"))
        kv = PagedStep(self.layout, self.cache, self.comm, requests, mtp)
        segments = [
            Segment(i, torch.from_numpy(positions), item.stop)
            for i, (item, positions) in enumerate(zip(items, mine, strict=True))
            if len(positions)
        ]
        tokens = _joined(
            [np.array(it.tokens)[p - it.start] for it, p in zip(items, mine, strict=True)]
        )
        hidden = self.model.forward(tokens, segments, kv, self.comm)
        sampled, following = self._sample(items, mine, hidden)
        if mtp:
            self.model.write_mtp(following, hidden, segments, kv)
        self.workspace_nbytes = max(self.workspace_nbytes, kv.workspace_nbytes)
        return sampled

    def _local(self, deal: BalancedChunks) -> np.ndarray:
        count = int(deal.local_len(deal.stop, self.comm.rank))
        return deal.token(self.comm.rank, np.arange(count))

    def _sample(
        self, items: Sequence[StepItem], mine: Sequence[np.ndarray], hidden: torch.Tensor
    ) -> tuple[dict[str, Sampled], torch.Tensor]:
        """Samples on the rank of each last position, and says which token follows each row."""
        sampled: dict[str, Sampled] = {}
        following, row = [], 0
        for item, positions in zip(items, mine, strict=True):
            row += len(positions)
            behind = np.append(np.array(item.tokens[1:], np.int64), item.next_token or 0)
            if len(positions) and positions[-1] == item.stop - 1 and item.sampling is not None:
                logits = self.model.logits(hidden[row - 1 : row])[0]
                token = sample(logits, item.stop, item.sampling)
                sampled[item.request_id] = token
                behind[-1] = token.token
            following.append(behind[positions - item.start])
        return sampled, _joined(following)


def _deal(items: Sequence[StepItem], num_ranks: int) -> list[BalancedChunks]:
    """The step's queries: each request's remainder goes on where the last one's ended, so that the
    loads of all ranks differ by at most one token."""
    deals, before = [], 0
    for item in items:
        deals.append(BalancedChunks(num_ranks, item.start, item.stop, rotate=before))
        before += item.stop - item.start
    return deals


def _joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    whole = np.concatenate(parts) if parts else np.empty(0)
    return torch.from_numpy(whole.astype(np.int64))
