"""Whether a plan reads bytes that it writes: then what arrives depends on what moves first."""

from collections.abc import Iterator, Mapping

import numpy as np

from kvflow.errors import PlanError
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.lower import BoundPlan, Descriptors, descriptors

Caches = Mapping[int, RankCache]


def check_apart(bound: BoundPlan, sources: Caches, targets: Caches) -> None:
    """Raises `PlanError` naming the first byte that links of the plan write and others read; a row
    that stays where it is counts for nothing. Only memory that both sides use is looked at."""
    if not _share(_regions(sources), _regions(targets)):
        return
    moved = list(_lowered(bound, sources, targets))
    if not moved:
        return
    src, dst, nbytes = (
        np.concatenate([getattr(one, name) for one in moved]) for name in ("src", "dst", "nbytes")
    )
    goes = src != dst
    read = _spans(src[goes], nbytes[goes])
    written = _spans(dst[goes], nbytes[goes])
    if (at := _share(read, written)) is not None:
        raise PlanError(
            f"the plan writes the byte at {at:#x}, which it also reads: source and target blocks "
            "must be apart"
        )


def _lowered(bound: BoundPlan, sources: Caches, targets: Caches) -> Iterator[Descriptors]:
    """Every range of every link, in addresses of this process."""
    here = {rank: cache.geometries() for rank, cache in sources.items()}
    for rank, cache in targets.items():
        there = cache.geometries()
        for part, src_rank, runs in bound.links_to(rank):
            for name in part.components:
                yield descriptors(runs, here[src_rank][name], there[name])


def _regions(caches: Caches) -> Ints:
    """The memories of caches, as [begin, end) rows that do not touch, ascending."""
    found = {
        (view.memory.data_ptr(), view.memory.numel())
        for cache in caches.values()
        for view in cache.pages.values()
    }
    begin, nbytes = np.array(sorted(found), np.int64).reshape(-1, 2).T
    return _spans(begin, nbytes)


def _spans(begin: Ints, nbytes: Ints) -> Ints:
    """Ranges as [begin, end) rows that do not touch, ascending."""
    order = np.argsort(begin)
    begin = begin[order]
    end = np.maximum.accumulate(begin + nbytes[order]) if len(begin) else begin
    first = np.flatnonzero(np.append(True, begin[1:] > end[:-1])[: len(begin)])
    last = np.append(first[1:], len(begin)) - 1 if len(first) else first
    return np.stack([begin[first], end[last]], axis=1)


def _share(some: Ints, others: Ints) -> int | None:
    """The first byte in both of two sets of spans; None if there is none."""
    if not len(some) or not len(others):
        return None
    at = np.searchsorted(others[:, 1], some[:, 0], side="right")
    near = others[np.minimum(at, len(others) - 1)]
    meets = (at < len(others)) & (near[:, 0] < some[:, 1])
    if not meets.any():
        return None
    i = int(np.flatnonzero(meets)[0])
    return int(max(some[i, 0], near[i, 0]))
