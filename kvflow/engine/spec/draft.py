"""Drafter: passes of the MTP module, each a draft of every request that wants one more."""

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.memory import KVMemory
from kvflow.engine.messages import StepItem
from kvflow.engine.spec.kept import KeptStates
from kvflow.engine.spec.passes import DraftPass
from kvflow.models.glm import Glm
from kvflow.models.mtp import later_selection
from kvflow.models.selection import Selection


@define(eq=False)
class Drafter:
    """Its first pass takes the kept hidden state and the newest token of a request, a later one
    the module's own hidden state and the draft before. Rows written on the way are provisional:
    the target model's pass writes all of them again."""

    model: Glm
    memory: KVMemory
    comm: Comm
    tp: Comm

    def draft(
        self, items: Sequence[StepItem], passes: Sequence[DraftPass], kept: KeptStates
    ) -> dict[int, Tensor]:
        """Draft tokens int64 ``[num_drafts]`` of the items whose home this rank is, by index. A
        collective."""
        mine = passes[0].items if passes else ()
        states = [state for i in mine if (state := kept.before(items[i])) is not None]
        tokens = torch.tensor([items[i].tokens[-1] for i in mine], dtype=torch.int64)
        hidden = torch.cat(states) if states else self._no_rows()
        drafts: dict[int, list[Tensor]] = {i: [] for i in mine}
        first: dict[int, Tensor] = {}
        for number, one in enumerate(passes):
            shared = self._shared(number, one, first)
            kv = self.memory.open(one.requests, frozenset())
            hidden, selection = self.model.mtp_forward(
                tokens.index_select(0, one.rows),
                hidden.index_select(0, one.rows),
                one.segments,
                kv,
                self.comm,
                shared,
                self.tp,
            )
            if number == 0:
                first = dict(zip(one.items, selection.chosen, strict=True))
            tokens = self.model.logits(hidden).argmax(1)
            for row, i in enumerate(one.items):
                drafts[i].append(tokens[row : row + 1])
        return {i: torch.cat(parts) for i, parts in drafts.items()}

    def _shared(self, number: int, one: DraftPass, first: dict[int, Tensor]) -> Selection | None:
        """What a later pass attends to where it does not choose anew."""
        config = self.model.config
        if number == 0 or not config.index_share_for_mtp_iteration:
            return None
        chosen = [first[i] for i in one.items]
        return later_selection(chosen, one.segments, number, config.index_topk)

    def _no_rows(self) -> Tensor:
        return self.model.embedding.new_empty(0, self.model.config.hidden_size)
