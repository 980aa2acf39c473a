"""plan_transfer: the only source of movement.

Two shardings are intersected without enumerating tokens. For a stride m, the positions
congruent to c modulo m form one progression a class; between the borders that either sharding
names for that stride, a progression stays on one shard on both sides, with a constant slope in
both local indices. Those pieces are cut where either side leaves a page, and are the runs.
Any m >= 1 is correct; the planner takes the one with the fewest runs.
"""

from collections.abc import Iterable
from math import lcm

import numpy as np
from attrs import evolve, frozen

from kvflow.layouts.counts import each_of
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import page_of
from kvflow.layouts.sharding import Ints, Sharding
from kvflow.layouts.values import integer
from kvflow.transfers.claims import check_components, check_content, check_tokens
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns


def plan_transfer(
    src: KVLayout,
    dst: KVLayout,
    tokens: tuple[int, int],
    *,
    components: Iterable[str] | None = None,
    absent: Iterable[str] = (),
) -> Plan:
    """Derives how the tokens ``[start, stop)`` get from `src` to every replica of `dst`.

    Exact at token granularity for any pair of shardings and block sizes. A target that already
    holds a prefix asks for the tokens behind it. `components` limits what is moved (default: all
    that both sides declare); every component that either side declares and that is not moved must
    be named in `absent`. Raises `ContentMismatch` if bytes on the two sides differ in meaning, and
    `PlanError` for a range outside either layout or a component that is neither moved nor absent.
    """
    start, stop = (integer(t, "a token") for t in tokens)
    absent = tuple(sorted(set(absent)))
    moved = _moved(src, dst, components, absent)
    check_components(src, dst, moved, absent)
    check_content(src, dst, moved)
    check_tokens(src, dst, (start, stop))
    runs_of_paging: dict[tuple[int, int], TransferRuns] = {}
    parts = []
    for sg in src.groups:
        for dg in dst.groups:
            shared = tuple(c for c in sg.components if c in dg.components and c in moved)
            if not shared:
                continue
            sizes = (sg.paging.block_size, dg.paging.block_size)
            if sizes not in runs_of_paging:
                runs_of_paging[sizes] = _runs(src.placement, dst.placement, start, stop, sizes)
            parts.append(PlanPart(sg.name, dg.name, shared, start, stop, runs_of_paging[sizes]))
    return Plan(src, dst, tuple(parts), absent, (start, stop))


def _moved(
    src: KVLayout, dst: KVLayout, components: Iterable[str] | None, absent: tuple[str, ...]
) -> set[str]:
    if components is not None:
        return set(components)
    return (set(src.spec.names) & set(dst.spec.names)) - set(absent)


@frozen(eq=False)
class _Pieces:
    """Progressions of positions with shard and local index on either side."""

    token: Ints
    count: Ints
    src_shard: Ints
    src_local: Ints
    src_stride: Ints
    dst_shard: Ints
    dst_local: Ints
    dst_stride: Ints


def _runs(
    src: Placement, dst: Placement, start: int, stop: int, sizes: tuple[int, int]
) -> TransferRuns:
    stride = _best_stride(src.sharding, dst.sharding, start, stop, sizes)
    pieces = _regular_pieces(src.sharding, dst.sharding, start, stop, stride)
    pieces = _split(pieces, stride, pieces.src_local, pieces.src_stride, sizes[0])
    pieces = _split(pieces, stride, pieces.dst_local, pieces.dst_stride, sizes[1])
    return _on_ranks(pieces, stride, src, dst)


def _best_stride(
    src: Sharding, dst: Sharding, start: int, stop: int, sizes: tuple[int, int]
) -> int:
    """The candidate stride with the smallest estimate of runs."""

    def estimate(m: int) -> float:
        num_borders = len(src.borders(start, stop, m)) + len(dst.borders(start, stop, m))
        pages = 0.0
        for side, block_size in ((src, sizes[0]), (dst, sizes[1])):
            slope = max(m / side.num_shards, 1.0)
            pages += (stop - start) * slope / block_size
        return m * (1 + num_borders) + pages

    candidates = {1, src.period, dst.period, lcm(src.period, dst.period)}
    return min(sorted(candidates), key=estimate)


def _regular_pieces(src: Sharding, dst: Sharding, start: int, stop: int, m: int) -> _Pieces:
    cuts = np.union1d(src.borders(start, stop, m), dst.borders(start, stop, m))
    low = np.concatenate([[start], cuts])
    high = np.append(low[1:], stop)
    first = low[:, None] + np.arange(m, dtype=np.int64)
    count = (high[:, None] - first + m - 1) // m
    kept = count > 0
    token, count = first[kept], count[kept]
    second = np.where(count > 1, token + m, token)
    src_local, dst_local = src.local(token), dst.local(token)
    return _Pieces(
        token,
        count,
        src.owner(token),
        src_local,
        src.local(second) - src_local,
        dst.owner(token),
        dst_local,
        dst.local(second) - dst_local,
    )


def _split(pieces: _Pieces, m: int, local: Ints, stride: Ints, block_size: int) -> _Pieces:
    """Cuts pieces where ``local + k*stride`` enters another page of `block_size`."""
    last = local + stride * (pieces.count - 1)
    crowded = stride < block_size  # otherwise every token has a page to itself
    num_entered = page_of(last, block_size) - page_of(local, block_size) + 1
    num_pages = np.where(crowded, num_entered, pieces.count)
    source, nth = each_of(num_pages)
    at, step = local[source], stride[source]
    page_start = (page_of(at, block_size) + nth) * block_size
    begin: Ints = np.where(
        crowded[source], np.maximum(-((at - page_start) // np.maximum(step, 1)), 0), nth
    )
    end = np.roll(begin, -1)
    is_last = nth == num_pages[source] - 1
    end[is_last] = pieces.count[source][is_last]
    return evolve(
        pieces,
        token=pieces.token[source] + begin * m,
        count=end - begin,
        src_shard=pieces.src_shard[source],
        src_local=pieces.src_local[source] + begin * pieces.src_stride[source],
        src_stride=pieces.src_stride[source],
        dst_shard=pieces.dst_shard[source],
        dst_local=pieces.dst_local[source] + begin * pieces.dst_stride[source],
        dst_stride=pieces.dst_stride[source],
    )


def _on_ranks(pieces: _Pieces, m: int, src: Placement, dst: Placement) -> TransferRuns:
    """Gives every target replica its copy, and spreads the reads over the source's replicas."""
    num_replicas = np.array([len(group) for group in dst.ranks], np.int64)[pieces.dst_shard]
    source, replica = each_of(num_replicas)
    dst_rank = _pick(dst.ranks, pieces.dst_shard[source], replica)
    count = pieces.count[source]
    src_rank = _spread(src.ranks, pieces.src_shard[source], dst_rank, count)
    order = np.lexsort((pieces.dst_local[source], dst_rank, src_rank))
    source, several = source[order], count[order] > 1

    def stride(values: Ints | int) -> Ints:
        return np.where(several, values, 1)

    return TransferRuns.of_fresh(
        src_rank[order],
        dst_rank[order],
        pieces.token[source],
        stride(m),
        pieces.src_local[source],
        stride(pieces.src_stride[source]),
        pieces.dst_local[source],
        stride(pieces.dst_stride[source]),
        count[order],
    )


def _pick(ranks: tuple[tuple[int, ...], ...], shard: Ints, replica: Ints) -> Ints:
    table = np.zeros((len(ranks), max(map(len, ranks))), np.int64)
    for s, group in enumerate(ranks):
        table[s, : len(group)] = group
    return table[shard, replica]


def _spread(ranks: tuple[tuple[int, ...], ...], shard: Ints, reader: Ints, count: Ints) -> Ints:
    """For each run the replica that sends it: the tokens that one reader wants of one shard are
    dealt in equal consecutive parts to the shard's replicas, starting at another one for each
    reader."""
    sizes = np.array([len(group) for group in ranks], np.int64)
    if sizes.max() == 1:
        return _pick(ranks, shard, np.zeros_like(shard))
    replica = np.zeros_like(shard)
    for s in np.unique(shard):
        for n, r in enumerate(np.unique(reader[shard == s])):
            mine = np.flatnonzero((shard == s) & (reader == r))
            before = np.cumsum(count[mine]) - count[mine]
            share = before * sizes[s] // count[mine].sum()
            replica[mine] = (share + n) % sizes[s]
    return _pick(ranks, shard, replica)
