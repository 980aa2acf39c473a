"""Every sharding against tokens dealt one by one, and the values that are known by heart."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.sharding import ANY_STOP, Replicated, RoundRobin, Sharding, as_ints
from kvflow.testing import deal, shardings, token_ranges


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Sharding, int, int]:
    tokens = draw(token_ranges())
    return draw(shardings(tokens)), *tokens


@given(dealt())
def test_owner_local_and_token_are_the_dealt_hands(drawn: tuple[Sharding, int, int]) -> None:
    sharding, _, stop = drawn
    hands = deal(sharding, stop)
    assert len(hands) == sharding.num_shards
    for shard, hand in enumerate(hands):
        places = range(len(hand))
        assert sharding.owner(hand).tolist() == [shard] * len(hand)
        assert sharding.local(hand).tolist() == list(places)
        assert sharding.token(shard, places).tolist() == hand
        assert sharding.token([shard] * len(hand), list(places)).tolist() == hand
    for answer in (sharding.owner([]), sharding.local([]), sharding.token([], [])):
        assert answer.dtype == np.int64
        assert answer.shape == (0,)


@given(dealt())
def test_local_len_counts_every_hand_at_every_length(drawn: tuple[Sharding, int, int]) -> None:
    sharding, _, stop = drawn
    shards = range(sharding.num_shards)
    for length in range(sharding.start, stop + 1):
        counts = sharding.local_len(length, shards)
        assert counts.dtype == np.int64
        assert counts.tolist() == [len(hand) for hand in deal(sharding, length)]
        assert int(counts.sum()) == length - sharding.start
        assert int(sharding.local_len(length, sharding.num_shards - 1)) == counts[-1]


@given(dealt())
def test_runs_cover_the_range_in_the_order_of_each_hand(drawn: tuple[Sharding, int, int]) -> None:
    sharding, start, stop = drawn
    runs, hands = sharding.runs(start, stop), deal(sharding, stop)
    told: list[list[tuple[int, int]]] = [[] for _ in hands]
    previous = -1
    for i in range(len(runs)):
        assert runs.shard[i] >= previous
        assert runs.count[i] >= 1
        previous = int(runs.shard[i])
        for k in range(int(runs.count[i])):
            told[previous].append((runs.token[i] + k * runs.stride[i], runs.local[i] + k))
    assert told == [[(t, i) for i, t in enumerate(hand) if t >= start] for hand in hands]


@given(dealt())
def test_runs_are_few(drawn: tuple[Sharding, int, int]) -> None:
    sharding, start, stop = drawn
    most = {
        BalancedChunks: 2 * sharding.num_shards,
        Contiguous: sharding.num_shards,
        Replicated: 1,
        RoundRobin: sharding.num_shards,
    }[type(sharding)]
    if isinstance(sharding, RoundRobin) and sharding.interleave > 1:
        most = 1 if sharding.num_shards == 1 else (stop - start) // sharding.interleave + 2
    assert len(sharding.runs(start, stop)) <= min(most, stop - start)


SMALL = [
    *(RoundRobin(n, i) for n in (1, 2, 3) for i in (1, 2, 3)),
    Replicated(), Replicated(2, 9), Contiguous(1, 0, 9), Contiguous(3, 2, 9), Contiguous(4, 1, 3),
    BalancedChunks(1, 2, 9), BalancedChunks(2, 0, 11), BalancedChunks(3, 2, 10, rotate=2),
    BalancedChunks(2, 1, 10, "ceil"), BalancedChunks(3, 0, 2, "ceil"),
]  # fmt: skip


def fewest_runs(sharding: Sharding, start: int, stop: int) -> int:
    """What the docstrings of `runs` promise, counted position by position."""
    t = range(start, stop)
    if isinstance(sharding, Replicated):
        return len({0 for _ in t})
    if isinstance(sharding, RoundRobin):
        if sharding.num_shards == 1:
            return len({0 for _ in t})
        if sharding.interleave == 1:
            return len({p % sharding.num_shards for p in t})
        return len({p // sharding.interleave for p in t})
    chunks = list(pairwise(sharding.edges.tolist()))  # type: ignore[attr-defined]
    return sum(any(low <= p < high for p in t) for low, high in chunks)


@pytest.mark.parametrize("sharding", SMALL, ids=str)
def test_every_short_range_has_the_runs_of_its_hands(sharding: Sharding) -> None:
    last = min(sharding.stop, 13)
    for start in range(sharding.start, last + 1):
        for stop in range(start, last + 1):
            runs, hands = sharding.runs(start, stop), deal(sharding, stop)
            told = [
                (int(s), int(t) + k * int(m), int(j) + k)
                for s, t, m, j, n in zip(
                    runs.shard, runs.token, runs.stride, runs.local, runs.count, strict=True
                )
                for k in range(n)
            ]
            assert told == [
                (s, t, i) for s, hand in enumerate(hands) for i, t in enumerate(hand) if t >= start
            ]
            assert len(runs) == fewest_runs(sharding, start, stop)


@pytest.mark.parametrize("sharding", SMALL, ids=str)
def test_borders_of_short_ranges_are_needed_and_enough(sharding: Sharding) -> None:
    """Without a border the step from t to t + stride keeps the shard and one slope; a border that
    stride 1 names is one where the hand changes."""
    last = min(sharding.stop, 13)
    where = {t: (s, i) for s, h in enumerate(deal(sharding, last)) for i, t in enumerate(h)}
    for start in range(sharding.start, last + 1):
        changes = [t for t in range(start + 1, last) if where[t][0] != where[t - 1][0]]
        jumps = [t for t in range(start + 1, last) if where[t][1] != where[t - 1][1] + 1]
        told = sharding.borders(start, last, 1).tolist()
        assert set(told) >= set(changes) | set(jumps)
        if not isinstance(sharding, BalancedChunks | Contiguous):
            assert told == sorted(set(changes) | set(jumps))
        else:
            assert told == sorted({e for e in sharding.edges.tolist() if start < e < last})


@given(dealt(), st.integers(1, 40))
def test_between_borders_a_progression_is_regular(
    drawn: tuple[Sharding, int, int], stride: int
) -> None:
    sharding, start, stop = drawn
    borders = sharding.borders(start, stop, stride).tolist()
    assert borders == sorted(set(borders))
    assert all(start < b < stop for b in borders)
    edges = [start, *borders, stop]
    where = {t: (s, i) for s, h in enumerate(deal(sharding, stop)) for i, t in enumerate(h)}
    for low, high in pairwise(edges):
        for first in range(low, min(low + stride, high)):
            places = [where[t] for t in range(first, high, stride)]
            assert len({shard for shard, _ in places}) == 1
            slopes = {b - a for (_, a), (_, b) in pairwise(places)}
            assert len(slopes) <= 1


@given(dealt(), st.integers(1, 4))
def test_at_a_multiple_of_the_period_only_fixed_borders_remain(
    drawn: tuple[Sharding, int, int], times: int
) -> None:
    sharding, start, stop = drawn
    assert sharding.period >= 1
    fixed = sharding.borders(start, stop, times * sharding.period).tolist()
    if isinstance(sharding, BalancedChunks | Contiguous):
        edges = set(sharding.edges.tolist())
        assert fixed == sorted(e for e in edges if start < e < stop)
    else:
        assert fixed == []


def test_period_of_each_sharding() -> None:
    assert RoundRobin(1, 16).period == 1
    assert RoundRobin(4, 16).period == 64
    assert RoundRobin(2, 1).period == 2
    assert Replicated().period == Contiguous(3, 0, 9).period == BalancedChunks(3, 0, 9).period == 1
    assert isinstance(RoundRobin(4), Sharding)
    assert not isinstance(4, Sharding)


def test_the_longest_round_is_the_whole_domain() -> None:
    assert RoundRobin(2**31, 2**31).period == ANY_STOP
    with pytest.raises(LayoutError, match="deals rounds of more than"):
        RoundRobin(2**31, 2**31 + 1)


def test_defaults_deal_from_position_zero() -> None:
    assert RoundRobin(3) == RoundRobin(3, 1)
    assert Replicated() == Replicated(0, ANY_STOP)
    assert BalancedChunks(2, stop=4) == BalancedChunks(2, 0, 4, "even", 0)
    assert Contiguous(2, stop=4) == Contiguous(2, 0, 4)
    assert BalancedChunks(2) == BalancedChunks(2, 0, 0)
    assert Contiguous(2) == Contiguous(2, 0, 0)


def test_the_end_of_an_unbounded_domain_leaves_room_in_int64() -> None:
    last = ANY_STOP - 1
    assert ANY_STOP == 2**62
    assert int(RoundRobin(2, 4).owner(last)) == last // 4 % 2
    assert int(RoundRobin(2, 4).local(last)) == last // 8 * 4 + last % 4
    assert int(Replicated().local(last)) == last
    assert int(Replicated().local_len(ANY_STOP, 0)) == ANY_STOP


def test_golden_round_robin_places() -> None:
    for interleave, t, rank, local in [(1, 9, 1, 1), (64, 64, 1, 0), (64, 512, 0, 64)]:
        deal_ = RoundRobin(8, interleave)
        assert (int(deal_.owner(t)), int(deal_.local(t))) == (rank, local)
    assert (int(RoundRobin(8, 16).owner(200)), int(RoundRobin(8, 16).local(200))) == (4, 24)


@pytest.mark.parametrize(
    ("num_ranks", "interleave", "length", "lens"),
    [
        (8, 1, 1000, [125] * 8),
        (8, 64, 1000, [128] * 7 + [104]),
        (4, 16, 17, [16, 1, 0, 0]),
        (4, 64, 130, [64, 64, 2, 0]),
        (4, 4, 20, [8, 4, 4, 4]),
        (8, 1, 3, [1, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_golden_round_robin_lengths(
    num_ranks: int, interleave: int, length: int, lens: list[int]
) -> None:
    assert RoundRobin(num_ranks, interleave).local_len(length, range(num_ranks)).tolist() == lens


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 3000), st.integers(1, 64))
def test_rank_zero_is_fullest_and_a_rank_stores_few_more_than_its_part(
    num_ranks: int, interleave: int, length: int, block_size: int
) -> None:
    lens = RoundRobin(num_ranks, interleave).local_len(length, range(num_ranks))
    assert lens[0] == lens.max()
    stored = -(-lens // block_size) * block_size
    assert (stored < length / num_ranks + interleave + block_size).all()


def test_golden_ceil_form_of_vllm() -> None:
    assert BalancedChunks(8, 0, 33, "ceil").local_len(33, range(8)).tolist() == [3] * 5 + [6] * 3
    loads = sum(BalancedChunks(8, 0, 1, "ceil").local_len(1, range(8)) for _ in range(8))
    assert loads.tolist() == [8, 0, 0, 0, 0, 0, 0, 0]
    assert BalancedChunks(2, 0, 2, "ceil").local_len(2, range(2)).tolist() == [1, 1]


def test_golden_largest_step_that_leaves_a_chunk_empty_in_ceil_form() -> None:
    """vLLM replicates a prefill when a chunk would be empty: the largest such q is (2P-1)^2."""
    empty = [
        q for q in range(1, 400) if (np.diff(BalancedChunks(8, 0, q, "ceil").edges) == 0).any()
    ]
    assert max(empty) == 225 == (2 * 8 - 1) ** 2
    assert sorted(set(range(1, 226)) - set(empty)), "the set is not an interval"
    assert empty == [q for q in range(1, 400) if 15 * -(-q // 16) >= q]


@given(st.integers(1, 9), st.integers(0, 500), st.integers(0, 300), st.integers(0, 30))
def test_even_form_balances_chunks_and_shards(
    num_ranks: int, start: int, q: int, rotate: int
) -> None:
    sharding = BalancedChunks(num_ranks, start, start + q, rotate=rotate)
    sizes, lens = np.diff(sharding.edges), sharding.local_len(start + q, range(num_ranks))
    assert sizes.max() - sizes.min() <= 1
    assert lens.max() - lens.min() <= 1
    assert sharding.edges[0] == start
    assert sharding.edges[-1] == start + q


@given(st.integers(1, 8), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_a_step_of_several_requests_is_balanced_by_rotation(
    num_ranks: int, lengths: list[int]
) -> None:
    """Rotating by the tokens before a request keeps the whole step within 1 token, so max/mean
    is at most 1.1 from 16 tokens a rank on, and max - min at most 2 below."""
    loads, before = np.zeros(num_ranks, np.int64), 0
    for q in lengths:
        sharding = BalancedChunks(num_ranks, 100, 100 + q, rotate=before)
        loads += sharding.local_len(100 + q, range(num_ranks))
        before += q
    assert loads.sum() == before
    assert loads.max() - loads.min() <= 1
    if before >= 16 * num_ranks:
        assert loads.max() <= 1.1 * loads.mean()


def test_causal_work_of_balanced_chunks_is_balanced() -> None:
    sharding = BalancedChunks(8, 0, 4096)
    work = [sum(t + 1 for t in hand) for hand in deal(sharding, 4096)]
    assert max(work) / min(work) < 1.001


def test_positions_are_exact_far_beyond_32_bits() -> None:
    far = 2**40 + 12345
    deal_ = RoundRobin(7, 3)
    shard, local = deal_.owner(far), deal_.local(far)
    assert int(shard) == far // 3 % 7
    assert int(local) == far // 21 * 3 + far % 3
    assert int(deal_.token(shard, local)) == far
    assert int(Replicated(5).local(far)) == far - 5
    assert int(BalancedChunks(4, far, far + 40).token(3, 9)) == far + 24


def test_text_forms() -> None:
    assert str(RoundRobin(8, 64)) == "round_robin(8,i=64)"
    assert str(Replicated()) == "replicated(0:)"
    assert str(Replicated(3, 9)) == "replicated(3:9)"
    assert str(BalancedChunks(4, 2, 10)) == "balanced(4,2:10)"
    assert str(BalancedChunks(4, 2, 10, "ceil", 3)) == "balanced(4,2:10,ceil,rotate=3)"
    assert str(Contiguous(2, 0, 5)) == "contiguous(2,0:5)"


@pytest.mark.parametrize(
    "sharding",
    [
        RoundRobin(3, 2), RoundRobin(3, 1), RoundRobin(1, 4), Replicated(0, 12),
        Contiguous(3, 0, 12), BalancedChunks(3, 0, 12),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_exist_is_refused_with_both_numbers(sharding: Sharding) -> None:
    last = sharding.num_shards
    with pytest.raises(LayoutError, match=r"position -1 is outside \[0, "):
        sharding.owner([0, -1])
    with pytest.raises(LayoutError, match=r"position -1 is outside"):
        sharding.local(-1)
    with pytest.raises(LayoutError, match=rf"shard {last} does not exist, .* has {last}"):
        sharding.token(last, 0)
    with pytest.raises(LayoutError, match="shard -1 does not exist"):
        sharding.local_len(4, [0, -1])
    with pytest.raises(LayoutError, match=rf"tokens \[{5}, {4}\) are not a range inside"):
        sharding.runs(5, 4)
    with pytest.raises(LayoutError, match=r"tokens \[-1, 4\)"):
        sharding.borders(-1, 4, 1)
    with pytest.raises(LayoutError, match=r"tokens \[0, -1\)"):
        sharding.local_len(-1, 0)
    with pytest.raises(LayoutError, match="local index -1 "):
        sharding.token(0, [0, -1, 1])
    with pytest.raises(LayoutError, match=r"tokens \[5, 4\)"):
        sharding.borders(5, 4, 1)
    with pytest.raises(LayoutError, match="expected integers, got an array of float64"):
        sharding.owner([0.5])


@pytest.mark.parametrize(
    "sharding", [Replicated(2, 12), Contiguous(3, 2, 12), BalancedChunks(3, 2, 12)], ids=str
)
def test_a_bounded_domain_ends(sharding: Sharding) -> None:
    for position in (1, 12):
        with pytest.raises(LayoutError, match=rf"position {position} is outside \[2, 12\)"):
            sharding.owner(position)
    assert sharding.owner([2, 11]).shape == (2,)
    full = int(sharding.local_len(12, 0))
    assert 2 <= int(sharding.token(0, full - 1)) < 12
    with pytest.raises(LayoutError, match=rf"local index {full} .*outside \[0, {full}\)"):
        sharding.token(0, [0, full, full + 3, -1])
    for start, stop in ((2, 13), (1, 12)):
        with pytest.raises(LayoutError, match=r"inside \[2, 12\)"):
            sharding.runs(start, stop)


def test_constructors_refuse_what_is_not_lawful() -> None:
    for bad in (0, -1):
        with pytest.raises(LayoutError, match=rf"RoundRobin.num_shards = {bad}, must be at least"):
            RoundRobin(bad)
        with pytest.raises(LayoutError, match=rf"RoundRobin.interleave = {bad}"):
            RoundRobin(2, bad)
        with pytest.raises(LayoutError, match=rf"BalancedChunks.num_shards = {bad}"):
            BalancedChunks(bad, 0, 4)
        with pytest.raises(LayoutError, match=rf"Contiguous.num_shards = {bad}"):
            Contiguous(bad, 0, 4)
    for kind in (
        lambda a, b: BalancedChunks(2, a, b),
        lambda a, b: Contiguous(2, a, b),
        Replicated,
    ):
        with pytest.raises(LayoutError, match=r"over \[4, 3\): needs 0 <= start <= stop"):
            kind(4, 3)
        with pytest.raises(LayoutError, match=r"over \[-1, 3\)"):
            kind(-1, 3)
        with pytest.raises(LayoutError):
            kind(0, ANY_STOP + 1)
        assert kind(3, 3).stop == kind(0, 3).stop
    for unbounded in (lambda: BalancedChunks(2, 0, ANY_STOP), lambda: Contiguous(2, 0, ANY_STOP)):
        with pytest.raises(LayoutError, match="bounded interval, stop is missing"):
            unbounded()
    with pytest.raises(LayoutError, match="form 'odd', must be 'even' or 'ceil'"):
        BalancedChunks(2, 0, 4, "odd")  # type: ignore[arg-type]


def test_integers_of_any_width_are_taken_and_nothing_else() -> None:
    assert as_ints(np.array([1, 2], np.uint8)).dtype == np.int64
    assert as_ints(np.array([1], np.int32)).tolist() == [1]
    assert as_ints([]).dtype == np.int64
    with pytest.raises(LayoutError, match="bool"):
        as_ints([True])
    assert as_ints(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]
    for wide in ([2**63], [1, 2**63 + 5]):
        with pytest.raises(LayoutError, match=rf"below 2\*\*63, got {max(wide)}"):
            as_ints(np.array(wide, np.uint64))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("q", [0, 1, 2])
def test_fault_a04_chunks_beyond_the_end_are_empty(num_ranks: int, q: int) -> None:
    for form in ("even", "ceil"):
        sharding = BalancedChunks(num_ranks, 0, q, form)  # type: ignore[arg-type]
        assert int(sharding.local_len(q, range(num_ranks)).sum()) == q
        assert (np.diff(sharding.edges) >= 0).all()
        assert int(sharding.edges.max()) == q
        assert sorted(sharding.runs(0, q).token.tolist()) == list(range(q))


def test_fault_a10_empty_ranks_hold_nothing_and_one_rank_never_is() -> None:
    for prompt, lens in [(1, [1, 0, 0, 0]), (15, [15, 0, 0, 0]), (16, [16, 0, 0, 0]),
                         (17, [16, 1, 0, 0]), (48, [16, 16, 16, 0])]:  # fmt: skip
        sharding = RoundRobin(4, 16)
        assert sharding.local_len(prompt, range(4)).tolist() == lens
        assert set(sharding.runs(0, prompt).shard.tolist()) == {r for r, n in enumerate(lens) if n}
        assert max(lens) > 0


@pytest.mark.parametrize("interleave", [1, 4, 16, 64])
def test_fault_a17_round_trip_is_the_identity_for_any_interleave(interleave: int) -> None:
    sharding, block = RoundRobin(4, interleave), 16
    t = np.arange(131)
    rank, local = sharding.owner(t), sharding.local(t)
    entry, row = local // block, local % block
    assert sharding.token(rank, entry * block + row).tolist() == t.tolist()
    if interleave == 1:
        assert rank.tolist() == (t % 4).tolist()
        assert local.tolist() == (t // 4).tolist()
    if interleave == 64:
        assert sharding.local_len(130, range(4)).tolist() == [64, 64, 2, 0]


def test_fault_a21_gathered_row_i_carries_position_i() -> None:
    for sharding in (Contiguous(4, 0, 16), BalancedChunks(4, 0, 16), RoundRobin(4, 1)):
        hands = deal(sharding, 16)
        gathered = np.concatenate([np.array(h) for h in hands])  # rank order, as a gather yields
        first = np.cumsum([0, *map(len, hands)])
        t = np.arange(16)
        assert gathered[first[sharding.owner(t)] + sharding.local(t)].tolist() == t.tolist()


def test_fault_c16_zero_owned_chunk_and_partial_pages() -> None:
    assert RoundRobin(8, 1).local_len(3, range(8)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert RoundRobin(2, 64).local_len(65, range(2)).tolist() == [64, 1]
    assert RoundRobin(4, 64).local_len(130, range(4)).tolist() == [64, 64, 2, 0]
