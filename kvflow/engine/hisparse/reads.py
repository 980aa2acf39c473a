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

from kvflow.engine.hisparse.request import GroupRows, RequestRows
from kvflow.layouts.counts import each_of
from kvflow.layouts.sharding import Ints
from kvflow.models.selection import Group, group_size
from kvflow.transfers.operators.hotfetch import Misses


@frozen(eq=False)
class ShardQueries:
    """Queries, and the rows of this rank's shard that each attends to.

    request: int64 ``[m]``, the index in the step of each query's request. counts: int64 ``[m]``,
    how many rows it chose here, 0 included. local: int64 ``[sum(counts)]``, their local indices
    in the shard, query after query, each once. topk: the most there can be."""

    request: Ints
    counts: Ints
    local: Ints
    topk: int

    def local_of(self, queries: Ints) -> Ints:
        """The local indices that some queries chose, query after query."""
        begins = np.cumsum(self.counts) - self.counts
        query, nth = each_of(self.counts[queries])
        found: Ints = self.local[begins[queries][query] + nth]
        return found


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
    fetches for all of them, unless there are several parts, or rows that the later layers have not
    published yet: then each layer fetches for itself."""

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
        return not self.unread or (self.together and not self.is_untouched)


def plan_reads(
    which: ShardQueries, requests: Sequence[RequestRows], group: tuple[str, ...]
) -> Reads:
    """Gives every chosen row a slot; `requests` are those of the step."""
    shares = [
        list(_split(which, np.flatnonzero(which.request == i), requests[i].groups[group]))
        for i in np.unique(which.request).tolist()
    ]
    parts = []
    for n in range(max(map(len, shares), default=0)):
        nth = [share[n] for share in shares if n < len(share)]
        parts.append(_part(which, nth, requests, group))
    together = len(parts) == 1 and not any(rows.groups[group].missed_new for rows in requests)
    return Reads(group, parts, together)


def _split(which: ShardQueries, queries: Ints, rows: GroupRows) -> Iterator[Ints]:
    """Consecutive queries of one request whose hot rows fit together, as many as do."""
    limit, capacity = rows.tail.first_row, rows.hot.capacity
    local = which.local_of(queries)
    if len(np.unique(local[local < limit])) <= capacity:
        yield queries
        return
    seen = np.zeros(limit, np.bool_)
    start, count = 0, 0
    for i in range(len(queries)):
        mine = which.local_of(queries[i : i + 1])
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
        rows, where = np.unique(which.local_of(queries), return_inverse=True)
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
