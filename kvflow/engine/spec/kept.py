"""Hidden states that outlive their step: what the next step's drafts start from."""

from attrs import define, field, frozen
from torch import Tensor

from kvflow.engine.messages import StepItem

Home = tuple[int, ...]
"""The ranks that compute a request's newest tokens: one, or a tensor-parallel group."""


@frozen(eq=False)
class Kept:
    """Hidden states of the sampled rows of one request's last step: `hidden` ``[n, hidden]`` at
    positions [start, start + n) on the ranks of its home, None elsewhere."""

    home: Home
    start: int
    num_rows: int
    hidden: Tensor | None


@define(eq=False)
class KeptStates:
    """By request. Which there are, and where, follows from the steps' items, so that all ranks of
    a group agree; only the numbers are at home alone."""

    _kept: dict[str, Kept] = field(init=False, factory=dict)

    def can_draft(self, item: StepItem, home: Home) -> bool:
        """Whether drafts can follow this item's token: it is one newest token, and the hidden
        state before it is kept where it will be needed."""
        kept = self._kept.get(item.request_id)
        return (
            kept is not None
            and item.sampling is not None
            and len(item.tokens) == 1
            and kept.home == home
            and 0 <= item.start - 1 - kept.start < kept.num_rows
        )

    def before(self, item: StepItem) -> Tensor | None:
        """The hidden state ``[1, hidden]`` at the position before the item, or None on a rank
        that is not home to it."""
        kept = self._kept[item.request_id]
        if kept.hidden is None:
            return None
        row = item.start - 1 - kept.start
        return kept.hidden[row : row + 1]

    def wanted(self, item: StepItem) -> bool:
        """Whether this step's hidden states may be needed in the next one."""
        asked = item.num_drafts > 0 or item.request_id in self._kept
        return asked and item.sampling is not None

    def keep(self, request_id: str, kept: Kept) -> None:
        self._kept[request_id] = kept

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._kept)
