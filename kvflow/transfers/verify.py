"""verify_plan: proves a plan without moving a byte.

In bounds; every claimed token of every declared component written exactly once on every target
replica; nothing else touched; sources initialised. Arithmetic on runs: no token is enumerated
unless runs of different strides meet on one rank.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from kvflow.errors import PlanError
from kvflow.layouts.counts import each_of
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import page_of
from kvflow.layouts.pieces import Heads
from kvflow.layouts.sharding import ANY_STOP, Ints, Sharding
from kvflow.transfers.claims import check_components, check_content, check_tokens
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns


def verify_plan(plan: Plan, src: Binding | None = None, dst: Binding | None = None) -> None:
    """Raises `PlanError` naming the first violation; returns nothing for a proven plan.

    With bindings it also proves that every slot exists: source positions hold valid KV, and both
    block tables reach every local index that the plan uses.
    """
    _verify_components(plan)
    check_tokens(plan.src, plan.dst, plan.tokens)
    for name, side, binding in (("source", plan.src, src), ("target", plan.dst, dst)):
        if binding is not None and binding.layout != side:
            raise PlanError(f"the {name} binding is of another layout: {binding.layout}")
    for part in plan.parts:
        here, there = _holder("source", plan.src, part), _holder("target", plan.dst, part)
        _verify_runs(plan, part, here, there)
        if len(part.copies):
            _verify_copies(plan, part, there)
        _verify_cover(there, part)
        if src is not None:
            _verify_initialised(src, part)
            _verify_table("source", src, part.src_group, part.runs.src_local)
        if dst is not None:
            _verify_table("target", dst, part.dst_group, part.runs.dst_local)


def _verify_runs(plan: Plan, part: PlanPart, here: Placement, there: Placement) -> None:
    runs = part.runs
    _verify_domain("source", here.sharding, runs, runs.src_stride)
    _verify_domain("target", there.sharding, runs, runs.dst_stride)
    _verify_within(part)
    size = plan.src.group(part.src_group).paging.block_size
    _verify_side("source", here, size, runs, runs.src_rank, runs.src_local, runs.src_stride)
    size = plan.dst.group(part.dst_group).paging.block_size
    _verify_side("target", there, size, runs, runs.dst_rank, runs.dst_local, runs.dst_stride)


def _verify_copies(plan: Plan, part: PlanPart, there: Placement) -> None:
    """Every copy repeats a run that its source rank has received, to the same place on another
    rank that holds the shard, on one host."""
    runs, fail = part.copies, _failer("copy", part.copies)
    links = part.runs
    received = [links.dst_rank, links.token, links.token_stride, links.dst_local, links.dst_stride]
    read = [runs.src_rank, runs.token, runs.token_stride, runs.src_local, runs.src_stride]
    rows = np.stack([*received, links.count], axis=1), np.stack([*read, runs.count], axis=1)
    _, known = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
    known = known.ravel()
    fail(~np.isin(known[len(links) :], known[: len(links)]), "tokens that no link has brought")
    moved = (runs.src_local != runs.dst_local) | (runs.src_stride != runs.dst_stride)
    fail(moved, "another place than on the rank it copies from")
    hosts = tuple(dict.fromkeys(map(plan.dst.host_of, there.all_ranks)))
    for what, groups in (("shards", there.ranks), ("hosts", hosts)):
        apart = _group_of(groups, runs.src_rank) != _group_of(groups, runs.dst_rank)
        fail(apart, f"two {what}")


def _verify_components(plan: Plan) -> None:
    moved: dict[str, list[Heads]] = {}
    for part in plan.parts:
        _verify_group("source", plan.src, part.src_group, part)
        _verify_group("target", plan.dst, part.dst_group, part)
        if (part.start, part.stop) != plan.tokens:
            raise PlanError(
                f"a part moves tokens [{part.start}, {part.stop}), the plan is for "
                f"[{plan.tokens[0]}, {plan.tokens[1]})"
            )
        for c in part.components:
            moved.setdefault(c, []).append(part.heads)
    check_components(plan.src, plan.dst, moved, plan.absent)
    check_content(plan.src, plan.dst, moved)
    for c, heads in moved.items():
        _verify_heads(c, sorted(heads), plan.dst.spec[c].record.num_heads)


def _verify_heads(component: str, heads: list[Heads], num_heads: int) -> None:
    """Sorted ranges of heads that must cover [0, num_heads) exactly once."""
    for (_, stop), (start, _) in pairwise(heads):
        if start < stop:
            raise PlanError(f"{component}: heads [{start}, {stop}) are moved twice")
        if start > stop:
            raise PlanError(f"{component}: heads [{stop}, {start}) are not moved")
    if heads[0][0] != 0 or heads[-1][1] != num_heads:
        raise PlanError(
            f"{component}: heads [{heads[0][0]}, {heads[-1][1]}) are moved of {num_heads}"
        )


def _holder(side: str, layout: KVLayout, part: PlanPart) -> Placement:
    """The one placement of the part's heads of all its components. They are of one shard: what a
    rank stores beside them decides where in its rows they lie."""
    start, stop = part.heads
    shards = [
        shard
        for c in part.components
        for shard in layout.head_shards(c)
        if shard.heads[0] <= start < stop <= shard.heads[1]
    ]
    found = set(shards)
    if len(shards) != len(part.components) or len(found) != 1:
        raise PlanError(
            f"heads [{part.heads[0]}, {part.heads[1]}) of {list(part.components)} have no one "
            f"placement at the {side} {layout}"
        )
    return found.pop().placement


def _verify_group(side: str, layout: KVLayout, group: str, part: PlanPart) -> None:
    groups = {g.name: g.components for g in layout.groups}
    if group not in groups:
        raise PlanError(f"the {side} has no group {group!r}, its groups are {list(groups)}")
    if foreign := sorted(set(part.components) - set(groups[group])):
        raise PlanError(f"{foreign} are not in the {side}'s group {group!r}")


def _verify_side(
    side: str,
    placement: Placement,
    block_size: int,
    runs: TransferRuns,
    rank: Ints,
    local: Ints,
    stride: Ints,
) -> None:
    """Every token of every run lies on the rank, at the local index, and in the page it names."""
    if not len(runs):
        return
    sharding = placement.sharding
    last = _last(runs)
    last_local = local + stride * (runs.count - 1)
    fail = _failer(side, runs)
    for step in np.unique(runs.token_stride):
        mine = (runs.token_stride == step) & (runs.count > 1)
        if mine.any():
            low, high = int(runs.token[mine].min()), int(last[mine].max())
            borders = sharding.borders(low, high + 1, int(step))
            crossed = np.searchsorted(borders, last, "right") - np.searchsorted(
                borders, runs.token, "right"
            )
            fail(mine & (crossed > 0), f"a border of {sharding} inside a run of stride {step}")
    shard = _group_of(placement.ranks, rank)
    fail(rank < 0, "a rank below 0")
    fail(sharding.owner(runs.token) != shard, "a token its rank does not own")
    fail(sharding.owner(last) != shard, "a last token its rank does not own")
    fail(sharding.local(runs.token) != local, "a local index that holds another token")
    fail(sharding.local(last) != last_local, "a stride that ends on another token")
    left = page_of(local, block_size) != page_of(last_local, block_size)
    fail(left, f"a page border (page: {block_size})")


def _last(runs: TransferRuns) -> Ints:
    return runs.token + runs.token_stride * (runs.count - 1)


def _group_of(groups: Sequence[tuple[int, ...]], rank: Ints) -> Ints:
    """The group that each rank is in (shards of a placement, hosts), the number of groups for
    ranks outside all of them."""
    ranks = np.array([r for group in groups for r in group], np.int64)
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(ranks)
    at = np.minimum(np.searchsorted(ranks[order], rank), len(ranks) - 1)
    return np.where(ranks[order][at] == rank, numbers[order][at], len(groups))


def _verify_domain(side: str, sharding: Sharding, runs: TransferRuns, stride: Ints) -> None:
    """Every token of every run is in the domain, and no index leaves 64 bits."""
    fail = _failer(side, runs)
    fail((runs.token_stride < 1) | (stride < 1), "a stride below 1")
    too_far = np.maximum(runs.token_stride, stride) > ANY_STOP // runs.count
    fail(too_far, f"a token or a local index of {ANY_STOP} or more")
    outside = (runs.token < sharding.start) | (runs.token >= sharding.stop)
    fail(outside | (_last(runs) >= sharding.stop), f"a token outside {sharding}")


def _failer(side: str, runs: TransferRuns) -> Callable[[np.ndarray, str], None]:
    def fail(bad: np.ndarray, rule: str) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            row = [int(column[i]) for column in runs.columns]
            raise PlanError(f"{side} side of run {i} has {rule}: {row}")

    return fail


def _verify_cover(dst: Placement, part: PlanPart) -> None:
    """On every target rank: the tokens of its shard in [start, stop), each exactly once, over a
    link or as a copy."""
    sharding = dst.sharding
    length = sharding.local_len(part.stop, np.arange(sharding.num_shards))
    wanted = length - sharding.local_len(part.start, np.arange(sharding.num_shards))
    for shard, group in enumerate(dst.ranks):
        for rank in group:
            mine = _written(part, rank)
            if mine.num_tokens != int(wanted[shard]):
                raise PlanError(
                    f"target rank {rank} gets {mine.num_tokens} tokens of "
                    f"[{part.start}, {part.stop}), needs {int(wanted[shard])}"
                )
            _verify_disjoint(rank, mine)


def _written(part: PlanPart, rank: int) -> TransferRuns:
    linked = part.runs.take(part.runs.dst_rank == rank)
    if not len(part.copies):
        return linked
    copied = part.copies.take(part.copies.dst_rank == rank)
    columns = zip(linked.columns, copied.columns, strict=True)
    return TransferRuns.of_fresh(*(np.concatenate(pair) for pair in columns))


def _verify_within(part: PlanPart) -> None:
    runs, last = part.runs, _last(part.runs)
    outside = (runs.token < part.start) | (last >= part.stop)
    if outside.any():
        rank = int(runs.dst_rank[outside][0])
        mine = runs.dst_rank == rank
        raise PlanError(
            f"target rank {rank} is written tokens {int(runs.token[mine].min())}.."
            f"{int(last[mine].max())}, outside [{part.start}, {part.stop})"
        )


def _verify_disjoint(rank: int, runs: TransferRuns) -> None:
    strides = np.unique(runs.token_stride[runs.count > 1])
    if len(strides) <= 1:
        m = max([1, *strides.tolist()])
        k, c = runs.token // m, runs.token % m
        order = np.lexsort((k, c))
        k, c, end = k[order], c[order], (k + runs.count)[order]
        clash = (c[1:] == c[:-1]) & (k[1:] < end[:-1])
        if clash.any():
            i = int(order[np.flatnonzero(clash)[0] + 1])
            raise PlanError(f"target rank {rank}: token {int(runs.token[i])} is written twice")
        return
    which, nth = each_of(runs.count)
    tokens, times = np.unique(
        runs.token[which] + nth * runs.token_stride[which], return_counts=True
    )
    if (times > 1).any():
        raise PlanError(f"target rank {rank}: token {int(tokens[times > 1][0])} is written twice")


def _verify_initialised(src: Binding, part: PlanPart) -> None:
    for name in part.components:
        if part.start < part.stop and src.lengths[name] < part.stop:
            raise PlanError(
                f"{name}: the plan reads tokens up to {part.stop}, "
                f"the source holds valid KV only below {src.lengths[name]}"
            )


def _verify_table(side: str, binding: Binding, group: str, local: Ints) -> None:
    block_size = binding.layout.group(group).paging.block_size
    entries = len(binding.tables[group])
    entry = page_of(local, block_size)
    if len(local) and int(entry.max()) >= entries:
        raise PlanError(
            f"{side} group {group!r}: local index {int(local.max())} needs entry "
            f"{int(entry.max())}, the block table has {entries}"
        )
