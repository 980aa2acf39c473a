"""plan_transfer: the only source of movement.

Two shardings are intersected without enumerating tokens. For a stride m, the positions
congruent to c modulo m form one progression a class; between the borders that either sharding
names for that stride, a progression stays on one shard on both sides, with a constant slope in
both local indices. Those pieces are cut where either side leaves a page, and are the runs.
Any m >= 1 is correct; the planner takes the one with the fewest runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from math import lcm

import numpy as np
from attrs import evolve, frozen

from kvflow.layouts.counts import each_of
from kvflow.layouts.layout import CacheGroup, HeadShard, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import page_of
from kvflow.layouts.pieces import Heads
from kvflow.layouts.sharding import Ints, Sharding
from kvflow.layouts.values import names, token_range
from kvflow.transfers.claims import check_components, check_content, check_tokens
from kvflow.transfers.plan import Plan, PlanPart, TransferRuns

Group = tuple[int, ...]


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
    start, stop = token_range(tokens)
    absent = tuple(sorted(set(names(absent))))
    moved = _moved(src, dst, components, absent)
    check_components(src, dst, moved, absent)
    check_content(src, dst, moved)
    check_tokens(src, dst, (start, stop))
    pieces_of_paging: dict[tuple[int, int], tuple[_Pieces, int]] = {}
    dealt: dict[object, tuple[TransferRuns, TransferRuns]] = {}
    parts = []
    for sg, dg, shared, here, there in _shared_holders(src, dst, moved):
        sizes = (sg.paging.block_size, dg.paging.block_size)
        if sizes not in pieces_of_paging:
            pieces_of_paging[sizes] = _pieces(src.placement, dst.placement, start, stop, sizes)
        for heads, a, b in _shared_heads(here, there):
            key = (sizes, a, b)
            if key not in dealt:
                dealt[key] = _on_ranks(*pieces_of_paging[sizes], a, b, dst.host_of, stop)
            runs, copies = dealt[key]
            parts.append(PlanPart(sg.name, dg.name, shared, start, stop, runs, heads, copies))
    return Plan(src, dst, tuple(parts), absent, (start, stop))


Holders = tuple[HeadShard, ...]


def _shared_holders(
    src: KVLayout, dst: KVLayout, moved: Collection[str]
) -> Iterator[tuple[CacheGroup, CacheGroup, tuple[str, ...], Holders, Holders]]:
    """Per pair of groups: the components that have the same holders on either side."""
    for sg in src.groups:
        for dg in dst.groups:
            classes: dict[tuple[Holders, Holders], list[str]] = {}
            for c in sg.components:
                if c in dg.components and c in moved:
                    classes.setdefault((src.head_shards(c), dst.head_shards(c)), []).append(c)
            for (here, there), shared in classes.items():
                yield sg, dg, tuple(shared), here, there


def _shared_heads(here: Holders, there: Holders) -> Iterator[tuple[Heads, Placement, Placement]]:
    """The heads that a source shard and a target shard have in common."""
    for a in here:
        for b in there:
            start, stop = max(a.heads[0], b.heads[0]), min(a.heads[1], b.heads[1])
            if start < stop:
                yield (start, stop), a.placement, b.placement


def _moved(
    src: KVLayout, dst: KVLayout, components: Iterable[str] | None, absent: tuple[str, ...]
) -> set[str]:
    if components is not None:
        return set(names(components))
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


def _pieces(
    src: Placement, dst: Placement, start: int, stop: int, sizes: tuple[int, int]
) -> tuple[_Pieces, int]:
    """The pieces of a range, none of which leaves its page, and their stride."""
    stride = _best_stride(src.sharding, dst.sharding, start, stop, sizes)
    pieces = _regular_pieces(src.sharding, dst.sharding, start, stop, stride)
    pieces = _split(pieces, stride, pieces.src_local, pieces.src_stride, sizes[0])
    return _split(pieces, stride, pieces.dst_local, pieces.dst_stride, sizes[1]), stride


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


def _on_ranks(
    pieces: _Pieces,
    m: int,
    src: Placement,
    dst: Placement,
    host_of: Callable[[int], Group],
    first: int,
) -> tuple[TransferRuns, TransferRuns]:
    """One run a piece and target host, from the source's replicas in turn to that host's replicas
    in turn, beginning with the `first` of either; and the runs by which the other replicas of a
    host copy from the one that received. A request of few runs does not reach all replicas, so
    requests begin at different ones."""
    hosts = [_by_host(group, host_of) for group in dst.ranks]
    num_hosts = np.array([len(groups) for groups in hosts], np.int64)[pieces.dst_shard]
    source, host = each_of(num_hosts)
    shard, count = pieces.dst_shard[source], pieces.count[source]
    dst_rank = _receivers(hosts, shard, host, count, first)
    src_rank = _spread(src.ranks, pieces.src_shard[source], dst_rank, count, first)
    order = np.lexsort((pieces.dst_local[source], dst_rank, src_rank))
    runs = _runs(pieces, m, source[order], src_rank[order], dst_rank[order])
    return runs, _copies(runs, hosts, shard[order], host[order])


def _by_host(group: Group, host_of: Callable[[int], Group]) -> tuple[Group, ...]:
    """The replicas of a shard, those on one host together."""
    together: dict[Group, list[int]] = {}
    for rank in group:
        together.setdefault(host_of(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in together.values())


def _receivers(
    hosts: list[tuple[Group, ...]], shard: Ints, host: Ints, count: Ints, first: int
) -> Ints:
    """The rank that receives each run: on every host the runs of a shard are dealt in equal
    consecutive parts to its replicas there, beginning with the `first`."""
    dst_rank = np.zeros_like(shard)
    for s, groups in enumerate(hosts):
        for h, group in enumerate(groups):
            mine = np.flatnonzero((shard == s) & (host == h))
            before = np.cumsum(count[mine]) - count[mine]
            turn = before * len(group) // count[mine].sum() + first
            dst_rank[mine] = np.array(group, np.int64)[turn % len(group)]
    return dst_rank


def _runs(pieces: _Pieces, m: int, source: Ints, src_rank: Ints, dst_rank: Ints) -> TransferRuns:
    count = pieces.count[source]
    several = count > 1

    def stride(values: Ints | int) -> Ints:
        return np.where(several, values, 1)

    return TransferRuns.of_fresh(
        src_rank,
        dst_rank,
        pieces.token[source],
        stride(m),
        pieces.src_local[source],
        stride(pieces.src_stride[source]),
        pieces.dst_local[source],
        stride(pieces.dst_stride[source]),
        count,
    )


def _copies(
    runs: TransferRuns, hosts: list[tuple[Group, ...]], shard: Ints, host: Ints
) -> TransferRuns:
    """Each run once more for every other replica on its host, out of the receiver's cache."""
    which, dst_rank = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for s, groups in enumerate(hosts):
        for h, group in enumerate(groups):
            mine = np.flatnonzero((shard == s) & (host == h)) if len(group) > 1 else which[0]
            for rank in group:
                wanted = mine[runs.dst_rank[mine] != rank]
                which.append(wanted)
                dst_rank.append(np.full_like(wanted, rank))
    taken, to = runs.take(np.concatenate(which)), np.concatenate(dst_rank)
    order = np.lexsort((taken.dst_local, to, taken.dst_rank))
    taken = taken.take(order)
    return evolve(
        taken,
        src_rank=taken.dst_rank,
        dst_rank=to[order],
        src_local=taken.dst_local,
        src_stride=taken.dst_stride,
    )


def _pick(ranks: tuple[tuple[int, ...], ...], shard: Ints, replica: Ints) -> Ints:
    table = np.zeros((len(ranks), max(map(len, ranks))), np.int64)
    for s, group in enumerate(ranks):
        table[s, : len(group)] = group
    return table[shard, replica]


def _spread(
    ranks: tuple[tuple[int, ...], ...], shard: Ints, reader: Ints, count: Ints, first: int
) -> Ints:
    """For each run the replica that sends it: the tokens that one reader wants of one shard are
    dealt in equal consecutive parts to the shard's replicas, beginning with the `first` and at
    another one for each reader."""
    sizes = np.array([len(group) for group in ranks], np.int64)
    if sizes.max() == 1:
        return _pick(ranks, shard, np.zeros_like(shard))
    replica = np.zeros_like(shard)
    for s in np.unique(shard):
        for n, r in enumerate(np.unique(reader[shard == s])):
            mine = np.flatnonzero((shard == s) & (reader == r))
            before = np.cumsum(count[mine]) - count[mine]
            share = before * sizes[s] // count[mine].sum()
            replica[mine] = (share + n + first) % sizes[s]
    return _pick(ranks, shard, replica)
