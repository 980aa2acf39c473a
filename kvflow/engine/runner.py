"""StepRunner: one rank's part of a step, the same for prefill ranks and decode ranks."""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define

from kvflow.comm import Comm
from kvflow.engine.memory import Deal, KVMemory, StepRequest, balanced_deal
from kvflow.engine.messages import StepItem
from kvflow.engine.pagedstep import PagedMemory
from kvflow.engine.sampling import Sampled, sample
from kvflow.layouts.layout import KVLayout
from kvflow.models.glm import Glm
from kvflow.models.segment import Segment
from kvflow.transfers.executors.base import RankCache


@define(eq=False)
class StepRunner:
    """Runs steps of a model over one rank's cache. `deal` says which rank computes which queries;
    everything is derived from the items, which all ranks hold alike."""

    model: Glm
    memory: KVMemory
    comm: Comm
    deal: Deal

    @classmethod
    def over(cls, model: Glm, layout: KVLayout, cache: RankCache, comm: Comm) -> "StepRunner":
        """Over pages, with every request's tokens dealt to all ranks of `comm`."""
        deal = balanced_deal([(rank,) for rank in range(comm.size)])
        return cls(model, PagedMemory(layout, cache, comm), comm, deal)

    def run(self, items: Sequence[StepItem]) -> dict[str, Sampled]:
        """Computes the items' tokens, stores their KV, and samples where an item asks for it.
        Returns the tokens sampled on this rank: the one that holds a request's last position."""
        requests = [
            StepRequest(item.request_id, item.start, item.stop, deal, item.tables)
            for item, deal in zip(items, self.deal(items), strict=True)
        ]
        mine = [request.local_positions(self.comm.rank) for request in requests]
        mtp = frozenset(self.memory.layout.spec.select(part="mtp"))
        kv = self.memory.open(requests, mtp)
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
        return sampled

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


def _joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    whole = np.concatenate(parts) if parts else np.empty(0)
    return torch.from_numpy(whole.astype(np.int64))
