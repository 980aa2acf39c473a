"""Counting inside arrays of counts, the one loop that vectorised code writes again and again."""

import numpy as np

from kvflow.layouts.sharding import Ints


def each_of(count: Ints) -> tuple[Ints, Ints]:
    """For every i and every k < ``count[i]``, in that order: the i's and the k's.

    >>> which, nth = each_of(np.array([2, 0, 3]))
    >>> which.tolist(), nth.tolist()
    ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    """
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
