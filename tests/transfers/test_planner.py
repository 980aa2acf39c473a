"""plan_transfer against tokens dealt one by one, on drawn pairs of layouts."""

from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import CONFIG, SPEC, bound, dcp, held, layout, moves, whole

from kvflow.errors import ContentMismatch, PlanError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.testing import layouts, placements, token_ranges
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.verify import verify_plan


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Placement, Placement, tuple[int, int], int, int]:
    tokens = draw(token_ranges(60))
    sizes = st.sampled_from([1, 2, 3, 4, 7, 16])
    return draw(placements(tokens)), draw(placements(tokens)), tokens, draw(sizes), draw(sizes)


@settings(max_examples=max(200, settings().max_examples))
@given(pairs())
def test_plans_move_exactly_the_dealt_tokens(drawn) -> None:
    src, dst, tokens, src_size, dst_size = drawn
    plan = plan_transfer(layout(src, src_size), layout(dst, dst_size), tokens)
    verify_plan(plan)
    there, here = held(dst, tokens[1]), held(src, tokens[1])
    (part,) = plan.parts
    got = moves(part.runs)
    for src_rank, src_local, dst_rank, dst_local, token in got:
        assert here[src_rank, src_local] == token
        assert there[dst_rank, dst_local] == token
    wanted = Counter((r, t) for (r, _), t in there.items() if t >= tokens[0])
    assert Counter((m[2], m[4]) for m in got) == wanted
    assert part.runs.num_tokens == len(got)
    pages = [(m[1] // src_size, m[3] // dst_size) for m in got]
    seen = 0
    for n in part.runs.count.tolist():
        assert len(set(pages[seen : seen + n])) == 1
        seen += n


@given(pairs())
def test_reads_are_spread_evenly_over_the_replicas(drawn) -> None:
    """Each reader takes about equal parts from all replicas of a shard, up to one run."""
    src, dst, tokens, src_size, dst_size = drawn
    plan = plan_transfer(layout(src, src_size), layout(dst, dst_size), tokens)
    runs = plan.parts[0].runs
    for reader in set(runs.dst_rank.tolist()):
        for group in src.ranks:
            mine = [runs.count[(runs.src_rank == r) & (runs.dst_rank == reader)] for r in group]
            sent = [int(n.sum()) for n in mine]
            longest = max((int(n.max()) for n in mine if len(n)), default=0)
            assert max(sent) - min(sent) <= 2 * longest


@given(pairs())
def test_plans_are_derived_alike_and_ordered_by_link(drawn) -> None:
    src, dst, tokens, src_size, dst_size = drawn
    one = plan_transfer(layout(src, src_size), layout(dst, dst_size), tokens)
    two = plan_transfer(layout(src, src_size), layout(dst, dst_size), tokens)
    assert one == two
    runs = one.parts[0].runs
    keys = list(zip(runs.src_rank, runs.dst_rank, runs.dst_local, strict=True))
    assert keys == sorted(keys)
    single = runs.count == 1
    for column in (runs.token_stride, runs.src_stride, runs.dst_stride):
        assert (column[single] == 1).all()


@given(pairs())
def test_a_plan_never_has_more_runs_than_tokens(drawn) -> None:
    src, dst, tokens, src_size, dst_size = drawn
    plan = plan_transfer(layout(src, src_size), layout(dst, dst_size), tokens)
    assert plan.num_runs <= plan.parts[0].runs.num_tokens


def test_run_counts_of_known_pairs() -> None:
    """The stride is chosen so that the runs are few."""
    for src, dst, tokens, most in [
        (dcp(8, 1, 64), whole(64), (0, 4096), 8 * 64),  # a run for each rank and target page
        (dcp(8, 64, 64), whole(64), (0, 4096), 64),  # whole pages
        (whole(64), whole(64), (0, 4096), 64),
        (
            dcp(4, 1, 64),
            dcp(3, 1, 64),
            (0, 12 * 64),
            72,
        ),  # 12 classes of 64 tokens, cut by 3 and 4 pages
        (layout(BalancedChunks(4, 0, 1024), 64), dcp(4, 1, 64), (0, 1024), 4 * 8 * 4),
        (layout(Contiguous(4, 0, 1024), 1024), whole(1024), (0, 1024), 4),
        (dcp(8, 16, 16), dcp(4, 16, 64), (0, 1024), 64),
    ]:
        plan = plan_transfer(src, dst, tokens)
        assert plan.num_runs <= most, (str(src), str(dst), plan.num_runs)


@pytest.mark.parametrize(
    ("src", "dst", "tokens", "num_runs"),
    [
        (dcp(2, 4, 4), dcp(2, 4, 16), (0, 128), 32),
        (dcp(2, 4, 16), dcp(2, 4, 4), (0, 128), 32),
        (dcp(1, 1, 4), dcp(2, 4, 4), (0, 128), 32),
        (dcp(1, 1, 16), dcp(2, 1, 16), (1000, 1060), 10),
        (dcp(3, 4, 16), dcp(4, 1, 4), (1000, 1060), 48),
        (dcp(4, 4, 16), dcp(4, 4, 16), (1000, 1060), 15),
        (dcp(2, 1, 4), dcp(2, 4, 4), (0, 128), 64),
        (dcp(3, 1, 4), dcp(3, 4, 16), (0, 128), 96),
    ],
    ids=str,
)
def test_the_chosen_stride_has_the_fewest_runs_of_these_pairs(
    src: KVLayout, dst: KVLayout, tokens: tuple[int, int], num_runs: int
) -> None:
    plan = plan_transfer(src, dst, tokens)
    verify_plan(plan)
    assert plan.num_runs == num_runs


def test_readers_begin_at_different_replicas() -> None:
    src = layout(Placement(Replicated(), ((0, 1, 2),)), 4)
    dst = layout(Placement(Replicated(), ((5, 6),)), 4)
    runs = plan_transfer(src, dst, (0, 12)).parts[0].runs
    read = {(int(d), int(t)): int(s)
            for s, d, t in zip(runs.src_rank, runs.dst_rank, runs.token, strict=True)}  # fmt: skip
    assert [read[5, t] for t in (0, 4, 8)] == [0, 1, 2]
    assert [read[6, t] for t in (0, 4, 8)] == [1, 2, 0]


def test_a_long_plan_is_made_of_runs_not_tokens() -> None:
    plan = plan_transfer(dcp(8, 64, 64), whole(64), (0, 2**20))
    assert plan.num_runs == 2**20 // 64
    assert plan.parts[0].runs.num_tokens == 2**20


@settings(max_examples=30)
@given(token_ranges(), st.data())
def test_groups_pair_into_parts_that_share_their_runs(
    tokens: tuple[int, int], data: st.DataObject
) -> None:
    src, dst = data.draw(layouts(SPEC, tokens)), data.draw(layouts(SPEC, tokens))
    plan = plan_transfer(src, dst, tokens)
    moved = [c for part in plan.parts for c in part.components]
    assert sorted(moved) == sorted(SPEC.names)
    for part in plan.parts:
        assert set(part.components) <= set(src.group(part.src_group).components)
        assert set(part.components) <= set(dst.group(part.dst_group).components)
        assert (part.start, part.stop) == tokens


def test_only_what_is_asked_for_is_moved() -> None:
    latents = SPEC.select(kind="latent")
    keys = SPEC.select(kind="indexer")
    plan = plan_transfer(dcp(2), whole(), (0, 9), components=latents, absent=keys)
    assert plan.parts[0].components == latents
    assert plan.absent == tuple(sorted(keys))
    same = plan_transfer(dcp(2), whole(), (0, 9), absent=keys)
    assert same == plan
    assert plan_transfer(dcp(2), whole(), (0, 9), absent=SPEC.names).parts == ()


def test_what_is_not_named_right_is_refused() -> None:
    src, dst = dcp(2), whole()
    with pytest.raises(PlanError, match=r"absent names \['latent.9'\], which neither side"):
        plan_transfer(src, dst, (0, 4), absent=["latent.9"])
    with pytest.raises(PlanError, match=r"components \['latent.9'\] are not declared by both"):
        plan_transfer(src, dst, (0, 4), components=["latent.9"], absent=SPEC.names)
    with pytest.raises(PlanError, match=r"\['latent.0'\] are to be moved and absent at once"):
        plan_transfer(src, dst, (0, 4), components=SPEC.names, absent=["latent.0"])
    with pytest.raises(
        PlanError, match=r"\['latent.0'\] are neither moved nor .*source declares 5, target 5"
    ):
        plan_transfer(src, dst, (0, 4), components=SPEC.names[1:])


def test_a_component_of_one_side_cannot_be_moved() -> None:
    short = evolve(SPEC, components=SPEC.components[:-1])
    for src, dst in [(whole(), layout(Replicated(), 4, short)),
                     (layout(Replicated(), 4, short), whole())]:  # fmt: skip
        with pytest.raises(PlanError, match=r"\['indexer.2'\] are not declared by both sides"):
            plan_transfer(src, dst, (0, 4), components=SPEC.names)
        with pytest.raises(PlanError, match=r"\['indexer.2'\] are neither moved nor named"):
            plan_transfer(src, dst, (0, 4), components=short.names)
        plan = plan_transfer(src, dst, (0, 4), absent=["indexer.2"])
        assert plan.parts[0].components == short.names


def test_a_chunk_shorter_than_the_stride_has_empty_classes() -> None:
    """Chunks of 4, 4, 4 and 1 tokens against two ranks that take turns: the last chunk has a token
    of one rank only."""
    plan = plan_transfer(layout(BalancedChunks(2, 0, 13, "ceil"), 64), dcp(2, 1, 64), (0, 13))
    verify_plan(plan)
    assert plan.num_runs == 7
    assert sorted(m[4] for m in moves(plan.parts[0].runs)) == list(range(13))


@pytest.mark.parametrize("tokens", [(-1, 4), (5, 4), (0, 13), (1, 4)])
def test_ranges_outside_either_side_are_refused(tokens: tuple[int, int]) -> None:
    bounded = layout(Replicated(2, 12))
    if tokens == (1, 4):
        sides = [("source", bounded, whole()), ("target", whole(), bounded)]
    elif tokens == (0, 13):
        sides = [("source", layout(Contiguous(2, 0, 12)), whole()), ("target", whole(), bounded)]
    else:
        sides = [("source", whole(), whole())]
    for side, src, dst in sides:
        rule = rf"tokens \[{tokens[0]}, {tokens[1]}\) must be a range inside the {side}'s"
        with pytest.raises(PlanError, match=rule):
            plan_transfer(src, dst, tokens)


def test_edges_of_the_domain_are_inside() -> None:
    bounded = layout(Replicated(2, 12))
    assert plan_transfer(bounded, whole(), (2, 12)).parts[0].runs.num_tokens == 10
    assert plan_transfer(whole(), bounded, (12, 12)).num_runs == 0


@pytest.mark.parametrize(
    ("key", "value"), [("kv_dtype", "bfloat16"), ("rope_order", "neox"), ("model", "x")]
)
def test_fault_b01_other_content_is_refused_with_both_values(key: str, value: str) -> None:
    other = evolve(SPEC, content=tuple(sorted((dict(SPEC.content) | {key: value}).items())))
    mine = dict(SPEC.content).get(key)
    with pytest.raises(ContentMismatch, match=f"'{key}': source has {mine!r}, target '{value}'"):
        plan_transfer(dcp(2), layout(Replicated(), spec=other), (0, 4))
    with pytest.raises(ContentMismatch, match=f"'{key}': source has '{value}', target {mine!r}"):
        plan_transfer(layout(Replicated(), spec=other), dcp(2), (0, 4))


def test_fault_b01_a_component_stored_otherwise_is_refused() -> None:
    swapped = tuple(evolve(c, part="main") if c.name == "latent.2" else c for c in SPEC.components)
    with pytest.raises(
        ContentMismatch, match=r"component latent.2: source stores mtp .* main latent:"
    ):
        plan_transfer(dcp(2), layout(Replicated(), spec=evolve(SPEC, components=swapped)), (0, 4))


def test_fault_f07_equal_width_formats_are_never_reinterpreted() -> None:
    half = KVCacheSpec.from_config(CONFIG, kv_dtype="bfloat16")
    components = tuple(
        evolve(
            c, record=evolve(c.record, fields=tuple(evolve(f, dtype="float16")
                                                    for f in c.record.fields))
        )
        for c in half.components
    )  # fmt: skip
    other = evolve(half, components=components)
    assert other.nbytes_per_token == half.nbytes_per_token
    with pytest.raises(ContentMismatch, match=r"bfloat16x4.*float16x4"):
        plan_transfer(layout(Replicated(), spec=half), layout(Replicated(), spec=other), (0, 4))


def test_fault_f12_rows_of_another_size_are_refused() -> None:
    wide = KVCacheSpec.from_config({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    narrow = KVCacheSpec.from_config({**CONFIG, "kv_lora_rank": 496, "qk_rope_head_dim": 64})
    assert (wide["latent.0"].record.nbytes, narrow["latent.0"].record.nbytes) == (656, 640)
    with pytest.raises(ContentMismatch, match=r"x512.*x496"):
        plan_transfer(layout(Replicated(), spec=wide), layout(Replicated(), spec=narrow), (0, 4))


def test_fault_f01_pages_arranged_otherwise_are_placement_not_content() -> None:
    rows = KVCacheSpec.from_config(CONFIG, index_arrangement="row")
    plan = plan_transfer(layout(Replicated(), spec=rows), whole(), (0, 4))
    assert plan != plan_transfer(whole(), whole(), (0, 4))


def test_fault_b08_a_forgotten_component_is_an_error_unless_named() -> None:
    mtp = SPEC.select(part="mtp")
    short = KVCacheSpec(tuple(c for c in SPEC.components if c.name not in mtp), SPEC.content)
    groups = (
        CacheGroup("latent", SPEC.select(kind="latent"), Paged(64)),
        CacheGroup("indexer", SPEC.select(kind="indexer"), Paged(32)),
    )
    full = KVLayout(SPEC, Placement.simple(RoundRobin(2)), groups)
    target = layout(Replicated(), spec=short)
    with pytest.raises(PlanError, match=r"\['indexer.2', 'latent.2'\] are neither moved nor"):
        plan_transfer(full, target, (0, 70))
    plan = plan_transfer(full, target, (0, 70), absent=mtp)
    assert sorted(c for part in plan.parts for c in part.components) == sorted(short.names)


def test_fault_b10_decode_with_a_layer_that_prefill_lacks_must_say_so() -> None:
    mtp = SPEC.select(part="mtp")
    short = KVCacheSpec(tuple(c for c in SPEC.components if c.name not in mtp), SPEC.content)
    with pytest.raises(PlanError, match="source declares 3, target 5"):
        plan_transfer(layout(Replicated(), spec=short), whole(), (0, 8))
    plan = plan_transfer(layout(Replicated(), spec=short), whole(), (0, 8), absent=mtp)
    assert plan.absent == ("indexer.2", "latent.2")


def test_fault_a06_replicas_read_once() -> None:
    """PCP=4, DCP=1 is 4 replicas of one shard: 33 tokens are read once, not four times."""
    src = layout(Placement(Replicated(), ((0, 1, 2, 3),)))
    plan = plan_transfer(src, whole(), (0, 33))
    assert sorted(m[4] for m in moves(plan.parts[0].runs)) == list(range(33))
    assert plan.nbytes == 33 * SPEC.nbytes_per_token
    per_rank = np.bincount(plan.parts[0].runs.src_rank, plan.parts[0].runs.count, 4)
    assert sorted(per_rank.tolist()) == [5, 8, 8, 12], "equal parts, up to a page"


def test_short_requests_begin_at_different_replicas() -> None:
    """Most warm turns are shorter than a page a replica: their ends spread the reads, and the first
    receiver on a host, over all replicas."""
    src, dst = layout(Placement(Replicated(), ((0, 1, 2, 3),))), whole(64)
    ends = range(100, 108)
    read = [plan_transfer(src, dst, (stop - 1, stop)).links for stop in ends]
    assert sorted(read) == [((r, 0),) for r in (0, 0, 1, 1, 2, 2, 3, 3)]
    one_host = evolve(src, hosts=((0, 1, 2, 3),))
    received = [plan_transfer(dst, one_host, (stop - 1, stop)).links for stop in ends]
    assert sorted(received) == [((0, r),) for r in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert (read[1], received[1]) == (((1, 0),), ((0, 1),)), "101 tokens begin at replica 101 mod 4"


def test_fault_a10_empty_ranks_are_in_no_link() -> None:
    for prompt, ranks in [(1, 1), (15, 1), (16, 1), (17, 2), (48, 3)]:
        plan = plan_transfer(dcp(4, 16, 16), whole(16), (0, prompt))
        assert plan.links == tuple((r, 0) for r in range(ranks))
        back = plan_transfer(whole(16), dcp(4, 16, 16), (0, prompt))
        assert back.links == tuple((0, r) for r in range(ranks))


@pytest.mark.parametrize("interleave", [1, 8, 16, 24, 64])
def test_fault_a15_any_interleave_with_any_block_is_planned_exactly(interleave: int) -> None:
    plan = plan_transfer(dcp(4, interleave, 16), whole(16), (0, 200))
    verify_plan(plan, bound(plan.src, 200), bound(plan.dst, 200))
    here = held(plan.src.placement, 200)
    got = moves(plan.parts[0].runs)
    assert sorted(m[4] for m in got) == list(range(200))
    assert all(here[m[0], m[1]] == m[4] == m[3] for m in got)


def test_fault_a24_the_plan_splits_at_each_border() -> None:
    """PCP=2, prefill chunk 6, block 4: tokens 6..11 begin inside a block."""
    plan = plan_transfer(layout(BalancedChunks(2, 6, 12)), dcp(2, 1, 4), (6, 12))
    verify_plan(plan)
    for i in range(len(plan.parts[0].runs)):
        one = moves(plan.parts[0].runs.take(np.array([i])))
        assert len({(m[1] // 4, m[3] // 4) for m in one}) == 1


def test_fault_b07_a_prompt_of_a_whole_number_of_blocks_moves_no_block_more() -> None:
    for prompt, blocks in [(15, 1), (16, 1), (17, 2), (32, 2)]:
        plan = plan_transfer(whole(16), whole(16), (0, prompt))
        assert plan.num_runs == blocks
        assert all(m[1] == m[3] == m[4] for m in moves(plan.parts[0].runs))


def test_fault_c04_alignment_is_by_position_not_from_the_tail() -> None:
    """Block 4, prompt 12; decode holds 2 blocks: local block 2 comes from remote block 2."""
    plan = plan_transfer(whole(4), whole(4), (8, 12))
    assert moves(plan.parts[0].runs) == [(0, t, 0, t, t) for t in range(8, 12)]
    link = BoundPlan(plan, bound(plan.src, 12), bound(plan.dst, 13)).link(plan.parts[0], 0, 0)
    assert link.whole_blocks(4, 4) == ([0], [1])  # tables [2, 1, 0] and [3, 2, 1, 0], entry 2


@pytest.mark.parametrize("held_tokens", [0, 7, 8, 16, 31, 32])
def test_fault_c06_a_target_that_holds_a_prefix_asks_for_the_rest(held_tokens: int) -> None:
    """Prompt 32, block 4: exact at token granularity, nothing is rounded."""
    plan = plan_transfer(dcp(2, 1, 4), whole(4), (held_tokens, 32))
    verify_plan(plan, bound(plan.src, 32), bound(plan.dst, 32))
    assert sorted(m[4] for m in moves(plan.parts[0].runs)) == list(range(held_tokens, 32))


def test_fault_c07_a_plan_of_no_tokens_is_lawful_and_empty() -> None:
    plan = plan_transfer(whole(4), whole(4), (16, 16))
    verify_plan(plan, bound(plan.src, 16), bound(plan.dst, 16))
    assert (plan.num_runs, plan.nbytes, plan.links) == (0, 0, ())
    assert len(plan.parts) == 1


@pytest.mark.parametrize("prompt", [1, 10, 15])
def test_fault_c08_a_prompt_below_one_block_is_planned(prompt: int) -> None:
    plan = plan_transfer(dcp(4, 16, 16), whole(16), (0, prompt))
    assert plan.parts[0].runs.num_tokens == prompt


@pytest.mark.parametrize(("sources", "targets"), [(4, 1), (1, 4), (2, 2)])
def test_fault_c10_planned_readers_of_replicated_caches(sources: int, targets: int) -> None:
    src = layout(Placement(Replicated(), (tuple(range(sources)),)))
    dst = layout(Placement(Replicated(), (tuple(range(targets)),)))
    plan = plan_transfer(src, dst, (0, 64))
    readers = {s: {d for a, d in plan.links if a == s} for s in range(sources)}
    assert set().union(*readers.values()) == set(range(targets))
    got = moves(plan.parts[0].runs)
    for d in range(targets):
        assert sorted(m[4] for m in got if m[2] == d) == list(range(64))
    sent = [sum(m[0] == s for m in got) for s in range(sources)]
    assert max(sent) == min(sent)


@pytest.mark.parametrize("targets", [1, 2])
def test_fault_c16_shards_without_a_token_are_planned(targets: int) -> None:
    for length in (3, 65, 130):
        plan = plan_transfer(dcp(4, 64, 64), dcp(targets, 64, 64), (0, length))
        verify_plan(plan)
        assert plan.parts[0].runs.num_tokens == length
    assert plan_transfer(dcp(8, 1, 64), whole(64), (0, 3)).links == ((0, 0), (1, 0), (2, 0))


def test_fault_c19_both_regions_are_assembled_from_both_ranks() -> None:
    groups = tuple(
        CacheGroup(kind, SPEC.select(kind=kind), Paged(4))  # type: ignore[arg-type]
        for kind in ("latent", "indexer")
    )
    host = KVLayout(SPEC, Placement.simple(Replicated()), groups)
    plan = plan_transfer(dcp(2, 1, 4), host, (0, 33))
    assert len(plan.parts) == 2
    for part in plan.parts:
        assert {m[0] for m in moves(part.runs)} == {0, 1}
        assert sorted(m[4] for m in moves(part.runs)) == list(range(33))


def test_fault_f13_components_match_by_absolute_layer_id() -> None:
    dense = KVCacheSpec.from_config({**GLM_5_3, "index_topk_freq": None})
    sparse = KVCacheSpec.from_config(GLM_5_3)
    extra = sorted(set(dense.names) - set(sparse.names))
    assert len(extra) == 57
    src, dst = layout(Replicated(), spec=dense), layout(Replicated(), spec=sparse)
    with pytest.raises(PlanError, match="neither moved nor named absent"):
        plan_transfer(src, dst, (0, 4))
    plan = plan_transfer(src, dst, (0, 4), absent=extra)
    assert set(plan.parts[0].components) == set(sparse.names)
