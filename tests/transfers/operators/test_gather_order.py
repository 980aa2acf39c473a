"""The order of a gather's rows, placed or sorted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvflow.transfers.executors.collective import _order

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), unique=True, max_size=60)


@given(PAIRS, st.sampled_from([1, 1000]), st.integers(0, 10**6))
def test_rows_are_in_order_of_group_and_index(pairs, spread, offset):
    group, local = np.array(pairs, np.int64).reshape(-1, 2).T
    local = local * spread + offset
    order = _order(group, local)
    assert [(group[i], local[i]) for i in order] == sorted(zip(group, local, strict=True))
