"""Sizes that queries' rows are padded to: functions of the count alone."""

import numpy as np
import pytest

from kvflow.models.selection import SMALLEST_GROUP, group_size, group_sizes


@pytest.mark.parametrize("topk", [1, 8, 48, 256, 2048])
def test_group_sizes(topk: int) -> None:
    counts = np.arange(topk + 1)
    sizes = group_sizes(counts, topk)
    assert sizes.tolist() == [group_size(n, topk) for n in counts.tolist()]
    assert (sizes >= counts).all()
    assert (sizes <= topk).all()
    assert (np.diff(sizes) >= 0).all()
    assert (sizes <= np.maximum(1.5 * counts, counts + SMALLEST_GROUP)).all()
    assert len(np.unique(sizes)) <= 2 * max(topk, 2).bit_length()
