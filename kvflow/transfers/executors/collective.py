"""All-gather of packed rows, driven by plans: one schedule for a step, one collective a layer.

Each plan describes how the rows of one request get from the ranks of a group into one dense
target; every rank of the group becomes a copy of that target. Ranks send the rows they hold in
the order (request, local index), padded by nothing or to the rows of the fullest rank; the
schedule says where each arrives.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.errors import PlanError
from kvflow.layouts.counts import each_of
from kvflow.layouts.sharding import Ints
from kvflow.transfers.plan import Plan, TransferRuns


@frozen(eq=False)
class GatherSchedule:
    """counts: rows that each rank sends, padding included. send: for every rank, (request, local
    index) of its rows in sending order, two int64 vectors. arrival: for every request, int64
    [tokens]: the place in the gathered rows of each of its tokens, ascending by position."""

    counts: tuple[int, ...]
    send: tuple[tuple[Ints, Ints], ...]
    arrival: tuple[Tensor, ...]

    def gather(self, comm: Comm, rows: Tensor, outs: Sequence[Tensor]) -> None:
        """A collective. rows: uint8 [rows of this rank, nbytes], without padding; outs: for every
        request a contiguous uint8 [tokens, nbytes] that is filled in ascending position."""
        if padding := self.counts[comm.rank] - len(self.send[comm.rank][0]):
            rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        gathered = comm.all_gather(rows, self.counts)
        for place, out in zip(self.arrival, outs, strict=True):
            torch.index_select(gathered, 0, place, out=out)


def gather_schedule(
    plans: Sequence[Plan], num_ranks: int, *, padded: bool = False
) -> GatherSchedule:
    """The schedule of a group of `num_ranks` for the requests of a step. Every plan's target is
    one dense replica (rank 0). It depends on group-wide facts only, so all ranks derive the same.
    With `padded` every rank sends as many rows as the fullest one.
    Raises `PlanError` for a plan with several target ranks or a source rank outside the group."""
    columns = [_expand(i, plan.parts[0].runs) for i, plan in enumerate(plans)]
    rank, request, local = (
        np.concatenate([c[k] for c in columns]) if columns else np.empty(0, np.int64)
        for k in range(3)
    )
    if rank.size and int(rank.max()) >= num_ranks:
        raise PlanError(f"a plan reads rank {int(rank.max())}, the group has {num_ranks} ranks")
    order = _order(rank * max(len(plans), 1) + request, local)
    held = np.bincount(rank, minlength=num_ranks)
    counts = np.full_like(held, held.max()) if padded else held
    place = np.empty_like(order)
    place[order] = np.concatenate(
        [start + np.arange(n) for start, n in zip(np.cumsum(counts) - counts, held, strict=True)]
    )
    arrival, start = [], 0
    for plan, (_, _, _, targets) in zip(plans, columns, strict=True):
        where = np.empty(plan.parts[0].stop - plan.parts[0].start, np.int64)
        where[targets] = place[start : start + len(targets)]
        start += len(targets)
        arrival.append(torch.from_numpy(where))
    borders = np.cumsum(held)[:-1]
    send = zip(np.split(request[order], borders), np.split(local[order], borders), strict=True)
    return GatherSchedule(tuple(int(c) for c in counts), tuple(send), tuple(arrival))


def _order(group: Ints, local: Ints) -> Ints:
    """Sorts by group (a small number), then by local index, which a group has once. Where indices
    lie close together each is put in its place, which takes a tenth of the time of sorting."""
    if not len(group):
        return group
    num = int(group.max()) + 1
    first, last = np.full(num, local.max()), np.full(num, -1, np.int64)
    np.minimum.at(first, group, local)
    np.maximum.at(last, group, local)
    size = np.maximum(last - first + 1, 0)
    if int(size.sum()) > 8 * len(local):
        return np.lexsort((local, group))
    row = np.full(int(size.sum()), -1, np.int64)
    row[(np.cumsum(size) - size - first)[group] + local] = np.arange(len(local))
    return row[row >= 0]


def _expand(request: int, runs: TransferRuns) -> tuple[Ints, Ints, Ints, Ints]:
    if len(runs) and int(runs.dst_rank.max()) > 0:
        raise PlanError(f"a gather has one target, the plan has rank {int(runs.dst_rank.max())}")
    which, nth = each_of(runs.count)
    local = runs.src_local[which] + nth * runs.src_stride[which]
    target = runs.dst_local[which] + nth * runs.dst_stride[which]
    return runs.src_rank[which], np.full(len(which), request, np.int64), local, target
