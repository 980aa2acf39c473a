"""What serving systems of today refuse, or get wrong without a word, row by row: kvflow plans it,
proves it, and moves it byte for byte.

Row numbers are those of the list of facts. Each row is planned and proven at the size of GLM-5.3;
the same placements with small records are moved by the torch executor, and every byte of both sides
is compared with the oracle. (docs/capabilities.md has them moved by the reference executor.)
"""

from collections.abc import Sequence

import pytest
import torch

from kvflow.explain.matrix import MODEL
from kvflow.explain.naive import num_misplaced
from kvflow.explain.prices import synthetic_binding
from kvflow.layouts import BalancedChunks, KVLayout, RoundRobin
from kvflow.layouts.text import parse_layout
from kvflow.testing import LawError, cells, check_law, deal, tag
from kvflow.testing.images import Images
from kvflow.testing.law import allocate_caches
from kvflow.transfers.cuts import verify_cut
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.joint import BoundJoint, Holding, plan_joint, verify_joint
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.readiness import Schedule, page_readiness, stream_parts
from kvflow.transfers.verify import verify_plan

torch.set_num_threads(1)
REAL = "glm-5.3/fp8"
DECODE = "replicated paged(64)"
HISPARSE = "replicated latent:pool(64) indexer:paged(64)"


def sides(src: str, dst: str, model: str) -> tuple[KVLayout, KVLayout]:
    return parse_layout(f"{src} {model}"), parse_layout(f"{dst} {model}")


def proven(src: str, dst: str, tokens: tuple[int, int] = (0, 2000)) -> Plan:
    """The plan for GLM-5.3, proven with permuted block tables on either side."""
    here, there = sides(src, dst, REAL)
    plan = plan_transfer(here, there, tokens)
    verify_plan(plan, *(synthetic_binding(side, tokens[1]) for side in (here, there)))
    return plan


def moved(src: str, dst: str, tokens: tuple[int, int]) -> None:
    """The same transfer in small, byte for byte."""
    here, there = (synthetic_binding(side, tokens[1]) for side in sides(src, dst, MODEL))
    check_law(StridedExecutor(), here, there, tokens)


def tokens_read(plan: Plan) -> dict[int, int]:
    """Tokens that each source rank gives."""
    runs = plan.parts[0].runs
    ranks = plan.src.ranks
    return {rank: int(runs.count[runs.src_rank == rank].sum()) for rank in ranks}


# --- row 1: an interleave that is not the page size ----------------------------------------------


@pytest.mark.parametrize(("interleave", "wrong"), [(32, 1776), (8, 1752), (1, 1969)])
def test_row_1_any_interleave_on_the_sending_side(interleave: int, wrong: int) -> None:
    src = f"dcp8(i={interleave}) paged(64)"
    plan = proven(src, DECODE)
    true = plan.src.placement.sharding
    assert num_misplaced(true, RoundRobin(8, 64), (0, 2000)) == wrong  # what happens today
    hands = deal(true, 2000)
    assert tokens_read(plan) == {rank: len(hand) for rank, hand in enumerate(hands)}
    moved(src, DECODE, (0, 300))
    moved(src, "dcp2(i=16) paged(16)", (37, 300))


# --- row 2: HiSparse with W > 1 -------------------------------------------------------------------


def test_row_2_hisparse_with_sharded_tokens() -> None:
    for dst in (
        "dcp2(i=1) latent:pool(1) indexer:paged(64)",
        "dcp3(i=64) latent:pool(64) indexer:paged(16)",
    ):
        proven("dcp8(i=1) paged(64)", dst)
        moved("dcp8(i=1) paged(64)", dst, (30, 200))


# --- row 3: PCP alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("dst", [DECODE, "dcp4(i=1) paged(64)", "dcp3(i=16) paged(16)"])
def test_row_3_a_sender_with_pcp_alone_serves_from_all_its_ranks(dst: str) -> None:
    plan = proven("replicated(8) paged(64)", dst)
    given = tokens_read(plan)
    assert sum(given.values()) == 2000  # each token is read once, from one replica (fault A06)
    assert max(given.values()) <= 1.35 * min(given.values())
    moved("replicated(8) paged(64)", dst, (0, 200))


def test_row_3_chunks_that_never_were_gathered_can_be_sent_too() -> None:
    proven("balanced(8,0:2000) paged(64)", "dcp8(i=1) paged(64)")
    moved("balanced(8,0:150) paged(64)", "dcp4(i=1) paged(16)", (0, 150))


# --- row 4: PCP x DCP with T > 1 ------------------------------------------------------------------


@pytest.mark.parametrize(
    "src",
    [
        "pcp4*dcp4@pcp+tp(i=64)*tp2 paged(64)",
        "pcp2*dcp4(i=1)*tp2 paged(64)",
        "tp2*dcp2(i=1)*pcp2 paged(64)",
        "(pcp2*dcp2)(i=4)*tp2 paged(64)",
    ],
)
def test_row_4_pcp_and_dcp_with_tensor_parallelism(src: str) -> None:
    for dst in (DECODE, "tp4*dcp2@tp(i=16) paged(32)"):
        plan = proven(src, dst)
        written = plan.parts[0].runs.num_tokens
        assert written == 2000 * len(plan.dst.ranks) // plan.dst.placement.sharding.num_shards
        moved(src, dst, (0, 150))


# --- row 5: PCP on the receiving side, and the way back -------------------------------------------


@pytest.mark.parametrize("src", [DECODE, HISPARSE, "dcp4(i=16) paged(32)"])
def test_row_5_decode_hands_a_turn_back_to_prefill(src: str) -> None:
    for dst in (
        "pcp8*dcp8@pcp(i=1) paged(64)",
        "replicated(8) paged(64)",
        "pcp4*dcp2@pcp paged(16)",
    ):
        proven(src, dst, (1500, 2000))  # what the turn added, behind the prefix that prefill kept
        moved(src, dst, (50, 120))


# --- row 6: widths that do not divide each other -------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("dcp8(i=64) paged(64)", "dcp6(i=64) paged(64)"),
        ("dcp8(i=1) paged(64)", "dcp6(i=16) paged(64)"),
        ("dcp4(i=1) paged(64)", "dcp3(i=1) paged(64)"),
        ("dcp3(i=5) paged(16)", "dcp4(i=7) paged(64)"),
        ("dcp8(i=1) paged(64)", "tp8*dcp4@tp(i=16) paged(64)"),  # 1 < W < T
        ("tp4*dcp2@tp(i=64) paged(64)", "dcp8(i=1) paged(64)"),
    ],
)
def test_row_6_any_pair_of_widths(src: str, dst: str) -> None:
    proven(src, dst)
    moved(src, dst, (0, 260))


# --- row 7: other blocks, other groups, partial pages --------------------------------------------


@pytest.mark.parametrize("tokens", [(777, 1999), (1, 2), (63, 65), (1024, 1024)])
def test_row_7_other_blocks_other_groups_partial_pages(tokens: tuple[int, int]) -> None:
    src, dst = "dcp8(i=1) paged(16)", "replicated latent:pool(64) indexer:paged(32)"
    plan = proven(src, dst, tokens)
    assert plan.nbytes == (tokens[1] - tokens[0]) * 54728
    assert {(part.src_group, part.dst_group) for part in plan.parts} == {
        ("kv", "latent"), ("kv", "indexer"),
    }  # fmt: skip


def test_row_7_moves() -> None:
    for tokens in ((77, 199), (1, 2), (63, 65), (64, 64)):
        moved("dcp8(i=1) paged(16)", "replicated latent:pool(64) indexer:paged(32)", tokens)
    moved("dcp2(i=3) latent:paged(48) indexer:paged(20)", "dcp3(i=2) paged(7)", (11, 120))


# --- row 8: a HiSparse sender --------------------------------------------------------------------


@pytest.mark.parametrize(
    "dst", [DECODE, "dcp8(i=1) paged(16)", "replicated(2) latent:pool(1) indexer:paged(64)"]
)
def test_row_8_a_hisparse_sender(dst: str) -> None:
    for src in (HISPARSE, "replicated latent:pool(1) indexer:paged(64)"):
        proven(src, dst)
        moved(src, dst, (0, 130))
        moved(src, dst, (70, 130))  # the way back: only what the last turn added


# --- row 9: an offload hit and a remainder in one request ----------------------------------------


def landed(
    legs: Sequence[tuple[int, BoundPlan]], joint: Sequence[KVLayout], dst: KVLayout, stop: int
) -> None:
    """Runs the legs on tagged sources; the target must hold all tokens below `stop`, and nothing
    else may have changed."""
    there = synthetic_binding(dst, stop)
    target = allocate_caches(dst, there.num_blocks, 0xA5)
    wanted = Images(target)
    for cell in cells(dst, there, (0, stop), dst.spec.names):
        wanted.put(cell, tag(cell))
    sources = []
    for layout in joint:
        here = synthetic_binding(layout, stop)
        caches = allocate_caches(layout, here.num_blocks, 0x5A)
        held = Images(caches)
        for cell in cells(layout, here, (0, stop), layout.spec.names):
            held.put(cell, tag(cell))
        held.write()
        sources.append(caches)
    for source, bound in legs:
        StridedExecutor().execute(bound, sources[source], target)
    wanted.compare("target")


@pytest.mark.parametrize("dst", [HISPARSE, "dcp3(i=1) paged(16)"])
def test_row_9_an_offload_hit_and_a_network_remainder_in_one_request(dst: str) -> None:
    for model, hit, stop in ((REAL, 1280, 2000), (MODEL, 161, 250)):
        tier, prefill = sides("replicated pool(256)", "dcp8(i=1) paged(64)", model)
        target = parse_layout(f"{dst} {model}")
        holdings = [Holding(tier, (0, hit)), Holding(prefill, (0, stop))]
        joint = plan_joint(holdings, target, (0, stop))
        verify_joint(joint, [synthetic_binding(s, stop) for s in (tier, prefill)],
                     synthetic_binding(target, stop))  # fmt: skip
        ranges = {leg.source: leg.plan.tokens for leg in joint.legs}
        assert ranges == {0: (0, hit), 1: (hit, stop)}
        assert joint.nbytes == stop * target.spec.nbytes_per_token
        if model == MODEL:
            bound = BoundJoint(
                joint,
                [synthetic_binding(s, stop) for s in (tier, prefill)],
                synthetic_binding(target, stop),
            )
            legs = [(leg.source, b) for leg, b in zip(joint.legs, bound.legs, strict=True)]
            landed(legs, [tier, prefill], target, stop)


def test_row_9_hisparse_latent_pages_are_offloaded_and_restored() -> None:
    for src, dst in ((HISPARSE, "replicated pool(256)"), ("replicated pool(256)", HISPARSE)):
        proven(src, dst)
        moved(src, dst, (0, 300))


# --- row 10: a tier without copies of replicas ----------------------------------------------------


@pytest.mark.parametrize(
    "src", ["replicated(8) paged(64)", "pcp8*dcp2@pcp(i=1) paged(64)", "dcp8(i=1) paged(64)"]
)
def test_row_10_the_tier_holds_each_token_once_whatever_wrote_it(src: str) -> None:
    tier = "replicated pool(256)"
    plan = proven(src, tier)
    assert plan.nbytes == plan.link_nbytes == 2000 * 54728  # not P times
    given = tokens_read(plan)
    assert min(given.values()) > 0  # every replica takes part in the writing
    moved(src, tier, (0, 200))
    for reader in ("dcp4(i=16) paged(16)", "replicated(2) paged(64)"):  # another layout reads it
        proven(tier, reader)
        moved(tier, reader, (0, 100))


# --- row 11: only what is missing -----------------------------------------------------------------


def test_row_11_one_layer_kind_of_some_pages_on_one_rank_is_moved_again() -> None:
    here, there = sides("dcp8(i=1) paged(16)", "dcp2(i=64) paged(64)", MODEL)
    others = set(here.spec.names) - {"latent.1"}
    plan = plan_transfer(here, there, (64, 128), components=["latent.1"], absent=others)
    bindings = synthetic_binding(here, 250), synthetic_binding(there, 250)
    bound = BoundPlan(plan, *bindings)
    assert plan.nbytes == 64 * here.spec["latent.1"].record.nbytes
    assert {dst for _, dst in plan.links} == {1}  # the rank that holds these positions
    check_law(StridedExecutor(), *bindings, (64, 128), absent=others)
    assert sum(runs.num_tokens for _, _, runs in bound.links_to(1)) == 64


# --- row 12: streaming while prefill still runs ---------------------------------------------------


def test_row_12_pages_move_while_prefill_still_runs() -> None:
    src, dst = "dcp8(i=1) paged(64)", "replicated latent:pool(64) indexer:paged(32)"
    for model, step, stop in ((REAL, 512, 2000), (MODEL, 64, 200)):
        here, there = sides(src, dst, model)
        plan = plan_transfer(here, there, (0, stop))
        steps = [BalancedChunks(8, at, min(at + step, stop)) for at in range(0, stop, step)]
        schedule = Schedule(steps)
        parts = list(stream_parts(plan, schedule))
        verify_cut(plan, [part.plan for part in parts])
        assert [(p.step, p.layer) for p in parts] == sorted((p.step, p.layer) for p in parts)
        assert {p.step for p in parts} == set(range(len(steps)))
        early = sum(p.plan.nbytes for p in parts if p.step < len(steps) - 1)
        assert early >= (len(steps) - 1) * step * here.spec.nbytes_per_token * 0.98
        assert page_readiness(plan, schedule)
        if model == MODEL:
            bindings = synthetic_binding(here, stop), synthetic_binding(there, stop)
            legs = [(0, BoundPlan(part.plan, *bindings)) for part in parts]
            landed(legs, [here], there, stop)


def test_a_part_that_does_not_move_is_seen() -> None:
    here, there = sides("dcp2(i=1) paged(4)", DECODE, MODEL)
    parts = list(stream_parts(plan_transfer(here, there, (0, 20)), Schedule([(0, 10), (10, 20)])))
    bindings = synthetic_binding(here, 20), synthetic_binding(there, 20)
    legs = [(0, BoundPlan(part.plan, *bindings)) for part in parts]
    landed(legs, [here], there, 20)
    with pytest.raises(LawError, match=r"target rank 0, component latent\.1, token 10"):
        landed(legs[:-1], [here], there, 20)
