"""Reads: the rows that queries attend to, found in slots of the device's pool.

All rows of one query are on the device at a time. Where the queries of a request choose more rows
than its hot rows hold, they are read in parts, one behind the other; of several requests the
first parts go together, then the second ones.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from kvflow.engine.access.shards import ShardQueries
from kvflow.engine.hisparse.request import GroupRows, RequestRows
from kvflow.layouts.counts import each_of
from kvflow.layouts.sharding import Ints
from kvflow.models.selection import Group, group_size
from kvflow.transfers.operators.hotfetch import Misses


@frozen(eq=False)
class Part:
    """Queries whose rows are on the device together: what to fetch first, the slots read, int64
    [t], each once; `queries` int64 [m] are their places among all, ``counts[i]`` of `index` int64
    [sum(counts)] the places of their rows among the slots, query after query."""

    misses: tuple[Misses, ...]
    slots: Tensor
    queries: Tensor
    counts: Tensor
    index: Tensor
    topk: int

    def groups(self) -> tuple[Group, ...]:
        """The queries by the size each is padded to; those without rows are left out."""
        sizes = torch.tensor([group_size(n, self.topk) if n else 0 for n in self.counts.tolist()])
        begins = torch.cumsum(self.counts, 0) - self.counts
        groups = []
        for size in torch.unique(sizes).tolist():
            mine = (sizes == size).nonzero().flatten()
            counts, nth = self.counts[mine], torch.arange(size)
            lanes = begins[mine, None] + torch.minimum(nth, counts[:, None] - 1)
            if size:
                groups.append(Group(self.queries[mine], self.index[lanes], counts))
        return tuple(groups)


@define(eq=False)
class Reads:
    """What queries of a step read, planned once for an index group. Each layer of the group reads
    the parts once, in order: its rows then lie as those of every other layer. The first layer
    fetches for all of them, unless there are several parts or calls, or rows that the later layers
    have not published yet: then each layer fetches for itself."""

    group: tuple[str, ...]
    parts: Sequence[Part]
    together: bool
    groups: Sequence[tuple[Group, ...]] = field(init=False)
    unread: set[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.groups = [part.groups() for part in self.parts]
        self.unread = set(self.group)

    @property
    def is_untouched(self) -> bool:
        return len(self.unread) == len(self.group)

    @property
    def is_complete(self) -> bool:
        """Whether all layers hold the same rows."""
        fetched = self.together and not self.is_untouched
        return fetched or not self.unread or not self.parts


def plan_reads(
    which: ShardQueries, requests: Sequence[RequestRows], group: tuple[str, ...], *, alone: bool
) -> Reads:
    """Gives every chosen row a slot; `requests` are those of the step. `alone`: nothing else is
    read for the group in this step."""
    shares = [
        list(_split(which, np.flatnonzero(which.request == i), requests[i].groups[group]))
        for i in np.unique(which.request).tolist()
    ]
    parts = []
    for n in range(max(map(len, shares), default=0)):
        nth = [share[n] for share in shares if n < len(share)]
        parts.append(_part(which, nth, requests, group))
    missed_new = any(rows.groups[group].missed_new for rows in requests)
    together = alone and len(parts) == 1 and not missed_new
    return Reads(group, parts, together)


def _local_of(which: ShardQueries, queries: Ints) -> Ints:
    """The local indices that some queries chose, query after query."""
    begins = np.cumsum(which.counts) - which.counts
    query, nth = each_of(which.counts[queries])
    found: Ints = which.local[begins[queries][query] + nth]
    return found


def _split(which: ShardQueries, queries: Ints, rows: GroupRows) -> Iterator[Ints]:
    """Consecutive queries of one request whose hot rows fit together, as many as do."""
    limit, capacity = rows.tail.first_row, rows.hot.capacity
    local = _local_of(which, queries)
    if len(np.unique(local[local < limit])) <= capacity:
        yield queries
        return
    seen = np.zeros(limit, np.bool_)
    start, count = 0, 0
    for i in range(len(queries)):
        mine = _local_of(which, queries[i : i + 1])
        mine = mine[mine < limit]
        fresh = int((~seen[mine]).sum())
        if count + fresh > capacity:
            yield queries[start:i]
            seen[:] = False
            start, count, fresh = i, 0, len(mine)
        seen[mine] = True
        count += fresh
    yield queries[start:]


def _part(
    which: ShardQueries,
    shares: Sequence[Ints],
    requests: Sequence[RequestRows],
    group: tuple[str, ...],
) -> Part:
    misses, slots, index, num_slots = [], [], [], 0
    for queries in shares:
        held = requests[int(which.request[queries[0]])]
        rows, where = np.unique(_local_of(which, queries), return_inverse=True)
        found, missing = held.groups[group].resolve(rows)
        misses.append(held.lanes(rows[missing], found[missing]))
        slots.append(found)
        index.append(where + num_slots)
        num_slots += len(found)
    queries = np.concatenate(shares)
    return Part(
        tuple(misses),
        torch.from_numpy(np.concatenate(slots)),
        torch.from_numpy(queries),
        torch.from_numpy(which.counts[queries]),
        torch.from_numpy(np.concatenate(index)),
        which.topk,
    )
