"""Index scores and top-k: against plain arithmetic, in exact order, the same bits in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.models.indexer import first_positions, index_scores, key_tiles, topk_positions


def best(scores: list[float], k: int) -> list[int]:
    """Score descending, then position ascending."""
    return sorted(sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:k])


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(
        st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0]), min_size=9, max_size=9),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(1, 9),
)
def test_topk_with_ties(scores: list[list[float]], k: int) -> None:
    got = topk_positions(torch.tensor(scores), k)
    assert got.tolist() == [best(row, k) for row in scores]


@given(st.lists(st.sampled_from([0.0, 1.0, torch.nan, torch.inf]), min_size=1, max_size=9))
def test_scores_that_are_no_numbers_are_chosen_first(scores):
    k = (len(scores) + 1) // 2
    got = topk_positions(torch.tensor([scores, [0.0] * len(scores)]), k).tolist()
    value = [torch.inf if x != x else x for x in scores]
    assert got == [best(value, k), list(range(k))]


def test_the_oracle_sees_a_wrong_tie() -> None:
    assert best([1.0, 0.0, 0.0], 2) == [0, 1] != [0, 2]


def test_first_positions() -> None:
    got = first_positions(torch.tensor([0, 2, 7]), 4)
    assert got.tolist() == [[0, 0, 0, 0], [0, 1, 2, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [4, 16, 32])
def test_scores(dtype: torch.dtype, heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    keys = torch.randn(700, 32, generator=generator, dtype=dtype)
    queries = torch.randn(9, heads, 32, generator=generator, dtype=dtype)
    weights = torch.randn(9, heads, generator=generator, dtype=dtype)
    positions = torch.tensor([0, 3, 255, 256, 257, 511, 512, 600, 699])
    got = index_scores(queries, weights, key_tiles(keys), positions)
    dots = torch.einsum("mhd,ld->mhl", queries.double(), keys.double()).relu()
    want = torch.einsum("mh,mhl->ml", weights.double(), dots)
    for i, position in enumerate(positions.tolist()):
        seen = slice(0, position + 1)
        torch.testing.assert_close(got[i, seen].double(), want[i, seen], rtol=0, atol=2e-4)
        assert got[i, position + 1 :].eq(-torch.inf).all()
        # The same query alone, against fewer keys: the same bits.
        alone = index_scores(
            queries[i : i + 1].clone(),
            weights[i : i + 1].clone(),
            key_tiles(keys[: position + 1]),
            positions[i : i + 1],
        )
        assert torch.equal(alone[0, seen], got[i, seen])
