"""Drafter: passes of the MTP module at positions known beforehand; each drafts once a request."""

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.memory import KVMemory, StepRequest
from kvflow.engine.messages import StepItem
from kvflow.engine.spec.kept import Home, KeptStates
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Replicated
from kvflow.models.glm import Glm
from kvflow.models.mtp import later_selection
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection


@define(eq=False)
class Drafter:
    """Pass n computes the MTP row of position ``start - 1 + n`` of each item that asks for more
    than n drafts: from the kept hidden state and the newest token, then from the module's own
    hidden state and the draft before. Rows written on the way are provisional."""

    model: Glm
    memory: KVMemory
    comm: Comm
    tp: Comm

    def draft(
        self, items: Sequence[StepItem], homes: Sequence[Home], kept: KeptStates
    ) -> dict[int, Tensor]:
        """Draft tokens int64 ``[num_drafts]`` of the items whose home this rank is, by index. A
        collective: the number of passes is the largest `num_drafts` of all items."""
        passes = max((item.num_drafts for item in items), default=0)
        mine = [i for i, h in enumerate(homes) if self.comm.rank in h and items[i].num_drafts]
        states = [state for i in mine if (state := kept.before(items[i])) is not None]
        tokens = torch.tensor([items[i].tokens[-1] for i in mine], dtype=torch.int64)
        hidden = torch.cat(states) if states else self._no_rows()
        drafts: dict[int, list[Tensor]] = {i: [] for i in mine}
        first: dict[int, Tensor] = {}
        for number in range(passes):
            rows = [row for row, i in enumerate(mine) if items[i].num_drafts > number]
            mine = [mine[row] for row in rows]
            place = torch.tensor(rows, dtype=torch.int64)
            tokens, hidden = tokens.index_select(0, place), hidden.index_select(0, place)
            tokens, hidden, selection = self._pass(
                number, items, homes, mine, tokens, hidden, [first[i] for i in mine if number]
            )
            if number == 0:
                first = dict(zip(mine, selection.chosen, strict=True))
            for i, token in zip(mine, tokens.unbind(), strict=True):
                drafts[i].append(token)
        return {i: torch.stack(parts) for i, parts in drafts.items()}

    def _pass(
        self,
        number: int,
        items: Sequence[StepItem],
        homes: Sequence[Home],
        mine: Sequence[int],
        tokens: Tensor,
        hidden: Tensor,
        first: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Selection]:
        """Drafts, hidden states and selection of one pass, of this rank's items `mine`."""
        live = [i for i, item in enumerate(items) if item.num_drafts > number]
        requests = [_request(items[i], homes[i], items[i].start - 1 + number) for i in live]
        segments = [
            Segment(at, torch.tensor([request.start]), request.stop)
            for at, (i, request) in enumerate(zip(live, requests, strict=True))
            if i in mine
        ]
        config, shared = self.model.config, None
        if number and config.index_share_for_mtp_iteration:
            shared = later_selection(first, segments, number, config.index_topk)
        kv = self.memory.open(requests, frozenset())
        hidden, selection = self.model.mtp_forward(
            tokens, hidden, segments, kv, self.comm, shared, self.tp
        )
        return self.model.logits(hidden).argmax(1), hidden, selection

    def _no_rows(self) -> Tensor:
        return self.model.embedding.new_empty(0, self.model.config.hidden_size)


def _request(item: StepItem, home: Home, position: int) -> StepRequest:
    """One position of a request, computed at its home."""
    one = Placement(Replicated(position, position + 1), (home,))
    return StepRequest(item.request_id, position, position + 1, one, item.tables)
