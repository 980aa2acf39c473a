"""Passes of the MTP module that follow one another, a draft token each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvflow.models.segment import Segment
from kvflow.models.selection import Selection


def later_selection(
    chosen: Sequence[Tensor], segments: Sequence[Segment], num_later: int, topk: int
) -> Selection:
    """What a pass `num_later` positions behind the first one attends to where the config says
    ``index_share_for_mtp_iteration``: the first pass's choice and every position since.

    chosen: per segment int64 ``[1, k]``, what its row chose in the first pass. segments: of this
    pass, one row each. At most ``topk + num_later`` positions."""
    longer = [
        torch.cat([first, segment.positions - torch.arange(num_later - 1, -1, -1)[None]], 1)
        for first, segment in zip(chosen, segments, strict=True)
    ]
    return Selection.of(longer, segments, topk + num_later)
