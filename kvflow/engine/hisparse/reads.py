"""Reads: the rows that the queries of a step attend to, found in slots of the device's pool.

All rows of one query are on the device at a time. Where the queries of a request choose more rows
than its hot rows hold, they are read in parts, one behind the other; of several requests the
first parts go together, then the second ones.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.engine.hisparse.request import GroupRows, RequestRows
from kvflow.layouts.sharding import Ints
from kvflow.models.selection import Group, Selection, group_size
from kvflow.transfers.operators.hotfetch import Misses


@frozen(eq=False)
class Wanted:
    """What queries of one request choose: `queries` int64 [m] are their places in the step, `rows`
    int64 [m, k] local indices of which the first ``counts[i]`` of query i are real."""

    queries: Ints
    rows: Ints
    counts: Ints

    @property
    def real(self) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
        return np.arange(self.rows.shape[1]) < self.counts[:, None]

    def part(self, start: int, stop: int) -> "Wanted":
        """Some of the queries."""
        return Wanted(self.queries[start:stop], self.rows[start:stop], self.counts[start:stop])


@frozen(eq=False)
class Part:
    """Queries whose rows are on the device together: what to fetch first, the slots read, int64
    [t], each once, and the queries as `models.reading.attend` takes them."""

    misses: tuple[Misses, ...]
    slots: Tensor
    groups: tuple[Group, ...]


@define(eq=False)
class Reads:
    """The parts of one selection for one index group. Each layer of the group reads them once, in
    order: its rows then lie as those of every other layer. A single part is fetched for all layers
    at once; several are fetched by each layer for itself."""

    selection: Selection
    group: tuple[str, ...]
    parts: Sequence[Part]
    unread: set[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.unread = set(self.group)

    @property
    def is_fetched(self) -> bool:
        """Whether all layers hold the same rows."""
        return not self.unread or (len(self.parts) == 1 and len(self.unread) < len(self.group))


def plan_reads(
    selection: Selection,
    wanted: Mapping[int, Wanted],
    requests: Sequence[RequestRows],
    group: tuple[str, ...],
) -> Reads:
    """Gives every chosen row a slot. `wanted` is by request, an index of `requests`."""
    shares = {i: list(_split(w, requests[i].groups[group])) for i, w in wanted.items()}
    parts = []
    for n in range(max(map(len, shares.values()), default=0)):
        together = {i: share[n] for i, share in shares.items() if n < len(share)}
        parts.append(_part(together, requests, group, selection.topk))
    return Reads(selection, group, parts)


def _split(wanted: Wanted, rows: GroupRows) -> Iterator[Wanted]:
    """Consecutive queries whose hot rows fit together, as many as do."""
    limit, capacity = rows.tail.first_row, rows.hot.capacity
    hot = wanted.real & (wanted.rows < limit)
    if len(np.unique(wanted.rows[hot])) <= capacity:
        yield wanted
        return
    seen = np.zeros(limit, np.bool_)
    start, count = 0, 0
    for i in range(len(wanted.queries)):
        mine = wanted.rows[i][hot[i]]
        fresh = int((~seen[mine]).sum())
        if count + fresh > capacity:
            yield wanted.part(start, i)
            seen[:] = False
            start, count, fresh = i, 0, len(mine)
        seen[mine] = True
        count += fresh
    yield wanted.part(start, len(wanted.queries))


def _part(
    wanted: Mapping[int, Wanted],
    requests: Sequence[RequestRows],
    group: tuple[str, ...],
    topk: int,
) -> Part:
    misses, queries, slots, counts = [], [], [], []
    width = group_size(max(w.rows.shape[1] for w in wanted.values()), topk)
    for i, w in wanted.items():
        real = w.real
        rows, where = np.unique(w.rows[real], return_inverse=True)
        found, missing = requests[i].groups[group].resolve(rows)
        misses.append(requests[i].misses(rows[missing], found[missing]))
        at = np.zeros((len(w.rows), width), np.int64)
        at[:, : w.rows.shape[1]][real] = found[where]
        at[np.arange(width) >= w.counts[:, None]] = found[0] if len(found) else 0
        queries.append(w.queries)
        slots.append(at)
        counts.append(w.counts)
    read, rows_of = np.unique(np.concatenate(slots), return_inverse=True)
    together = Wanted(np.concatenate(queries), rows_of.reshape(-1, width), np.concatenate(counts))
    return Part(tuple(misses), torch.from_numpy(read), _grouped(together, topk))


def _grouped(wanted: Wanted, topk: int) -> tuple[Group, ...]:
    """Queries padded to a size that depends on each alone; those without rows are left out."""
    sizes = np.array([group_size(n, topk) for n in wanted.counts.tolist()], np.int64)
    sizes[wanted.counts == 0] = 0
    groups = []
    for size in np.unique(sizes[sizes > 0]).tolist():
        mine = sizes == size
        columns = (wanted.queries[mine], wanted.rows[mine, :size], wanted.counts[mine])
        groups.append(Group(*(torch.from_numpy(np.ascontiguousarray(c)) for c in columns)))
    return tuple(groups)
