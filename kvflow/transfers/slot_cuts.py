"""Cutting the runs of a link into those that move one way and those that move another."""

import numpy as np
import numpy.typing as npt
from attrs import evolve

from kvflow.layouts.sharding import Ints
from kvflow.transfers.lower import SlotRuns


def take_runs(runs: SlotRuns, index: Ints | npt.NDArray[np.bool_]) -> SlotRuns:
    """The runs that a mask or an index selects."""
    return evolve(
        runs,
        src=runs.src[index],
        src_stride=runs.src_stride[index],
        dst=runs.dst[index],
        dst_stride=runs.dst_stride[index],
        count=runs.count[index],
    )


def mirrored(runs: SlotRuns) -> SlotRuns:
    """The same tokens on the way back."""
    back = (runs.dst, runs.dst_stride, runs.src, runs.src_stride, runs.count)
    return SlotRuns(*back, runs.dst_heads, runs.src_heads)


def cut_runs(runs: SlotRuns, size: int) -> list[SlotRuns]:
    """The same tokens in the same order, at most `size` in each part; a run may be cut in two."""
    start = np.cumsum(runs.count) - runs.count
    total, parts = runs.num_tokens, []
    for low in range(0, total, size):
        high = min(low + size, total)
        index = np.flatnonzero((start < high) & (start + runs.count > low))
        some, begin = take_runs(runs, index), start[index]
        skip = np.maximum(low - begin, 0)
        parts.append(
            evolve(
                some,
                src=some.src + skip * some.src_stride,
                dst=some.dst + skip * some.dst_stride,
                count=np.minimum(begin + some.count, high) - begin - skip,
            )
        )
    return parts


def grains_of(counts: Ints) -> Ints:
    """How many neighbours are copied as one, for each of some runs of ``counts[i]`` of them, at
    least one run of at least one: most tokens lie in runs of one length, or multiples of it, and
    are copied by that; the others by what divides all of theirs. A head and a tail of a range are
    not to cut up what lies between."""
    lengths, times = np.unique(counts, return_counts=True)
    usual = lengths[np.argmax(lengths * times)]
    is_usual = counts % usual == 0
    grains: Ints = np.where(is_usual, usual, np.gcd.reduce(counts[~is_usual]))
    return grains
