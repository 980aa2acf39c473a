"""Which passes of the MTP module a step makes: known on the host before any of them runs."""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvflow.engine.memory import StepRequest
from kvflow.engine.messages import StepItem
from kvflow.engine.spec.kept import Home
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Replicated
from kvflow.models.segment import Segment


@frozen(eq=False)
class DraftPass:
    """One position of every request that asks for more drafts than there were passes before.
    `requests` are of all ranks. `items` are the indices of those at home on this one, `segments`
    their rows, and `rows` int64 says where they stood in the pass before."""

    requests: tuple[StepRequest, ...]
    items: tuple[int, ...]
    segments: tuple[Segment, ...]
    rows: Tensor


def plan_passes(
    items: Sequence[StepItem], homes: Sequence[Home], rank: int
) -> tuple[DraftPass, ...]:
    """As many as the largest `num_drafts`. Pass n is at position ``start - 1 + n`` of its items."""
    passes = []
    before = [i for i, home in enumerate(homes) if rank in home and items[i].num_drafts]
    for number in range(max((item.num_drafts for item in items), default=0)):
        live = [i for i, item in enumerate(items) if item.num_drafts > number]
        requests = [_request(items[i], homes[i], items[i].start - 1 + number) for i in live]
        mine = [i for i in before if items[i].num_drafts > number]
        segments = [
            Segment(at, torch.from_numpy(np.array([request.start])), request.stop)
            for at, (i, request) in enumerate(zip(live, requests, strict=True))
            if i in mine
        ]
        rows = torch.tensor([before.index(i) for i in mine], dtype=torch.int64)
        passes.append(DraftPass(tuple(requests), tuple(mine), tuple(segments), rows))
        before = mine
    return tuple(passes)


def _request(item: StepItem, home: Home, position: int) -> StepRequest:
    """One position of a request, computed at its home."""
    one = Placement(Replicated(position, position + 1), (home,))
    return StepRequest(item.request_id, position, position + 1, one, item.tables)
