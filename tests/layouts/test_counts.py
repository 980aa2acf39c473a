"""Counting inside arrays of counts, against two nested loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvflow.layouts.counts import each_of


@given(st.lists(st.integers(0, 5), max_size=8))
def test_each_of_is_two_nested_loops(counts: list[int]) -> None:
    which, nth = each_of(np.array(counts, np.int64))
    told = list(zip(which.tolist(), nth.tolist(), strict=True))
    assert told == [(i, k) for i, n in enumerate(counts) for k in range(n)]


def test_each_of_skips_what_counts_nothing() -> None:
    which, nth = each_of(np.array([2, 0, 3]))
    assert which.tolist() == [0, 0, 2, 2, 2]
    assert nth.tolist() == [0, 1, 0, 1, 2]
