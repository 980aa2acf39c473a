"""What the benchmarks make of choices that overlap."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from context_gather import PLENTY, counts
from selection_curves import (
    INDEPENDENT,
    Overlap,
    auto,
    crossover,
    rank_nbytes,
    union_rows,
    whole_is_less,
)


def balanced(new: int, ranks: int) -> list[int]:
    """The rank of each new token, chunk by chunk: g has chunks g and 2 * ranks - 1 - g."""
    size = [new // (2 * ranks) + (k < new % (2 * ranks)) for k in range(2 * ranks)]
    return [min(k, 2 * ranks - 1 - k) for k in range(2 * ranks) for _ in range(size[k])]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(0, 99))
def test_a_union_counts_each_cached_row_once_a_rank(new, cached, ranks, seed):
    if new % (2 * ranks):
        new += 2 * ranks - new % (2 * ranks)  # whom a remainder falls to is not at issue here
    chosen = np.random.default_rng(seed).integers(0, cached + new, (cached + new, 5))
    rows = {
        (rank, position)
        for rank, query in zip(balanced(new, ranks), range(cached, cached + new), strict=True)
        for position in chosen[query].tolist()
        if position < cached
    }
    assert union_rows(chosen, new, cached, ranks) == len(rows)


def test_independent_choices_have_ratio_one_and_equal_ones_the_least():
    rng, new, cached, topk = np.random.default_rng(1), 128, 2048, 64
    length = cached + new
    each = np.array([rng.choice(length, topk, replace=False) for _ in range(length)])
    alone = counts(new, cached, 8).union(topk)
    assert union_rows(each, new, cached, 8) / alone == pytest.approx(1, abs=0.02)
    same = np.tile(np.arange(topk), (length, 1))
    assert union_rows(same, new, cached, 8) == 8 * topk


def test_between_what_was_measured_ratios_are_linear_in_logarithms():
    overlap = Overlap({8.0: [(2, 0.8), (8, 0.4)], 32.0: [(2, 1.0)]})
    assert overlap.at(8, 4) == pytest.approx(0.6)
    assert overlap.at(16, 4) == pytest.approx((0.6 + 1.0) / 2)


def test_outside_what_was_measured_the_nearest_ratio_holds():
    overlap = Overlap({8.0: [(2, 0.8), (8, 0.4)], 32.0: [(2, 1.0)]})
    assert overlap.at(1, 1) == overlap.at(8, 2) == 0.8
    assert overlap.at(8, 512) == 0.4
    assert overlap.at(1000, 512) == 1.0


def test_bytes_by_hand():
    """8 new tokens on 65,528: one query a rank, which chooses 2,048 of 65,536."""
    ways = rank_nbytes(8, 65528, INDEPENDENT)
    assert ways["whole"] == pytest.approx(7 / 8 * 65528 * 656)
    assert ways["union"] == pytest.approx(65528 / 32 * 7 / 8 * (656 + 4 * 21 / 78))
    half = rank_nbytes(8, 65528, Overlap({1.0: [(1.0, 0.5)]}))
    assert half == {**ways, "union": ways["union"] / 2}


def test_unions_in_parts_fetch_again_what_they_share():
    """1,024 queries of a rank in 8 parts of 128: each part's union is as large as one of 128."""
    one, parts = (rank_nbytes(8192, 1 << 20, INDEPENDENT, w)["union"] for w in (PLENTY, 1 << 18))
    stop = (1 << 20) + 8192
    share = 7 / 8 * (1 << 20) * (656 + 4 * 21 / 78)
    assert one == pytest.approx(share * (1 - (1 - 2048 / stop) ** 1024))
    assert parts == pytest.approx(8 * share * (1 - (1 - 2048 / stop) ** 128))


def test_the_longest_context_for_which_something_holds():
    assert crossover(lambda cached: cached <= 5000) == round(2 ** (98 / 8))
    assert crossover(lambda cached: False) is None


def test_where_whole_contexts_move_less():
    """Independent queries choose all but a thousandth of a short context; the price of an exchange
    of positions, which bytes do not show, moves the cost model's border up."""
    border = crossover(whole_is_less(64, INDEPENDENT))
    assert border is not None
    assert auto(64, border) == "whole"
    assert crossover(whole_is_less(64, Overlap({1.0: [(1.0, 0.9)]}))) is None
