"""The law of transfers: kept by every executor of this process, and seen to fail."""

import gc
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from planning import SPEC, bound, dcp, layout, whole

from kvflow.kernels.rows import PageView
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing import Case, LawError, cases, check_law, deal
from kvflow.testing.law import allocate_caches
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

torch.set_num_threads(1)
EXECUTORS = [ReferenceExecutor(), StridedExecutor()]


SHARDS = range(max(1, settings().max_examples // 64))
"""One in a quick run; 20 in `make laws`, which then draws 26,000 pairs; about 78 in 100
are distinct, so that 20,000 different pairs are checked."""


@pytest.mark.parametrize("shard", SHARDS)
@given(case=cases())
def test_the_executor_keeps_the_law(law_pairs, shard: int, case: Case) -> None:
    law_pairs.check(case, lambda: check_law(StridedExecutor(), case.src, case.dst, case.tokens))


@given(case=cases(max_tokens=24))
def test_the_reference_keeps_the_law(law_pairs, case: Case) -> None:
    law_pairs.check(case, lambda: check_law(ReferenceExecutor(), case.src, case.dst, case.tokens))


def blocks_outermost(layout_, rank, num_blocks, fill=0) -> RankCache:
    """All components of a group in one region, a block's pages next to each other."""
    pages = {}
    for group in layout_.groups:
        size = group.paging.block_size
        held = [n for n in group.components if layout_.head_shard_of(n, rank)]
        records = {n: layout_.local_record(n, rank) for n in held}
        stride = sum(r.page_pitch(size) for r in records.values()) + 16
        memory = torch.full((num_blocks[group.name] * stride,), fill, dtype=torch.uint8)
        at = 8
        for name, record in records.items():
            pages[name] = PageView(memory, record, size, stride, at)
            at += record.page_pitch(size)
    return RankCache(rank, pages)


@settings(max_examples=30)
@given(case=cases(max_tokens=24))
def test_fault_f03_f04_layers_packed_in_one_allocation_stay_apart(case: Case) -> None:
    for source, target in [
        (blocks_outermost, RankCache.allocate),
        (RankCache.allocate, blocks_outermost),
    ]:
        check_law(
            StridedExecutor(), case.src, case.dst, case.tokens,
            make_source=source, make_target=target,
        )  # fmt: skip


def broken(change):
    """The strided executor, and then one more thing."""

    def move(both, sources, targets) -> None:
        StridedExecutor().execute(both, sources, targets)
        change(sources, targets)

    return move


def flip(caches, rank: int, name: str, at: int) -> None:
    caches[rank].pages[name].memory[at] ^= 0xFF


def test_the_law_is_seen_to_fail_and_names_the_place() -> None:
    src, dst = bound(dcp(2), 6), bound(whole(8), 6)

    def run(change) -> str:
        with pytest.raises(LawError) as refused:
            check_law(broken(change), src, dst, (1, 6))
        return str(refused.value)

    row = SPEC["latent.1"].record.nbytes  # 4 values, a 4-byte scale, 2 bfloat16
    said = run(lambda s, t: flip(t, 0, "latent.1", 3 * row + 5))
    place = "target rank 0, component latent.1, token 3, field scale, head 0, byte 1 of 4"
    assert re.fullmatch(re.escape(place) + ": byte is 0x.., must be 0x..", said)
    said = run(lambda s, t: flip(t, 0, "latent.1", 0))
    assert "component latent.1, byte 0 of the region, which no claimed token owns" in said
    assert "byte is 0x5a, must be 0xa5" in said
    said = run(lambda s, t: flip(s, 1, "indexer.0", 3))
    assert said.startswith("source rank 1, component indexer.0")


def test_the_law_notices_a_link_that_is_left_out() -> None:
    def lazy(both, sources, targets) -> None:
        first = both.plan.links[0][0]
        emptied = {r: c if r != first else RankCache.allocate(
            both.src.layout, r, both.src.num_blocks) for r, c in sources.items()}  # fmt: skip
        StridedExecutor().execute(both, emptied, targets)

    with pytest.raises(LawError, match="must be 0x"):
        check_law(lazy, bound(dcp(2), 6), bound(whole(8), 6), (0, 6))


def test_the_oracle_refuses_what_it_cannot_deal() -> None:
    with pytest.raises(TypeError, match=r"cannot deal 7: use @deal.register"):
        deal(7, 3)


def test_absent_components_are_left_alone() -> None:
    absent = SPEC.select(part="mtp")
    check_law(StridedExecutor(), bound(dcp(3, 2), 20), bound(whole(8), 20), (3, 20), absent=absent)


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("prompt", [1, 16, 17, 63, 64, 65, 70])
def test_fault_c01_pages_regroup_both_ways_and_the_tail_stays(executor, prompt: int) -> None:
    for here, there in [(16, 64), (64, 16)]:
        check_law(executor, bound(whole(here), prompt), bound(whole(there), prompt), (0, prompt))


def test_fault_a02_the_second_step_touches_its_five_tokens_only() -> None:
    check_law(
        StridedExecutor(), bound(layout(BalancedChunks(2, 16, 21)), 21), bound(dcp(2), 21), (16, 21)
    )


def test_fault_c04_a_suffix_rule_would_move_the_wrong_blocks() -> None:
    """The decode request has 13 tokens, prefill 12: only block 2 has a remote source."""
    src, dst = bound(whole(4), 12), bound(whole(4), 13)
    check_law(StridedExecutor(), src, dst, (8, 12))

    def by_suffix(both, sources, targets) -> None:
        for name, view in targets[0].pages.items():  # last two blocks <- last two blocks
            page = view.block_stride
            for local, remote in ((2, 1), (3, 2)):
                to, at = (b.tables["kv"][i] * page for b, i in ((dst, local), (src, remote)))
                view.memory[to : to + page] = sources[0].pages[name].memory[at : at + page]

    with pytest.raises(LawError):
        check_law(by_suffix, src, dst, (8, 12))


def test_fault_c19_host_pool_is_assembled_from_two_ranks_and_its_tail_stays() -> None:
    groups = (
        CacheGroup("latent", SPEC.select(kind="latent"), Pool(64)),
        CacheGroup("indexer", SPEC.select(kind="indexer"), Paged(64)),
    )
    host = KVLayout(SPEC, Placement.simple(Replicated()), groups)
    check_law(StridedExecutor(), bound(dcp(2, 1, 16), 33), bound(host, 33), (0, 33))


def test_fault_a18_ranks_write_only_what_they_own() -> None:
    check_law(StridedExecutor(), bound(whole(16), 64), bound(dcp(4, 1, 4), 64, 0), (0, 64))


def test_fault_g08_caches_that_are_let_go_leave_no_memory_behind() -> None:
    src, dst = bound(dcp(2), 16), bound(whole(16), 16)
    plan = plan_transfer(src.layout, dst.layout, (0, 16))

    def transfers(number: int) -> int:
        for _ in range(number):
            both = BoundPlan(plan, src, dst)
            caches = [allocate_caches(b.layout, b.num_blocks, 0) for b in (src, dst)]
            StridedExecutor().execute(both, *caches)
        del both, caches
        gc.collect()
        return sum(type(o) in (torch.Tensor, PageView) for o in gc.get_objects())

    assert transfers(2) == transfers(100)


ONE_LAYER = KVCacheSpec.from_config(
    {"num_hidden_layers": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 1, "index_head_dim": 1}
)


LONG = [(8, 12_000), *(pytest.param(w, 30_000, marks=pytest.mark.slow) for w in (1, 2, 4, 8))]


@pytest.mark.parametrize(("num_ranks", "length"), LONG)
def test_fault_k12_long_contexts_are_bit_equal(num_ranks: int, length: int) -> None:
    """12K to 30K tagged tokens over DCP 1, 2, 4, 8."""
    src = layout(dcp(num_ranks, 1 + num_ranks // 2, 64).placement, 64, ONE_LAYER)
    dst = layout(Replicated(), 64, ONE_LAYER)
    check_law(StridedExecutor(), bound(src, length), bound(dst, length), (0, length))


def test_the_documentation_of_testing_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    scope: dict[str, object] = {"__name__": "docs.testing"}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, scope)
