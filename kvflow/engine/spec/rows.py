"""StepRows: the rows one rank computes in the target model's pass, and where their tokens come
from: given by the step's items, drafted before it, or sampled in it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvflow.engine.api import SamplingParams
from kvflow.engine.memory import StepRequest
from kvflow.engine.messages import StepItem
from kvflow.layouts.sharding import Ints
from kvflow.models.segment import Segment


@frozen
class SampledRow:
    """A row whose logits become a token: `row` counts the rank's rows, `position` is the row's
    own; the token's is the next."""

    item_idx: int
    row: int
    position: int
    sampling: SamplingParams


@frozen(eq=False)
class StepRows:
    """Rows by item, then position, as numpy and int64: `given` holds 0 where a draft belongs, at
    `draft_rows`; `following` holds 0 where a sampled token belongs."""

    segments: tuple[Segment, ...]
    given: Ints
    draft_rows: dict[int, Ints]
    following: Ints
    sampled: tuple[SampledRow, ...]

    @classmethod
    def of(
        cls, items: Sequence[StepItem], requests: Sequence[StepRequest], rank: int
    ) -> "StepRows":
        """The rows of `rank`; `requests` are the items' shares, drafts included."""
        segments, given, following = [], [], []
        draft_rows: dict[int, Ints] = {}
        sampled: list[SampledRow] = []
        first = 0
        for i, (item, request) in enumerate(zip(items, requests, strict=True)):
            positions = request.local_positions(rank)
            if not len(positions):
                continue
            known = np.array([*item.tokens, item.next_token or 0], np.int64)
            at, newest = positions - item.start, len(item.tokens) - 1
            rows = first + np.arange(len(positions))
            segments.append(Segment(i, torch.from_numpy(positions), request.stop))
            given.append(np.where(at <= newest, known[np.minimum(at, newest)], 0))
            following.append(known[np.minimum(at, newest) + 1])
            if (at > newest).any():
                draft_rows[i] = rows[at > newest]
            if item.sampling is not None:
                ends = at >= newest
                pairs = zip(rows[ends], positions[ends], strict=True)
                sampled += [SampledRow(i, int(row), int(p), item.sampling) for row, p in pairs]
            first += len(positions)
        return cls(tuple(segments), _joined(given), draft_rows, _joined(following), tuple(sampled))

    @property
    def sampled_rows(self) -> Tensor:
        return torch.tensor([s.row for s in self.sampled], dtype=torch.int64)

    def tokens(self, drafts: Mapping[int, Tensor]) -> Tensor:
        """The rows' own tokens int64 ``[n]``, with this rank's drafts by item index."""
        tokens = torch.from_numpy(self.given)
        for i, rows in self.draft_rows.items():
            tokens = tokens.index_copy(0, torch.from_numpy(rows), drafts[i])
        return tokens

    def followers(self, sampled: Tensor) -> Tensor:
        """The tokens int64 ``[n]`` that follow the rows, given those sampled in this step."""
        return torch.from_numpy(self.following).index_copy(0, self.sampled_rows, sampled)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
