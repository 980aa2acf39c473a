"""Lists of local indices, from those who want rows to those who hold them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import frozen

from kvflow.comm import Comm
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts, joined
from kvflow.layouts.sharding import Ints


@frozen(eq=False)
class Lists:
    """Several lists one after the other: `counts` int64 ``[h]`` says how long each is."""

    counts: Ints
    values: Ints

    def split(self) -> list[Ints]:
        return np.split(self.values, np.cumsum(self.counts)[:-1]) if len(self.counts) else []


def exchange_lists(
    comm: Comm,
    facts: StepFacts,
    wanted: Sequence[Lists],
    num_lists: Callable[[int], int],
    counters: Counters,
) -> list[Lists]:
    """A collective. `wanted` goes to ``facts.members``, one entry each; what comes back is from
    ``facts.askers``, of which rank r sends ``num_lists(r)`` lists. Indices take 4 bytes each, 8
    where contexts are so long."""
    dtype = facts.index_dtype
    sent = [np.concatenate([w.counts, w.values]) for w in wanted]
    by_rank = dict(zip(facts.members, sent, strict=True))
    order = sorted(by_rank)
    counts = [len(by_rank.get(r, ())) for r in range(comm.size)]
    rows = torch.from_numpy(joined([by_rank[r] for r in order])).to(dtype)
    arrived, received = comm.all_to_all(rows, counts)
    mine = arrived.numel() - received[comm.rank]
    counters.received("positions", mine * dtype.itemsize)
    lists, start, values = [], 0, arrived.to(torch.int64).numpy()
    for rank in facts.askers:
        head, end = start + num_lists(rank), start + received[rank]
        lists.append(Lists(values[start:head], values[head:end]))
        start = end
    return lists
