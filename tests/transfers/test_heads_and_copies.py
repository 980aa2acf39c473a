"""Plans over heads, layers and hosts: against cells dealt one by one, on drawn and known pairs."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from planning import FIRST, SECOND, SPEC, bound, gqa, moves, staged, tp

from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.testing import Case, cases, cells, check_law, deal
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan, PlanPart
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan


def holdings(binding: Any, tokens: tuple[int, int], components: tuple[str, ...]) -> set[Any]:
    """(rank, component, head, token) of every cell, by the oracle."""
    found = cells(binding.layout, binding, tokens, components)
    return {(c.rank, c.component, c.head, c.token) for c in found}


def index_of(layout: KVLayout, stop: int) -> dict[tuple[int, int], int]:
    """(rank, local index) -> token, by dealing."""
    hands = deal(layout.placement.sharding, stop)
    return {
        (rank, i): token
        for hand, ranks in zip(hands, layout.placement.ranks, strict=True)
        for rank in ranks
        for i, token in enumerate(hand)
    }


def hosts_of(layout: KVLayout) -> dict[int, int]:
    """rank -> a number of its host."""
    told = {rank: i for i, host in enumerate(layout.hosts) for rank in host}
    return {rank: told.get(rank, -1 - rank) for rank in layout.ranks}


@settings(max_examples=max(100, settings().max_examples))
@given(cases(max_tokens=24))
def test_every_head_of_every_token_arrives_once(case: Case) -> None:
    """Over a link or as a copy; read where it lies; over links once a host."""
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    verify_plan(plan, case.src, case.dst)
    wanted = holdings(case.dst, case.tokens, plan.dst.spec.names)
    held = holdings(case.src, (0, case.tokens[1]), case.src.layout.spec.names)
    here, there = (index_of(b.layout, case.tokens[1]) for b in (case.src, case.dst))
    host = hosts_of(case.dst.layout)
    linked: Counter[Any] = Counter()
    copied: Counter[Any] = Counter()
    for part in plan.parts:
        cross = [(c, h) for c in part.components for h in range(*part.heads)]
        for a, i, b, j, token in moves(part.runs):
            assert here[a, i] == there[b, j] == token
            assert all((a, c, h, token) in held for c, h in cross)
            linked.update((b, c, h, token) for c, h in cross)
        for a, i, b, j, token in moves(part.copies):
            assert there[a, i] == there[b, j] == token
            assert host[a] == host[b]
            assert all((a, c, h, token) in linked for c, h in cross)
            copied.update((b, c, h, token) for c, h in cross)
    assert linked + copied == Counter(dict.fromkeys(wanted, 1))
    crossings = Counter((host[r], c, h, t) for r, c, h, t in linked)
    assert set(crossings.values()) <= {1}, "a byte crossed a link twice to one host"


def replicas(placement: Placement, hosts: dict[int, int]) -> list[list[int]]:
    """The ranks of each shard on each host."""
    together = defaultdict(list)
    for shard, ranks in enumerate(placement.ranks):
        for rank in ranks:
            together[shard, hosts[rank]].append(rank)
    return list(together.values())


def loads(part: PlanPart, column: str, ranks: list[int]) -> tuple[list[int], int]:
    """Link tokens of each rank, and the longest run that any of them has."""
    counts = [part.runs.count[getattr(part.runs, column) == rank] for rank in ranks]
    longest = max((int(n.max()) for n in counts if len(n)), default=0)
    return [int(n.sum()) for n in counts], longest


def holder(layout: KVLayout, part: PlanPart) -> Placement:
    start, stop = part.heads
    (placement,) = {
        shard.placement for c in part.components for shard in layout.head_shards(c)
        if shard.heads[0] <= start and stop <= shard.heads[1]
    }  # fmt: skip
    return placement


@given(cases(max_tokens=40))
def test_links_are_spread_over_the_replicas_that_receive(case: Case) -> None:
    """Equal consecutive parts; each may be a run too long or too short, but not more."""
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    for part in plan.parts:
        for ranks in replicas(holder(plan.dst, part), hosts_of(plan.dst)):
            got, longest = loads(part, "dst_rank", ranks)
            assert all(abs(n - sum(got) / len(ranks)) < longest or not longest for n in got)


@pytest.mark.parametrize("pages", [7, 8, 12])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_pages_are_spread_to_within_one_over_replicas_on_both_sides(
    pages: int, num_hosts: int
) -> None:
    src = tp(1, 3)
    hosts = tuple(tuple(range(h, 4, num_hosts)) for h in range(num_hosts))
    plan = plan_transfer(src, tp(1, 4, hosts=hosts), (0, 4 * pages))
    (part,) = plan.parts
    assert part.runs.num_tokens == 4 * pages * num_hosts
    for host in hosts:
        got, _ = loads(part, "dst_rank", list(host))
        assert max(got) - min(got) <= 4
    for reader in range(4):
        mine = part.runs.take(part.runs.dst_rank == reader)
        sent = [int(mine.count[mine.src_rank == r].sum()) for r in range(3)]
        assert max(sent) - min(sent) <= 4
    sent, _ = loads(part, "src_rank", [0, 1, 2])
    assert max(sent) - min(sent) <= 4 * 4, "one page a reader"


def by_head(plan: Plan) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """heads -> links, over all parts."""
    links: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for part in plan.parts:
        runs = part.runs
        links[part.heads] |= set(zip(runs.src_rank.tolist(), runs.dst_rank.tolist(), strict=True))
    return {heads: sorted(pairs) for heads, pairs in sorted(links.items())}


def proven(src: KVLayout, dst: KVLayout, tokens: tuple[int, int]) -> Plan:
    """The plan, with its bytes moved and compared."""
    check_law(StridedExecutor(), bound(src, tokens[1]), bound(dst, tokens[1]), tokens)
    return plan_transfer(src, dst, tokens)


def test_tp_4_to_1_reads_every_head_from_its_rank() -> None:
    plan = proven(tp(4, 4), tp(4, 1), (0, 10))
    assert by_head(plan) == {(h, h + 1): [(h, 0)] for h in range(4)}
    assert plan.link_nbytes == plan.nbytes == 10 * gqa(4).nbytes_per_token


def test_tp_1_to_4_sends_every_rank_its_head() -> None:
    plan = proven(tp(4, 1), tp(4, 4), (3, 10))
    assert by_head(plan) == {(h, h + 1): [(0, h)] for h in range(4)}
    assert plan.link_nbytes == 7 * gqa(4).nbytes_per_token, "each byte once"


def test_tp_2_to_3_cuts_heads_where_either_side_does() -> None:
    plan = proven(tp(6, 2), tp(6, 3), (0, 9))
    assert by_head(plan) == {(0, 2): [(0, 0)], (2, 3): [(0, 1)], (3, 4): [(1, 1)], (4, 6): [(1, 2)]}
    uneven = proven(tp(5, 2), tp(5, 3), (0, 9))  # 3 + 2 heads to 2 + 2 + 1
    assert by_head(uneven) == {
        (0, 2): [(0, 0)], (2, 3): [(0, 1)], (3, 4): [(1, 1)], (4, 5): [(1, 2)],
    }  # fmt: skip


def test_lowering_counts_heads_from_the_first_one_a_rank_stores() -> None:
    src, dst = tp(6, 2), tp(6, 3)
    both = BoundPlan(plan_transfer(src, dst, (0, 9)), bound(src, 9), bound(dst, 9))
    told = {
        (s, d): (runs.src_heads, runs.dst_heads)
        for d in dst.ranks
        for _, s, runs in both.links_to(d)
    }
    assert told == {
        (0, 0): ((0, 2), None),  # all of the target's heads
        (0, 1): ((2, 3), (0, 1)),
        (1, 1): ((0, 1), (1, 2)),
        (1, 2): ((1, 3), None),
    }
    whole = BoundPlan(plan_transfer(src, src, (0, 9)), bound(src, 9), bound(src, 9))
    for _, _, runs in whole.links_to(1):
        assert (runs.src_heads, runs.dst_heads) == (None, None)


def test_dcp_over_the_replicas_of_a_head() -> None:
    """1 < W < T: 8 ranks over 2 heads, the tokens of a head dealt to its 4 replicas by DCP 2, and
    by DCP 4."""
    for deal_, copies in ((2, 2), (4, 1)):
        src = tp(2, 8, deal=deal_, interleave=4)
        plan = proven(src, tp(2, 2), (0, 40))
        for part in plan.parts:
            head = part.heads[0]
            ranks = set(part.runs.src_rank.tolist())
            assert ranks == set(range(4 * head, 4 * head + 4)), f"{copies} replicas share"
        back = proven(tp(2, 2), src, (0, 40))
        assert back.nbytes == copies * 40 * gqa(2).nbytes_per_token
        assert back.link_nbytes == back.nbytes, "no hosts are told, so each rank is its own"
        near = proven(tp(2, 2), evolve(src, hosts=(tuple(range(8)),)), (0, 40))
        assert near.link_nbytes == 40 * gqa(2).nbytes_per_token
        assert near.nbytes == back.nbytes


@pytest.mark.parametrize(("sources", "targets"), [(4, 1), (1, 4), (2, 2), (4, 3)])
def test_fault_c10_replicated_mla_over_tp(sources: int, targets: int) -> None:
    """Every target rank has all tokens, every source rank sends an equal part."""
    src, dst = tp(1, sources, spec=SPEC), tp(1, targets, spec=SPEC)
    plan = plan_transfer(src, dst, (0, 48))
    (part,) = plan.parts
    assert part.heads == (0, 1)
    got = moves(part.runs)
    for rank in range(targets):
        assert sorted(m[4] for m in got if m[2] == rank) == list(range(48))
    sent = Counter(m[0] for m in got)
    assert sent == dict.fromkeys(range(sources), 48 * targets // sources)
    near = plan_transfer(src, evolve(dst, hosts=(tuple(range(targets)),)), (0, 48))
    verify_plan(near)
    assert near.link_nbytes == 48 * SPEC.nbytes_per_token, "over the links once"
    assert near.nbytes == plan.nbytes
    received = Counter(m[2] for m in moves(near.parts[0].runs))
    assert received == dict.fromkeys(range(targets), 48 // targets)
    assert len(near.local_links) == targets * (targets - 1)


def test_stages_are_parts_of_their_own() -> None:
    src, dst = staged(((0,), (1,)), 2), staged(((0, 1), (1, 2)), 3)
    plan = proven(src, dst, (0, 9))
    told = {part.components: set(zip(part.runs.src_rank.tolist(), part.runs.dst_rank.tolist(),
                                     strict=True)) for part in plan.parts}  # fmt: skip
    assert told == {FIRST: {(0, 0), (0, 1)}, SECOND: {(1, 1), (1, 2)}}
    flat = KVLayout.uniform(src.spec, Placement.simple(Replicated()), Paged(4))
    assert [p.components for p in proven(flat, dst, (0, 9)).parts] == [FIRST, SECOND]
    assert [p.components for p in proven(src, flat, (0, 9)).parts] == [FIRST, SECOND]
    same = proven(flat, flat, (0, 9))
    assert [p.components for p in same.parts] == [src.spec.names], "one part where holders agree"


def test_a_link_brings_each_token_to_a_host_once_and_copies_do_the_rest() -> None:
    hosts = ((0, 1, 2), (3,))
    plan = proven(tp(1, 1), tp(1, 4, hosts=hosts), (0, 24))
    (part,) = plan.parts
    to = Counter(m[2] for m in moves(part.runs))
    assert to == {0: 8, 1: 8, 2: 8, 3: 24}
    assert plan.links == tuple((0, r) for r in range(4))
    assert plan.local_links == tuple((a, b) for a in range(3) for b in range(3) if a != b)
    assert plan.num_runs == len(part.runs) + len(part.copies) == 12 + 12
    row = gqa(1).nbytes_per_token
    assert (plan.link_nbytes, plan.nbytes) == (48 * row, 96 * row)
    for a, i, b, j, token in moves(part.copies):
        assert i == j == token
        assert b != a


def test_copies_are_ordered_by_link() -> None:
    plan = plan_transfer(tp(1, 1), tp(1, 4, hosts=((0, 1, 2, 3),)), (0, 50))
    copies = plan.parts[0].copies
    keys = list(zip(copies.src_rank, copies.dst_rank, copies.dst_local, strict=True))
    assert keys == sorted(keys)
    assert len(keys) == 3 * 13


def test_an_empty_range_has_empty_parts() -> None:
    plan = plan_transfer(tp(4, 4), tp(4, 2, hosts=((0, 1),)), (7, 7))
    verify_plan(plan)
    assert (plan.num_runs, plan.nbytes, plan.links, plan.local_links) == (0, 0, (), ())
    assert [part.heads for part in plan.parts] == [(h, h + 1) for h in range(4)]


def test_one_part_tells_all_layers_of_a_group() -> None:
    """Memory does not grow with layers: parts share one set of runs."""
    plan = plan_transfer(tp(4, 4, spec=gqa(4, 30)), tp(4, 2, spec=gqa(4, 30)), (0, 64))
    assert len(plan.parts) == 4
    assert all(len(part.components) == 60 for part in plan.parts)


def test_the_second_stage_reads_through_the_targets_table() -> None:
    src, dst = tp(1, 1, block_size=8), tp(1, 2, hosts=((0, 1),))
    both = BoundPlan(plan_transfer(src, dst, (0, 16)), bound(src, 16), bound(dst, 16))
    (_, rank, runs), = both.copies_to(1)  # fmt: skip
    assert rank == 0
    assert runs.src.tolist() == runs.dst.tolist()
    table = both.dst.tables["kv"]
    assert runs.src.tolist() == [int(table[0]) * 4, int(table[1]) * 4]
    assert next(iter(both.copies_to(0)))[1] == 1
    assert np.array_equal(runs.count, [4, 4])
