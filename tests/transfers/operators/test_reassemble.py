"""Reassemble keeps the law with every executor, pulled and pushed; pipelines refuse stages that do
not fit."""

import threading

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import EXECUTORS, SPEC, bound_to

from kvflow.comm import LocalComm
from kvflow.errors import ContentMismatch, LayoutError, PlanError, TransferError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.testing import Case, cases, check_law, check_operator
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.operators import (
    AllGather,
    Operator,
    Pipeline,
    Reassemble,
    bind,
    first_difference,
)


@pytest.mark.parametrize("name", EXECUTORS)
@settings(max_examples=20)
@given(case=cases(max_tokens=32))
def test_reassemble_keeps_the_law(name: str, case: Case) -> None:
    stage = Reassemble(case.src.layout, case.dst.layout, EXECUTORS[name])
    check_operator(stage, case.src, case.dst, case.tokens)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("interleave", "blocks", "tokens"), [(1, (4, 8), (3, 29)), (4, (8, 8), (0, 17))]
)
def test_reassemble_keeps_the_law_over_nixl(interleave, blocks, tokens) -> None:
    from endpoint_worlds import mover, nixl_world

    src = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2, interleave)), Paged(blocks[0]))
    dst = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(blocks[1]))
    stage, length = Reassemble(src, dst, StridedExecutor()), tokens[1]
    move = mover(nixl_world())
    check_operator(stage, bound_to(src, length), bound_to(dst, length), tokens, run=move)


def pushing_world(length: int = 20):
    """A bound plan from two ranks to one, endpoints for all, pushers connected to the target."""
    src = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2)), Paged(4))
    dst = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(8))
    stage = Reassemble(src, dst, StridedExecutor())
    bound = bind(stage, bound_to(src, length), bound_to(dst, length), (0, length))
    fabric = LocalFabric()
    senders = [
        LocalEndpoint(RankCache.allocate(src, r, bound.src.num_blocks, fill=7 + r), fabric)
        for r in range(2)
    ]
    target = LocalEndpoint(RankCache.allocate(dst, 0, bound.dst.num_blocks), fabric)
    peers = {0: senders[0].connect(target.export())}
    senders[1].connect(target.export())
    return bound, senders, target, peers


def test_a_push_moves_what_its_own_rank_holds_and_reports_it() -> None:
    bound, senders, target, peers = pushing_world()
    reports = [s.push(bound, r, peers, timeout=10, verify=True) for r, s in enumerate(senders)]
    assert sum(r.nbytes for r in reports) == bound.plan.nbytes == 20 * SPEC.nbytes_per_token
    assert all(r.verified and r.num_links == 1 for r in reports)
    assert set(target.cache.pages["latent.0"].memory.tolist()) == {0, 7, 8}


def test_a_push_refuses_other_ranks_strangers_and_closed_targets() -> None:
    bound, senders, target, peers = pushing_world()
    with pytest.raises(TransferError, match="a push for rank 1 at the cache of 0"):
        senders[0].push(bound, 1, peers, timeout=1)
    with pytest.raises(TransferError, match="rank 0 is written, but None is not connected"):
        senders[0].push(bound, 0, {}, timeout=1)
    target.close()
    with pytest.raises(TransferError, match="is closed or was never part of this fabric"):
        senders[0].push(bound, 0, peers, timeout=1)
    senders[1].close()
    with pytest.raises(TransferError, match="is closed"):
        senders[1].push(bound, 1, peers, timeout=1)


def test_a_late_push_leaves_its_endpoint_unquiesced_until_it_ends() -> None:
    bound, senders, target, peers = pushing_world()
    go_on = threading.Event()
    senders[0].gate = lambda num_done: go_on.wait(10)
    with pytest.raises(TransferError, match=r"did not end within 0\.050 s"):
        senders[0].push(bound, 0, peers, timeout=0.05)
    assert not senders[0].quiesced()
    assert not target.cache.pages["latent.0"].memory.any()
    go_on.set()
    for writer in senders[0]._late:
        writer.join(10)
    assert senders[0].quiesced()
    assert target.cache.pages["latent.0"].memory.any()


def test_a_push_of_no_tokens_completes_at_once() -> None:
    bound, senders, _, peers = pushing_world(length=0)
    assert senders[0].push(bound, 0, peers, timeout=0, verify=True).nbytes == 0


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
    content = dict(SPEC.content) | {"kv_dtype": "bfloat16"}
    foreign = evolve(middle, spec=evolve(SPEC, content=content.items()))
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
