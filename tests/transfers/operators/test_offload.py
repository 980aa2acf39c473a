"""Offload and Restore keep the law through a host pool and through files; a file that is not what
was written is an error."""

import hashlib
import json
import os

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import CONFIG, EXECUTORS, SPEC, bound_to, tier_cases

from kvflow.errors import ContentMismatch, LayoutError, PlanError, TransferError
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.testing import Case, LawError, bindings, check_operator, on_threads
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.strided import StridedExecutor
from kvflow.transfers.operators import (
    FileTier,
    FromFiles,
    Offload,
    Pipeline,
    RankLocal,
    Restore,
    ToFiles,
    bind,
)
from kvflow.transfers.operators.tierfile import MAGIC

RANK_LOCAL = {**EXECUTORS, "rank_local": RankLocal()}


@pytest.mark.parametrize("name", RANK_LOCAL)
@settings(max_examples=12)
@given(both=tier_cases())
def test_offload_keeps_the_law(name: str, both: tuple[Case, Binding]) -> None:
    case, tier = both
    stage = Offload(case.src.layout, tier.layout, RANK_LOCAL[name])
    check_operator(stage, case.src, tier, case.tokens)


@settings(max_examples=12)
@given(both=tier_cases())
def test_every_rank_offloads_what_is_its_own(both: tuple[Case, Binding]) -> None:
    """Each rank sees its own caches alone; those without a tier do nothing."""
    case, tier = both
    src, dst = case.src.layout, tier.layout
    run = on_threads(lambda comm: Offload(src, dst), len(src.ranks))
    check_operator(Offload(src, dst), case.src, tier, case.tokens, run=run)
    bound = bind(Offload(src, dst), case.src, tier, case.tokens)
    assert all(a == b for a, b in bound.plan.links), "no byte crosses a link"


@pytest.mark.parametrize("name", EXECUTORS)
@settings(max_examples=12)
@given(both=tier_cases())
def test_restore_keeps_the_law_into_any_other_layout(name: str, both) -> None:
    case, tier = both
    stage = Restore(tier.layout, case.dst.layout, EXECUTORS[name])
    check_operator(stage, tier, case.dst, case.tokens)


@settings(max_examples=12)
@given(both=tier_cases(), data=st.data())
def test_a_round_trip_through_the_pool_keeps_the_law(both, data: st.DataObject) -> None:
    case, tier = both
    back = data.draw(bindings(case.dst.layout, case.tokens[1]))
    pipeline = Pipeline([
        Offload(case.src.layout, tier.layout),
        Restore(tier.layout, back.layout, StridedExecutor()),
    ])  # fmt: skip

    def run(bound, sources, targets) -> None:
        middle = {
            r: RankCache.allocate(tier.layout, r, tier.num_blocks, 0x33) for r in tier.layout.ranks
        }
        pipeline.run(case.tokens, [case.src, tier, back], [sources, middle, targets])

    stage = Restore(tier.layout, back.layout, StridedExecutor())
    check_operator(_Named(stage, case.src.layout), case.src, back, case.tokens, run=run)


class _Named:
    """States the two ends of a pipeline as an operator, for the harness."""

    def __init__(self, last, source: KVLayout) -> None:
        self.source, self.target, self.components = source, last.target, last.components
        self.planned = source, last.target

    def execute(self, bound, sources, targets) -> None:
        raise NotImplementedError


@settings(max_examples=12)
@given(both=tier_cases(), data=st.data())
def test_a_round_trip_through_files_keeps_the_law(tmp_path_factory, both, data) -> None:
    """Part of what was stored comes back, into another layout that is derived from the file."""
    case, tier = both
    files = FileTier(tmp_path_factory.mktemp("tier"))
    start, stop = case.tokens
    first = data.draw(st.integers(tier.layout.placement.sharding.start, start))
    offload = Offload(case.src.layout, tier.layout, ToFiles(files, "k"))
    in_files = bound_to(tier.layout, stop)

    def run(bound, sources, targets) -> None:
        ranks = len(case.src.layout.ranks)
        stored = bind(offload, case.src, in_files, (first, stop))
        on_threads(lambda comm: offload, ranks)(stored, sources, {})
        found = files.find("k")
        assert (found.layout, found.tokens) == (tier.layout, (first, stop))
        restore = Restore(found.layout, case.dst.layout, FromFiles(found, StridedExecutor()))
        back = bind(restore, found.binding, case.dst, case.tokens)
        restore.execute(back, {}, targets)

    last = Restore(tier.layout, case.dst.layout, StridedExecutor())
    check_operator(_Named(last, case.src.layout), case.src, case.dst, case.tokens, run=run)


def device(num_ranks: int = 2, replicas: int = 2) -> KVLayout:
    ranks = tuple(tuple(range(s, num_ranks * replicas, num_ranks)) for s in range(num_ranks))
    return KVLayout.uniform(SPEC, Placement(RoundRobin(num_ranks), ranks), Paged(4))


def pool(*ranks: int, block_size: int = 8) -> KVLayout:
    deal = RoundRobin(len(ranks))
    return KVLayout.uniform(SPEC, Placement(deal, tuple((r,) for r in ranks)), Pool(block_size))


def test_replicas_are_stored_once() -> None:
    """GLM-5.3 with PCP 8: eight replicas, one copy in the tier."""
    spec = KVCacheSpec.from_config(GLM_5_3)
    src = KVLayout.uniform(spec, Placement(Replicated(), (tuple(range(8)),)), Paged(64))
    tier = KVLayout.uniform(spec, Placement(Replicated(), ((3,),)), Pool(64))
    bound = bind(Offload(src, tier), bound_to(src, 1000), bound_to(tier, 1000), (0, 1000))
    assert bound.plan.nbytes == 1000 * spec.nbytes_per_token
    assert bound.plan.links == ((3, 3),)


def test_a_tier_that_does_not_fit_is_refused_and_says_why() -> None:
    with pytest.raises(LayoutError, match=r"shard 0 would be stored 2 times, on ranks \(0, 2\)"):
        Offload(device(), device())
    with pytest.raises(LayoutError, match=r"shard 1 of .* lies on ranks"):
        Offload(device(), pool(0, 2))
    with pytest.raises(LayoutError, match=r"placement\.ranks\[0\]\[0\] is 0 here, 1 there"):
        Offload(device(), pool(1, 0))
    other = KVLayout.uniform(SPEC, Placement(RoundRobin(2, 4), ((0,), (1,))), Pool(8))
    with pytest.raises(LayoutError, match=r"placement\.sharding\.interleave is 1 here, 4 there"):
        Offload(device(), other)
    content = dict(SPEC.content) | {"kv_dtype": "bfloat16"}
    foreign = evolve(pool(0, 1), spec=evolve(SPEC, content=content.items()))
    with pytest.raises(ContentMismatch):
        Offload(device(), foreign)
    with pytest.raises(LayoutError, match="would be stored 2 times"):
        Restore(device(), pool(0, 1), StridedExecutor())


def test_fault_f12_a_row_of_another_size_is_refused() -> None:
    wide = KVCacheSpec.from_config(CONFIG | {"kv_lora_rank": 8})
    with pytest.raises(ContentMismatch, match=r"latent\.0: source stores"):
        Offload(device(), KVLayout.uniform(wide, pool(0, 1).placement, Pool(8)))


def test_fault_f11_f13_all_components_come_back_matched_by_layer() -> None:
    """Eight tokens of a model whose layers own an indexer or not, in another order of groups."""
    spec = KVCacheSpec.from_config(
        CONFIG
        | {"num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "full"]}
    )
    src = KVLayout.uniform(spec, Placement.simple(RoundRobin(2)), Paged(4))
    apart = (
        CacheGroup("indexer", spec.select(kind="indexer")[::-1], Pool(1)),
        CacheGroup("latent", spec.select(kind="latent"), Pool(8)),
    )
    tier = KVLayout(spec, src.placement, apart)
    stage = Offload(src, tier)
    assert len(stage.components) == 10
    check_operator(stage, bound_to(src, 8), bound_to(tier, 8), (0, 8))
    check_operator(
        Restore(tier, src, StridedExecutor()), bound_to(tier, 8), bound_to(src, 8), (0, 8)
    )


def test_rank_local_refuses_a_plan_between_ranks() -> None:
    stage = Restore(pool(0, 1), KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(4)),
                    RankLocal())  # fmt: skip
    bound = bind(stage, bound_to(stage.source, 4), bound_to(stage.target, 4), (0, 4))
    with pytest.raises(PlanError, match="the plan moves from rank 1 to rank 0"):
        stage.execute(bound, {}, {})


def test_rank_local_refuses_pages_that_are_not_the_plans_before_a_byte_moves() -> None:
    layout = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(4))
    stage = Offload(layout, layout)
    bound = bind(stage, *(bound_to(layout, 4) for _ in range(2)), (0, 4))
    num = bound.dst.num_blocks
    small = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(2))
    sources = {0: RankCache.allocate(layout, 0, num, fill=1)}
    for target, said in (
        (RankCache.allocate(small, 0, num), r"pages of 2 in the cache of target rank 0"),
        (evolve(RankCache.allocate(layout, 0, num), rank=9), r"target rank 0 is that of rank 9"),
    ):
        with pytest.raises(PlanError, match=said):
            stage.execute(bound, sources, {0: target})
        assert not any(view.memory.any() for view in target.pages.values())


# --- files that are not what was written ----------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """A tier with 20 tokens of two ranks under "k", and a way to read them all back."""
    tier, src, dst = FileTier(tmp_path), device(), pool(0, 1)
    offload = Offload(src, dst, ToFiles(tier, "k"))
    bound = bind(offload, bound_to(src, 20), bound_to(dst, 20), (0, 20))
    caches = {r: RankCache.allocate(src, r, bound.src.num_blocks, fill=r + 1) for r in src.ranks}
    offload.execute(bound, caches, {})

    def read(tokens=(0, 20)) -> dict[int, RankCache]:
        found = tier.find("k")
        back = Restore(found.layout, dst, FromFiles(found, StridedExecutor()))
        targets = {r: RankCache.allocate(dst, r, bound.dst.num_blocks) for r in dst.ranks}
        back.execute(bind(back, found.binding, bound_to(dst, 20), tokens), {}, targets)
        return targets

    read()
    return tier, read, offload, bound, caches


def test_what_is_stored_says_where_it_lies(stored) -> None:
    tier, read, *_ = stored
    found = tier.find("k")
    assert (found.layout, found.tokens) == (pool(0, 1), (0, 20))
    assert set(found.components) == set(SPEC.names)
    assert set(read()[1].pages["latent.0"].memory.tolist()) == {0, 2}


def test_a_key_is_written_once(stored) -> None:
    tier, _, offload, bound, caches = stored
    with pytest.raises(TransferError, match="what is stored under a key does not change"):
        offload.execute(bound, caches, {})
    assert sorted(p.name for p in (tier.directory / "k").iterdir()) == ["rank0.kv", "rank1.kv"]


def test_a_short_file_is_an_error(stored) -> None:
    tier, read, *_ = stored
    path = tier.path("k", 1)
    whole = path.stat().st_size
    for size in (whole - 1, 300, 30, 5, 0):
        os.truncate(path, size)
        with pytest.raises(TransferError, match=r"rank1\.kv"):
            read()


@pytest.mark.parametrize("key", [5, None, b"k"])
def test_a_key_that_is_no_text_is_an_error(stored, key) -> None:
    tier, *_ = stored
    with pytest.raises(TransferError, match=f"the key {key!r} must be a file name"):
        tier.find(key)


def test_a_directory_in_the_place_of_a_file_is_an_error(stored) -> None:
    tier, *_ = stored
    path = tier.path("k", 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(TransferError, match=r"rank1\.kv cannot be read: Is a directory"):
        tier.find("k")


def test_a_file_that_shrinks_behind_its_header_is_an_error(stored) -> None:
    tier, *_ = stored
    found = tier.find("k")
    os.truncate(tier.path("k", 0), tier.path("k", 0).stat().st_size - 1)
    dst = pool(0, 1)
    back = Restore(found.layout, dst, FromFiles(found, StridedExecutor()))
    bound = bind(back, found.binding, bound_to(dst, 20), (0, 20))
    with pytest.raises(TransferError, match=r"rank0\.kv ends at byte \d+, 1 more were expected"):
        back.execute(
            bound, {}, {r: RankCache.allocate(dst, r, bound.dst.num_blocks) for r in (0, 1)}
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [],
        lambda said: said | {"num_blocks": {}},
        lambda said: said | {"num_blocks": 3},
        lambda said: said | {"num_blocks": dict.fromkeys(said["num_blocks"], "a")},
        lambda said: said | {"digests": {}},
        lambda said: said | {"tokens": ["a", 20]},
        lambda said: said | {"components": [[5]]},
        lambda said: said | {"rank": 0.0},
        lambda said: "x" * 5_000,
    ],
)
def test_a_header_that_proves_itself_but_says_nonsense_is_an_error(stored, change) -> None:
    tier, read, *_ = stored
    path = tier.path("k", 0)
    good, fixed = path.read_bytes(), len(MAGIC) + 8
    size = int.from_bytes(good[len(MAGIC) : fixed], "little")
    for text in (json.dumps(change(json.loads(good[fixed : fixed + size]))).encode(), b"\xff"):
        digest = hashlib.blake2b(text, digest_size=16).digest()
        path.write_bytes(MAGIC + len(text).to_bytes(8, "little") + text + digest + good)
        with pytest.raises(TransferError, match="a header of another version"):
            read()


def test_every_flipped_byte_is_noticed(stored) -> None:
    """In the header, between header and blocks nothing counts, in every block that is read."""
    tier, read, *_ = stored
    path = tier.path("k", 0)
    good, before = path.read_bytes(), read()
    refused = 0
    for at in [*range(0, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        try:
            after = read()
        except TransferError:
            refused += 1
            continue
        for rank, cache in after.items():
            for name, view in cache.pages.items():
                assert view.memory.equal(before[rank].pages[name].memory)
    assert refused > 20
    path.write_bytes(good)
    read()


def test_only_blocks_that_a_plan_reads_are_read(stored) -> None:
    tier, read, *_ = stored
    path = tier.path("k", 0)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # of the last block
    read((0, 16))
    with pytest.raises(TransferError, match="block 1 of group 'kv' is not what was written there"):
        read((0, 20))


def test_a_foreign_file_is_an_error(stored) -> None:
    tier, read, *_ = stored
    path, other = tier.path("k", 0), tier.path("k", 1)
    good = path.read_bytes()
    path.write_bytes(b"\x93NUMPY" + bytes(500))
    with pytest.raises(TransferError, match="is no file of this tier: it begins"):
        read()
    path.write_bytes(other.read_bytes())
    with pytest.raises(TransferError, match="holds rank 1 of 'k', not rank 0 of 'k'"):
        read()
    path.unlink()
    with pytest.raises(TransferError, match=r"stored by ranks \[0, 1\], here are \[1\]"):
        read()
    path.write_bytes(good)
    read()
    with pytest.raises(TransferError, match="nothing is stored under 'other'"):
        tier.find("other")
    for key in ("../k", "", ".k", "a/b"):
        with pytest.raises(TransferError, match="must be a file name"):
            tier.find(key)


def test_ranks_that_stored_different_things_are_an_error(stored, tmp_path) -> None:
    tier, _, offload, _, caches = stored
    again = FileTier(tmp_path / "again")
    partial = Offload(offload.source, offload.target, ToFiles(again, "k"))
    src, dst = bound_to(offload.source, 19), bound_to(offload.target, 19)
    partial.execute(bind(partial, src, dst, (0, 19)), caches, {})
    tier.path("k", 1).write_bytes(again.path("k", 1).read_bytes())
    with pytest.raises(
        TransferError, match=r"ranks 0 and 1 differ: \[1\]\[1\] is 20 here, 19 there"
    ):
        tier.find("k")


def test_a_restore_refuses_what_is_not_stored(stored) -> None:
    tier, _, offload, _, caches = stored
    partial = Offload(
        offload.source, offload.target, ToFiles(tier, "part"), SPEC.select(kind="latent")
    )
    src, dst = bound_to(offload.source, 20), bound_to(offload.target, 20)
    partial.execute(bind(partial, src, dst, (8, 20)), caches, {})
    found = tier.find("part")
    assert found.tokens == (8, 20)
    via = FromFiles(found, StridedExecutor())
    targets = {r: RankCache.allocate(dst.layout, r, dst.num_blocks) for r in (0, 1)}
    latents = Restore(found.layout, dst.layout, via, SPEC.select(kind="latent"))
    latents.execute(bind(latents, found.binding, dst, (8, 20)), {}, targets)
    with pytest.raises(PlanError, match=r"reads tokens \(0, 20\), stored are \(8, 20\)"):
        latents.execute(bind(latents, found.binding, dst, (0, 20)), {}, targets)
    whole = Restore(found.layout, dst.layout, via)
    with pytest.raises(PlanError, match=r"reads \['indexer\.0', 'indexer\.2'\], stored are"):
        whole.execute(bind(whole, found.binding, dst, (8, 20)), {}, targets)
    other = Restore(pool(0, 1, block_size=4), dst.layout, via)
    reading = bind(other, bound_to(other.source, 20), dst, (8, 20))
    with pytest.raises(PlanError, match="another layout than is stored: groups"):
        other.execute(reading, {}, targets)


def test_a_segment_stores_its_own_blocks_alone(tmp_path) -> None:
    """The blocks of the prefix are holes."""
    tier, src, dst = FileTier(tmp_path), device(1, 1), pool(0, block_size=4)
    offload = Offload(src, dst, ToFiles(tier, "tail"))
    bound = bind(offload, bound_to(src, 4000), bound_to(dst, 4000), (3900, 4000))
    offload.execute(bound, {0: RankCache.allocate(src, 0, bound.src.num_blocks, 9)}, {})
    held = tier.path("tail", 0).stat()
    assert held.st_size > 1000 * SPEC.block_nbytes(4)
    assert held.st_blocks * 512 < held.st_size / 4


def test_the_law_is_seen_to_fail_for_a_tier(tmp_path) -> None:
    """A byte that changes between the pool and the target, and a shard that is left out."""
    src, tier = device(2, 1), pool(0, 1)
    bound = bound_to(src, 12), bound_to(tier, 12)

    def damaged(both, sources, targets) -> None:
        RankLocal().execute(both, sources, targets)
        targets[1].pages["indexer.2"].memory[-1] ^= 1

    with pytest.raises(LawError, match=r"target rank 1, component indexer\.2"):
        check_operator(Offload(src, tier), *bound, (0, 12), run=damaged)

    def partly(both, sources, targets) -> None:
        RankLocal().execute(both, {0: sources[0]}, {0: targets[0]})

    with pytest.raises(LawError, match="target rank 1, component"):
        check_operator(Offload(src, tier), *bound, (0, 12), run=partly)
