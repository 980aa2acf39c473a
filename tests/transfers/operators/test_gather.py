"""AllGather keeps the law on every rank, padded or not; what goes over the wire stays packed."""

from collections.abc import Sequence

import pytest
import torch
from attrs import define, evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import CONFIG, SPEC, bound_to, gather_cases

from kvflow.comm import Comm, LocalComm, ThreadComm, ThreadGroup, run_ranks
from kvflow.errors import LayoutError, PlanError
from kvflow.kernels.codec import decode_latent, encode_latent
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.testing import Case, check_operator, on_threads
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.operators import AllGather, Operator, bind


def gathering(case: Case, padded: bool = False):
    """Builds a rank's stage; and the stage that only states the two sides."""

    def make(comm: Comm) -> AllGather:
        return AllGather(case.src.layout, case.dst.layout, comm, padded=padded)

    size = len(case.src.layout.ranks)
    return make, make(ThreadComm(ThreadGroup(size), 0))


@settings(max_examples=25)
@given(case=gather_cases(), padded=st.booleans())
def test_all_gather_keeps_the_law_on_every_rank(case: Case, padded: bool) -> None:
    make, stage = gathering(case, padded)
    run = on_threads(make, len(case.src.layout.ranks))
    check_operator(stage, case.src, case.dst, case.tokens, run=run)


def gather_pair(num_ranks: int, src_sharding, length: int, spec=SPEC, start: int = 0) -> Case:
    src = KVLayout.uniform(spec, Placement.simple(src_sharding), Paged(4))
    ranks = (tuple(range(num_ranks)),)
    dst = KVLayout.uniform(spec, Placement(Replicated(0, length), ranks), Paged(8))
    return Case(bound_to(src, length), bound_to(dst, length), (start, length))


def traced(case: Case, padded: bool) -> list[list]:
    """The calls of every rank: (operation, group-wide shape)."""
    make, stage = gathering(case, padded)
    size = len(case.src.layout.ranks)
    traces: list[list] = [[] for _ in range(size)]

    def run(bound, sources, targets) -> None:
        def body(comm) -> None:
            r = comm.rank
            make(comm).execute(bound, {r: sources[r]}, {r: targets[r]})

        run_ranks(size, body, traces=traces)

    check_operator(stage, case.src, case.dst, case.tokens, run=run)
    return traces


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 9])
def test_fault_a01_collective_schedule_is_equal_on_all_ranks(length: int, padded: bool) -> None:
    for sharding in (BalancedChunks(2, 0, length), RoundRobin(2, 1), RoundRobin(2, 4)):
        one, two = traced(gather_pair(2, sharding, length), padded)
        assert one == two
        assert len(one) == len(SPEC.names), "a rank without tokens joins every call"
        longest = int(sharding.local_len(length, range(2)).max())
        assert {shape[0] for _, shape in one} == {2 * longest if padded else length}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_fault_a10_ranks_without_tokens_send_and_expect_nothing(length: int, padded: bool) -> None:
    case = gather_pair(4, RoundRobin(4, 16), length)
    make, stage = gathering(case, padded)
    check_operator(stage, case.src, case.dst, case.tokens, run=on_threads(make, 4))


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fault_a04_ranks_past_the_end_join_with_no_rows(length: int) -> None:
    case = gather_pair(2, BalancedChunks(2, 0, length, form="ceil"), length)
    counts = case.src.layout.placement.sharding.local_len(length, range(2))
    assert counts.tolist() == [[0, 0], [1, 0], [1, 1]][length]
    make, stage = gathering(case)
    check_operator(stage, case.src, case.dst, case.tokens, run=on_threads(make, 2))


@define
class CountingComm:
    """A comm that adds up the bytes that its rank sends."""

    comm: Comm
    sent: int = 0

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def all_gather(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert rows.dtype == torch.uint8, "rows travel as the bytes of the cache"
        self.sent += rows.numel()
        return self.comm.all_gather(rows, counts)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("start", "length"), [(0, 0), (0, 7), (3, 20)])
def test_the_report_says_what_the_ranks_send(start: int, length: int, padded: bool) -> None:
    case = gather_pair(3, RoundRobin(3, 2), length, start=min(start, length))
    make, stage = gathering(case, padded)
    counters: dict[int, CountingComm] = {}

    def counted(comm: Comm) -> Operator:
        counters[comm.rank] = CountingComm(comm)
        return make(counters[comm.rank])

    check_operator(stage, case.src, case.dst, case.tokens, run=on_threads(counted, 3))
    report = stage.report(case.tokens)
    assert report.wire_nbytes == sum(c.sent for c in counters.values())
    assert report.payload_nbytes == (length - case.tokens[0]) * SPEC.nbytes_per_token
    assert (report.padding_nbytes > 0) == (padded and length not in (0, 3))
    assert report.num_collectives == len(SPEC.names)


def test_packed_fp8_rows_are_57_percent_of_bfloat16_on_the_wire() -> None:
    """GLM-5.3's latent rows: 656 of 1152 bytes."""
    reports = []
    for dtype in ("fp8", "bfloat16"):
        spec = KVCacheSpec.from_config(GLM_5_3, kv_dtype=dtype)
        _, stage = gathering(gather_pair(8, RoundRobin(8), 4096, spec))
        latents = spec.select(kind="latent")
        reports.append(evolve(stage, components=latents).report((0, 4096)).wire_nbytes)
    assert reports[0] == 4096 * 79 * 656
    assert round(reports[0] / reports[1], 2) == 0.57


def test_fault_a20_a_gather_keeps_the_bytes_of_an_fp8_cache() -> None:
    """DCP=2, 32 cached tokens and 5 new ones: decoded after the gather, equal to the values within
    a quantisation step."""
    config = CONFIG | {"kv_lora_rank": 256, "qk_rope_head_dim": 8}
    spec = KVCacheSpec.from_config(config)
    record = spec["latent.0"].record
    values = torch.randn(37, 264, generator=torch.Generator().manual_seed(1))
    rows = encode_latent(record, values[:, :256], values[:, 256:])
    case = gather_pair(2, RoundRobin(2), 37, spec)
    make, stage = gathering(case)
    bound = bind(stage, case.src, case.dst, case.tokens)
    caches = [
        {r: RankCache.allocate(b.layout, r, b.num_blocks) for r in (0, 1)}
        for b in (case.src, case.dst)
    ]
    view = caches[0][0].pages["latent.0"]
    size, pitch = view.block_size, record.nbytes
    for i in range(37):  # token i is the (i div 2)th of rank i mod 2; blocks are bound descending
        block = case.src.tables["kv"][i // 2 // size]
        at = int(block) * view.block_stride + i // 2 % size * pitch
        caches[0][i % 2].pages["latent.0"].memory[at : at + pitch] = rows[i]
    on_threads(make, 2)(bound, *caches)
    step = values[:, :256].abs().amax() / 448 * 32
    for rank in (0, 1):
        view = caches[1][rank].pages["latent.0"]
        pages = view.memory.view(-1, 8, pitch)[case.dst.tables["kv"].tolist()]
        arrived = pages.reshape(-1, pitch)[:37]
        assert torch.equal(arrived, rows)
        assert (decode_latent(record, arrived)[:, :256] - values[:, :256]).abs().max() <= step / 2


def test_fault_a21_row_i_carries_position_i() -> None:
    for sharding in (BalancedChunks(4, 0, 16), RoundRobin(4), RoundRobin(4, 4)):
        case = gather_pair(4, sharding, 16)
        make, stage = gathering(case)
        check_operator(stage, case.src, case.dst, (0, 16), run=on_threads(make, 4))


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


def test_all_gather_refuses_ranks_that_hold_some_heads_only() -> None:
    spec = KVCacheSpec.of_attention(1, num_heads=4, head_dim=2)
    src = KVLayout.uniform(spec, Placement.simple(RoundRobin(2)), Paged(4))
    dst = KVLayout.uniform(spec, Placement(Replicated(), ((0, 1),)), Paged(4))
    comm = ThreadComm(ThreadGroup(2), 0)
    AllGather(src, dst, comm)
    with pytest.raises(LayoutError, match=r"key\.0: AllGather moves whole rows"):
        AllGather(src, evolve(dst, head_ranks=((0,), (1,))), comm)


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_gathered_between_pages_of_another_layout(rank: int) -> None:
    """Rank 1 has no tokens."""
    case = gather_pair(2, RoundRobin(2, 4), 3)
    stage = AllGather(case.src.layout, case.dst.layout, ThreadComm(ThreadGroup(2), rank))
    bound = bind(stage, case.src, case.dst, case.tokens)
    good = [RankCache.allocate(b.layout, rank, b.num_blocks, 7) for b in (case.src, case.dst)]
    for side, size, other in ((0, 4, 8), (1, 8, 4)):
        layout = bound.plan.src if side == 0 else bound.plan.dst
        wrong = KVLayout.uniform(SPEC, layout.placement, Paged(other))
        caches = list(good)
        caches[side] = RankCache.allocate(wrong, rank, {"kv": 64})
        with pytest.raises(PlanError, match=f"pages of {other} .*the layout's have {size}"):
            stage.execute(bound, *({rank: cache} for cache in caches))
    assert all(bool((view.memory == 7).all()) for view in good[1].pages.values())
