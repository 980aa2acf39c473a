"""Joint plans: several sources, one target, every claimed byte once; on real bytes too."""

from itertools import permutations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import SPEC, bound, dcp, layout, moves, whole

from kvflow.errors import PlanError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.testing import bindings, cells, layouts, specs, tag
from kvflow.transfers.cuts import cut, moved_by
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.joint import (
    BoundJoint,
    Claim,
    Holding,
    JointPlan,
    Leg,
    plan_joint,
    verify_joint,
)
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

torch.set_num_threads(1)
Offer = dict[str, tuple[int, int]]
"""Component -> tokens."""


def caches(binding: Binding) -> dict[int, RankCache]:
    side = binding.layout
    return {rank: RankCache.allocate(side, rank, binding.num_blocks, 0xA5) for rank in side.ranks}


def write(binding: Binding, memory: dict[int, RankCache], offer: Offer) -> None:
    """Tags the offered cells, byte by byte."""
    for name, tokens in offer.items():
        for cell in cells(binding.layout, binding, tokens, (name,)):
            view = memory[cell.rank].pages[name]
            begin = view.offset + cell.block_id * view.block_stride
            view.memory[[begin + at for at in cell.at]] = torch.tensor(
                list(tag(cell)), dtype=torch.uint8
            )


def check_bytes(joint: BoundJoint, offered: list[Offer], executor) -> None:
    """The target ends up as if the claimed tokens had been written there, and nothing else."""
    wanted, got = caches(joint.dst), caches(joint.dst)
    write(joint.dst, wanted, {c.component: (c.start, c.stop) for c in joint.joint.claims})
    sources = [caches(b) for b in joint.srcs]
    for binding, memory, offer in zip(joint.srcs, sources, offered, strict=True):
        write(binding, memory, offer)
    for leg, plan in zip(joint.joint.legs, joint.legs, strict=True):
        executor.execute(plan, sources[leg.source], got)
    for rank, cache in got.items():
        for name, view in cache.pages.items():
            assert torch.equal(view.memory, wanted[rank].pages[name].memory), (rank, name)


# --- a host-tier hit and a remainder --------------------------------------------------------------


@settings(max_examples=25)
@given(st.data())
def test_any_sources_fill_any_target_byte_for_byte(data) -> None:
    spec = data.draw(specs(max_layers=1))
    n = data.draw(st.integers(1, 24))
    start = data.draw(st.integers(0, n))
    sources, offered, srcs = [], [], []
    for _ in range(data.draw(st.integers(0, 2))):
        side = data.draw(layouts(spec, (0, n), max_shards=3))
        low = data.draw(st.integers(0, n))
        high = data.draw(st.integers(low, n))
        some = data.draw(st.lists(st.sampled_from(spec.names), unique=True))
        sources.append(Holding(side, (low, high), some))
        srcs.append(data.draw(bindings(side, n)))
    last = data.draw(layouts(spec, (0, n), max_shards=3))
    sources.append(Holding(last, (0, n)))  # it has all that the others lack
    srcs.append(data.draw(bindings(last, n)))
    target = data.draw(layouts(spec, (0, n), max_shards=3))
    held = data.draw(st.dictionaries(st.sampled_from(spec.names), st.integers(0, n + 2)))
    joint = plan_joint(sources, target, (start, n), held=held)
    verify_joint(joint)
    both = BoundJoint(joint, srcs, data.draw(bindings(target, n)))
    for holding in sources:
        names = spec.names if holding.components is None else holding.components
        offered.append(dict.fromkeys(names, holding.tokens))
    check_bytes(both, offered, StridedExecutor())
    for name in spec.names:
        assert Claim(name, min(max(start, held.get(name, 0)), n), n) in joint.claims


def host_and_prefill(a: int, n: int) -> tuple[list[Holding], KVLayout]:
    host = layout(Replicated(), 1)
    return [Holding(host, (0, a)), Holding(dcp(4, 1, 4), (0, n))], whole(8)


@pytest.mark.parametrize("executor", [ReferenceExecutor(), StridedExecutor()])
def test_a_host_hit_and_a_remainder_meet_at_their_token(executor) -> None:
    sources, target = host_and_prefill(13, 30)
    joint = plan_joint(sources, target, (0, 30))
    assert [(leg.source, leg.plan.tokens) for leg in joint.legs] == [(0, (0, 13)), (1, (13, 30))]
    both = BoundJoint(joint, [bound(s.layout, 30) for s in sources], bound(target, 30))
    check_bytes(both, [dict.fromkeys(SPEC.names, s.tokens) for s in sources], executor)
    assert joint.nbytes == 30 * SPEC.nbytes_per_token
    assert joint.num_runs == sum(leg.plan.num_runs for leg in joint.legs)


def test_latent_from_one_source_and_indexer_from_another() -> None:
    latent, indexer = SPEC.select(kind="latent"), SPEC.select(kind="indexer")
    sources = [Holding(dcp(2), (0, 20), latent), Holding(whole(16), (0, 20))]
    joint = plan_joint(sources, whole(8), (0, 20))
    verify_joint(joint)
    assert [set(moved_by(leg.plan)) for leg in joint.legs] == [set(latent), set(indexer)]


def test_a_hole_in_the_first_source_is_filled_by_the_second() -> None:
    sources = [Holding(whole(), (5, 9)), Holding(dcp(2), (0, 12))]
    joint = plan_joint(sources, whole(8), (0, 12))
    assert [(leg.source, leg.plan.tokens) for leg in joint.legs] == [
        (0, (5, 9)),
        (1, (0, 5)),
        (1, (9, 12)),
    ]
    verify_joint(joint)


def test_tokens_that_no_source_offers_are_named() -> None:
    sources = [Holding(whole(), (0, 5)), Holding(dcp(2), (7, 12))]
    with pytest.raises(PlanError, match=r"latent\.0: tokens \[5, 7\) are offered by none of 2"):
        plan_joint(sources, whole(8), (0, 12))
    some = [Holding(whole(), (0, 5), SPEC.select(part="main"))]
    with pytest.raises(PlanError, match=r"latent\.2: tokens \[0, 5\)"):
        plan_joint(some, whole(8), (0, 5))
    given_up = plan_joint(some, whole(8), (0, 5), absent=SPEC.select(part="mtp"))
    verify_joint(given_up)
    assert set(given_up.absent) == set(SPEC.select(part="mtp"))


def test_untrue_names_and_ranges_are_refused() -> None:
    with pytest.raises(PlanError, match=r"latent\.9"):
        plan_joint([Holding(whole(), (0, 5))], whole(), (0, 5), held={"latent.9": 3})
    one = plan_joint([Holding(whole(), (0, 5))], whole(), (0, 5), held={"latent.0": 0})
    assert one == plan_joint([Holding(whole(), (0, 5))], whole(), (0, 5))
    with pytest.raises(PlanError, match="holds -1 tokens"):
        plan_joint([Holding(whole(), (0, 5))], whole(), (0, 5), held={"latent.0": -1})
    with pytest.raises(PlanError, match=r"\[5, 4\)"):
        plan_joint([], whole(), (5, 4))
    with pytest.raises(PlanError, match=r"\[-1, 4\)"):
        Holding(whole(), (-1, 4))


# --- the proof is seen to fail --------------------------------------------------------------------


def joined(**changes) -> JointPlan:
    sources, target = host_and_prefill(13, 30)
    return evolve(plan_joint(sources, target, (0, 30)), **changes)


def legs(first: tuple[int, int], second: tuple[int, int]) -> list[Leg]:
    sources, target = host_and_prefill(13, 30)
    sides = zip(sources, (first, second), strict=True)
    return [Leg(i, plan_transfer(s.layout, target, t)) for i, (s, t) in enumerate(sides)]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ((0, 12), (13, 30), r"tokens \[12, 13\) are not moved"),
        ((0, 14), (13, 30), r"tokens \[13, 14\) are moved twice"),
        ((0, 13), (13, 29), r"tokens \[29, 30\) are not moved"),
        ((0, 13), (13, 31), r"tokens \[13, 31\) are moved, claimed"),
        ((1, 13), (13, 30), r"tokens \[0, 1\) are not moved"),
    ],
)
def test_a_gap_an_overlap_and_an_excess_are_named(first, second, says: str) -> None:
    verify_joint(joined(legs=legs((0, 13), (13, 30))))
    with pytest.raises(PlanError, match=says):
        verify_joint(joined(legs=legs(first, second)))


def test_what_is_claimed_twice_or_not_at_all_is_named() -> None:
    joint = joined()
    with pytest.raises(PlanError, match="claimed twice"):
        verify_joint(evolve(joint, claims=(*joint.claims, joint.claims[0])))
    with pytest.raises(PlanError, match=r"\['latent\.0'\] must be declared"):
        verify_joint(evolve(joint, claims=joint.claims[1:]))
    with pytest.raises(PlanError, match=r"\['latent\.0'\] must be declared"):
        verify_joint(evolve(joint, absent=["latent.0"]))
    with pytest.raises(PlanError, match="but not claimed"):
        verify_joint(evolve(joint, claims=joint.claims[1:], absent=["latent.0"]))


def test_a_leg_to_another_target_or_with_a_wrong_run_is_refused() -> None:
    joint = joined()
    first, second = joint.legs
    other = Leg(1, plan_transfer(second.plan.src, whole(4), (13, 30)))
    with pytest.raises(PlanError, match="leg of source 1 is to another target"):
        verify_joint(evolve(joint, legs=[first, other]))
    part = second.plan.parts[0]
    wrong = evolve(part, runs=evolve(part.runs, src_rank=(part.runs.src_rank + 1) % 4))
    spoiled = Plan(second.plan.src, second.plan.dst, [wrong], second.plan.absent, (13, 30))
    with pytest.raises(PlanError, match="does not own"):
        verify_joint(evolve(joint, legs=[first, Leg(1, spoiled)]))


def test_a_leg_of_a_source_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match="leg of source 1, there are 1 sources"):
        verify_joint(joined(num_sources=1))


def test_every_source_has_a_binding_that_is_proven() -> None:
    sources, target = host_and_prefill(13, 30)
    joint = plan_joint(sources, target, (0, 30))
    srcs = [bound(s.layout, 30) for s in sources]
    verify_joint(joint, srcs, bound(target, 30))
    with pytest.raises(PlanError, match="2 sources need a binding each, got 1"):
        BoundJoint(joint, srcs[:1], bound(target, 30))
    with pytest.raises(PlanError, match="another layout"):
        BoundJoint(joint, srcs[::-1], bound(target, 30))
    short = [bound(sources[0].layout, 12), srcs[1]]
    for refuse in (verify_joint, BoundJoint):
        with pytest.raises(PlanError, match="valid KV only below 12"):
            refuse(joint, short, bound(target, 30))


UNUSED = CacheGroup("unused", (), Paged(4))
"""Changes which groups there are, and where no component lies."""


@pytest.mark.parametrize("tokens", [(5, 4), (-1, 4)])
def test_a_claim_is_a_range(tokens: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="must have 0 <= start <= stop"):
        Claim("latent.0", *tokens)


def test_a_claim_names_a_component() -> None:
    with pytest.raises(PlanError, match="a claim is of component 3, must be a name"):
        Claim(3, 0, 5)  # type: ignore[arg-type]


def test_joint_plans_are_values() -> None:
    assert joined() == joined()
    assert hash(joined()) == hash(joined())
    sources, target = host_and_prefill(13, 30)
    others = [
        plan_joint(sources, target, (0, 29)),
        plan_joint(sources[1:], target, (0, 30)),
        plan_joint(sources, target, (0, 30), absent=["latent.2"]),
        plan_joint(sources, target, (0, 30), held={"latent.2": 1}),
        plan_joint([], target, (4, 4)),
        plan_joint([], whole(4), (4, 4)),
        plan_joint([], evolve(whole(4), groups=[*whole(4).groups, UNUSED]), (4, 4)),
    ]
    assert len({joined(), *others}) == 8
    assert joined() != "joint"


# --- delta, both ways, nothing at all -------------------------------------------------------------


def test_fault_c04_a_delta_is_aligned_by_position() -> None:
    prefill, decode = whole(4), whole(4)
    held = dict.fromkeys(SPEC.names, 8)  # two blocks of four, of a prompt of twelve
    joint = plan_joint([Holding(prefill, (0, 12))], decode, (0, 12), held=held)
    (leg,) = joint.legs
    assert {(m[1] // 4, m[3] // 4) for m in moves(leg.plan.parts[0].runs)} == {(2, 2)}
    BoundJoint(joint, [bound(prefill, 12)], bound(decode, 13))  # its fourth block has no source


@pytest.mark.parametrize("held", [0, 4, 7, 8, 16, 28, 31, 32])
def test_fault_c06_chunks_fill_what_is_not_held(held: int) -> None:
    source, target = dcp(2, 1, 4), whole(4)
    claimed = dict.fromkeys(SPEC.names, held)
    joint = plan_joint([Holding(source, (0, 32))], target, (0, 32), held=claimed)
    assert len(joint.legs) == (held < 32)
    chunks = [c for leg in joint.legs for c in cut(leg.plan, range(0, 33, 8))]
    tokens = sorted(m[-1] for c in chunks for p in c.parts[:1] for m in moves(p.runs))
    assert tokens == list(range(held, 32))
    assert all(c.tokens[0] < c.tokens[1] for c in chunks)
    offered = [dict.fromkeys(SPEC.names, (0, 32))]
    check_bytes(
        BoundJoint(joint, [bound(source, 32)], bound(target, 32)), offered, StridedExecutor()
    )


def test_fault_c07_nothing_to_move_is_complete_and_every_source_is_told() -> None:
    sources, target = host_and_prefill(10, 16)
    held = dict.fromkeys(SPEC.names, 16)
    joint = plan_joint(sources, target, (0, 16), held=held)
    verify_joint(joint)
    assert joint.legs == ()
    assert joint.unread == (0, 1)  # both are told that they may free
    assert (joint.links, joint.nbytes, joint.num_runs) == ((), 0, 0)
    both = BoundJoint(joint, [bound(s.layout, 16) for s in sources], bound(target, 16))
    check_bytes(both, [{}, {}], StridedExecutor())


def test_a_source_that_ends_where_the_claim_begins_is_not_read() -> None:
    sources = [Holding(whole(), (0, 5)), Holding(dcp(2), (5, 12)), Holding(whole(), (5, 5))]
    joint = plan_joint(sources, whole(8), (5, 12))
    assert [(leg.source, leg.plan.tokens) for leg in joint.legs] == [(1, (5, 12))]
    assert joint.unread == (0, 2)
    far = Holding(layout(BalancedChunks(2, 90, 99)), (90, 99))  # of another domain altogether
    assert plan_joint([far, sources[1]], whole(8), (5, 12)).unread == (0,)
    nothing = plan_joint([], whole(8), (4, 4))
    assert (nothing.num_sources, nothing.unread) == (0, ())
    verify_joint(nothing, [], bound(whole(8), 4))


@pytest.mark.parametrize("prompt", [1, 10, 15])
def test_fault_c08_less_than_a_block_moves(prompt: int) -> None:
    source, target = dcp(4, 1, 16), whole(16)
    joint = plan_joint([Holding(source, (0, prompt))], target, (0, prompt))
    both = BoundJoint(joint, [bound(source, prompt)], bound(target, prompt))
    check_bytes(both, [dict.fromkeys(SPEC.names, (0, prompt))], StridedExecutor())
    assert joint.nbytes == prompt * SPEC.nbytes_per_token


def test_the_next_turn_goes_back_from_decode_to_prefill() -> None:
    prefill, decode = dcp(3, 2, 4), layout(Replicated(), 8)
    held = dict.fromkeys(SPEC.names, 21) | {"latent.2": 20, "indexer.2": 20}  # MTP: one row less
    back = plan_joint([Holding(decode, (0, 34))], prefill, (0, 34), held=held)
    assert {leg.plan.tokens for leg in back.legs} == {(21, 34), (20, 34)}
    both = BoundJoint(back, [bound(decode, 34)], bound(prefill, 34))
    check_bytes(both, [dict.fromkeys(SPEC.names, (0, 34))], StridedExecutor())


def test_fault_a14_a_hit_inside_a_virtual_block_leaves_its_rest_to_move() -> None:
    """Block 4, DCP 4: what is held is counted in tokens, not in units of 16."""
    for prompt, hit in ((20, 16), (40, 36)):
        joint = plan_joint(
            [Holding(whole(4), (0, prompt))],
            dcp(4, 1, 4),
            (0, prompt),
            held=dict.fromkeys(SPEC.names, hit),
        )
        (leg,) = joint.legs
        assert sorted(m[-1] for m in moves(leg.plan.parts[0].runs)) == list(range(hit, prompt))


# --- who is waited for ----------------------------------------------------------------------------


def test_fault_a05_the_planned_completions_are_the_distinct_links() -> None:
    """PCP 2 x TP 2 to DCP 2: the transfer is over when every planned (source, rank, rank) has been
    heard of, in any order, however often."""
    mesh = Mesh((Axis("pcp", 2), Axis("tp", 2)))
    prefill = layout(mesh.place(Replicated()), 4)
    joint = plan_joint([Holding(prefill, (0, 33))], dcp(2, 1, 4), (0, 33))
    assert {src for _, src, _ in joint.links} <= set(range(4))
    assert {dst for _, _, dst in joint.links} == {0, 1}
    by_hand = {
        (leg.source, m[0], m[2]) for leg in joint.legs for m in moves(leg.plan.parts[0].runs)
    }
    assert set(joint.links) == by_hand
    for order in list(permutations(joint.links))[:24]:
        heard: set[tuple[int, int, int]] = set()
        for link in order[:-1]:
            heard |= {link, order[0]}  # and the first one again
            assert heard != set(joint.links)
        assert heard | {order[-1]} == set(joint.links)


def test_fault_c19_a_host_pool_is_assembled_from_two_ranks_and_two_legs() -> None:
    latent, indexer = SPEC.select(kind="latent"), SPEC.select(kind="indexer")
    groups = [CacheGroup("host", latent, Pool(64)), CacheGroup("gpu", indexer, Paged(64))]
    target = KVLayout(SPEC, Placement.simple(Replicated()), groups)
    source = layout(RoundRobin(2), 64)
    joint = plan_joint([Holding(source, (0, 33))], target, (0, 33))
    assert joint.links == ((0, 0, 0), (0, 1, 0))
    both = BoundJoint(joint, [bound(source, 33)], bound(target, 33))
    check_bytes(both, [dict.fromkeys(SPEC.names, (0, 33))], StridedExecutor())
