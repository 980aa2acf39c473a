"""Operators keep the law of transfers; pipelines refuse stages that do not fit."""

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from kvflow.comm import LocalComm, run_ranks
from kvflow.errors import ContentMismatch, LayoutError, PlanError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing import Case, bindings, cases, check_law, layouts, specs, token_ranges
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.operators import (
    AllGather,
    Operator,
    Pipeline,
    Reassemble,
    bind,
    first_difference,
)

torch.set_num_threads(1)

EXECUTORS = [ReferenceExecutor(), StridedExecutor()]
SPEC = KVCacheSpec.from_config(
    {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 2,
        "index_head_dim": 4,
        "indexer_types": ["full", "shared"],
    }
)


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
@given(case=cases())
def test_reassemble_keeps_the_law(executor, case: Case) -> None:
    stage = Reassemble(case.src.layout, case.dst.layout, executor)
    check_law(stage, case.src, case.dst, case.tokens)


@st.composite
def gather_cases(draw: st.DrawFn) -> Case:
    """Any sharding over ranks 0..n-1 -> replicated over the same ranks."""
    tokens = draw(token_ranges(24))
    spec = draw(specs())
    src = draw(layouts(spec, tokens, max_shards=4))
    start = draw(st.integers(0, tokens[0]))
    sharding = draw(st.sampled_from([Replicated(), Replicated(start, tokens[1])]))
    everyone = Placement(sharding, (src.placement.all_ranks,))
    dst = evolve(draw(layouts(spec, tokens)), placement=everyone)
    sides = [draw(bindings(layout, tokens[1])) for layout in (src, dst)]
    return Case(sides[0], sides[1], tokens)


def all_gather_on_threads(case: Case, traces=None):
    """A move function that runs `AllGather` on every rank, each seeing its own caches alone."""

    def move(bound, sources, targets) -> None:
        def body(comm) -> None:
            stage = AllGather(case.src.layout, case.dst.layout, comm)
            r = comm.rank
            stage.execute(bound, {r: sources[r]}, {r: targets[r]})

        run_ranks(len(sources), body, traces=traces)

    return move


@given(case=gather_cases())
def test_all_gather_keeps_the_law_on_every_rank(case: Case) -> None:
    check_law(all_gather_on_threads(case), case.src, case.dst, case.tokens)


def bound_to(layout: KVLayout, length: int) -> Binding:
    need = layout.num_blocks_for(length)
    tables = {g: list(range(n))[::-1] for g, n in need.items()}
    return Binding.of(layout, tables, {g: n + 1 for g, n in need.items()}, length)


def gather_pair(num_ranks: int, src_sharding, length: int) -> Case:
    src = KVLayout.uniform(SPEC, Placement.simple(src_sharding), Paged(4))
    ranks = (tuple(range(num_ranks)),)
    dst = KVLayout.uniform(SPEC, Placement(Replicated(0, length), ranks), Paged(8))
    return Case(bound_to(src, length), bound_to(dst, length), (0, length))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 9])
def test_fault_a01_collective_schedule_is_equal_on_all_ranks(length: int) -> None:
    for sharding in (BalancedChunks(2, 0, length), RoundRobin(2, 1), RoundRobin(2, 4)):
        traces: list[list] = [[], []]
        case = gather_pair(2, sharding, length)
        check_law(all_gather_on_threads(case, traces), case.src, case.dst, case.tokens)
        assert traces[0] == traces[1]
        assert len(traces[0]) == len(SPEC.names), "a rank without tokens joins every call"
        assert [shape[0] for _, shape in traces[0]] == [length] * len(SPEC.names)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fault_a04_ranks_past_the_end_join_with_no_rows(length: int) -> None:
    case = gather_pair(2, BalancedChunks(2, 0, length, form="ceil"), length)
    counts = case.src.layout.placement.sharding.local_len(length, range(2))
    assert counts.tolist() == [[0, 0], [1, 0], [1, 1]][length]
    check_law(all_gather_on_threads(case), case.src, case.dst, case.tokens)


def test_all_gather_refuses_other_targets_and_groups() -> None:
    src = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2)), Paged(4))
    elsewhere = KVLayout.uniform(SPEC, Placement(Replicated(), ((0, 2),)), Paged(4))
    with pytest.raises(LayoutError, match=r"replicated over the ranks of the source \(0, 1\)"):
        AllGather(src, elsewhere, LocalComm())
    with pytest.raises(LayoutError, match="replicated over the ranks"):
        AllGather(src, src, LocalComm())
    both = KVLayout.uniform(SPEC, Placement(Replicated(), ((0, 1),)), Paged(4))
    with pytest.raises(LayoutError, match=r"over ranks \(0, 1\), the group has 0..0"):
        AllGather(src, both, LocalComm())


def stages(one_target_sharding=None) -> list[KVLayout]:
    return [
        KVLayout.uniform(SPEC, Placement.simple(RoundRobin(4, 3)), Paged(4)),
        KVLayout.uniform(SPEC, Placement.simple(one_target_sharding or RoundRobin(2, 1)), Paged(8)),
        KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(16)),
    ]


def allocate(binding: Binding, fill: int) -> dict[int, RankCache]:
    layout = binding.layout
    return {
        r: RankCache.allocate(layout, r, binding.num_blocks, fill)
        for r in layout.placement.all_ranks
    }


@given(length=st.integers(0, 40), data=st.data())
def test_a_pipeline_keeps_the_law_from_end_to_end(length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    first, middle, last = stages()
    pipeline = Pipeline(
        [Reassemble(first, middle, StridedExecutor()), Reassemble(middle, last, StridedExecutor())]
    )
    between = bound_to(middle, length)

    def move(bound, sources, targets) -> None:
        caches = [sources, allocate(between, 0x33), targets]
        pipeline.run((start, length), [bound.src, between, bound.dst], caches)

    check_law(move, bound_to(first, length), bound_to(last, length), (start, length))


def test_a_pipeline_refuses_stages_that_do_not_fit_and_names_the_field() -> None:
    first, middle, last = stages()
    other = stages(RoundRobin(2, 8))[1]
    one = Reassemble(first, middle, StridedExecutor())
    two = Reassemble(other, last, StridedExecutor())
    with pytest.raises(LayoutError) as refused:
        Pipeline([one, two])
    message = str(refused.value)
    assert str(middle) in message
    assert str(other) in message
    assert "placement.sharding.interleave is 1 here, 8 there" in message
    with pytest.raises(LayoutError, match="one or more stages"):
        Pipeline([])


def test_a_pipeline_refuses_a_claim_that_no_stage_before_delivers() -> None:
    first, middle, last = stages()
    latents = SPEC.select(kind="latent")
    one = Reassemble(first, middle, StridedExecutor(), latents)
    with pytest.raises(LayoutError, match=r"stage 1 claims \['indexer.0', 'indexer.2'\]"):
        Pipeline([one, Reassemble(middle, last, StridedExecutor())])
    narrow = Pipeline([one, Reassemble(middle, last, StridedExecutor(), latents)])
    assert narrow.components == latents
    assert (narrow.source, narrow.target) == (first, last)


def test_a_pipeline_wants_a_binding_and_caches_for_every_layout() -> None:
    first, middle, _ = stages()
    one = Pipeline([Reassemble(first, middle, StridedExecutor())])
    with pytest.raises(PlanError, match="1 stages need 2 bindings and caches, got 1 and 2"):
        one.run((0, 4), [bound_to(first, 4)], [{}, {}])


def test_a_stage_refuses_a_plan_between_other_layouts() -> None:
    first, middle, last = stages()
    stage = Reassemble(first, middle, StridedExecutor())
    foreign = Reassemble(first, last, StridedExecutor())
    bound = bind(foreign, bound_to(first, 4), bound_to(last, 4), (0, 4))
    with pytest.raises(PlanError, match="target of the plan is not the stage's: placement"):
        stage.execute(bound, {}, {})


def test_a_stage_refuses_other_content_at_construction() -> None:
    first, middle, _ = stages()
    foreign = evolve(middle, spec=evolve(SPEC, content=(("kv_dtype", "bfloat16"),)))
    with pytest.raises(ContentMismatch, match="'fp8', target 'bfloat16'"):
        Reassemble(first, foreign, StridedExecutor())


def test_stages_satisfy_the_protocol() -> None:
    first, middle, _ = stages()
    assert isinstance(Reassemble(first, middle, StridedExecutor()), Operator)
    alone = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(4))
    assert isinstance(AllGather(alone, alone, LocalComm()), Operator)


@frozen
class _Pair:
    left: object
    right: tuple


def test_first_difference_walks_down_to_the_first_unequal_field() -> None:
    assert first_difference(_Pair(1, (2, 3)), _Pair(1, (2, 3))) is None
    assert first_difference(_Pair(1, (2, 3)), _Pair(1, (2, 4))) == "right[1] is 3 here, 4 there"
    assert first_difference(_Pair(1, (2,)), _Pair(1, (2, 4))) == "right is (2,) here, (2, 4) there"
    assert first_difference(1, 2) == "the value is 1 here, 2 there"
