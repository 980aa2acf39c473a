"""Choosing part by part equals choosing at once, bit for bit, ties included; parts of attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.kernels.codec import encode_index_key, encode_latent
from kvflow.layouts.record import index_record, latent_record
from kvflow.models.candidates import Candidates, Keys, candidates, merged
from kvflow.models.indexer import KEY_TILE, index_scores, key_tiles
from kvflow.models.partial import attend_part, attend_rows, groups_of
from kvflow.transfers.operators.merge import merge_partials


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "dim"), [(8, 32), (32, 128), (3, 8)])
def test_a_score_has_the_same_bits_in_every_column(dtype, heads, dim):
    """Of 1,000 keys in two orders, scored by one query and by many."""
    g = torch.Generator().manual_seed(3)
    keys, queries, weights = (
        torch.randn(*shape, dtype=dtype, generator=g)
        for shape in ((1000, dim), (9, heads, dim), (9, heads))
    )
    order, last = torch.randperm(1000, generator=g), torch.full((9,), 999)
    one = index_scores(queries, weights, key_tiles(keys), last)[:, :1000]
    other = index_scores(queries, weights, key_tiles(keys[order]), last)[:, :1000]
    assert torch.equal(one[:, order], other)
    alone = index_scores(queries[4:5], weights[4:5], key_tiles(keys[order]), last[:1])[:, :1000]
    assert torch.equal(alone[0], other[4])
    assert KEY_TILE % 48 == 0


@st.composite
def choices(draw):
    """Keys of small integers, so that equal scores are many, dealt to parts; and queries."""
    num, k = draw(st.integers(1, 60)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 1 << 30))
    part = [draw(st.integers(0, 3)) for _ in range(num)]
    positions = sorted(draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=6, unique=True)))
    return num, k, seed, part, positions


@given(choices())
def test_candidates_of_parts_merge_to_the_choice_of_all(drawn):
    num, k, seed, part, positions = drawn
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(-2, 3, (num, 4), generator=g).double()
    queries = torch.randint(-2, 3, (len(positions), 2, 4), generator=g).double()
    weights = torch.randint(-2, 3, (len(positions), 2), generator=g).double()
    record, at = index_record("float64", index_dim=4), torch.tensor(positions)
    packed, where, parts = encode_index_key(record, keys), torch.tensor(part), []
    for i in where.unique():
        held = torch.argwhere(where == i).flatten()
        some = Keys.decode(record, packed[held], held, torch.float64)
        parts.append(candidates(some, queries, weights, at, k))
    both = merged(parts, k)
    step = merged([merged(parts[:2], k), *parts[2:]], k)
    for row, position in enumerate(positions):
        scores = {
            t: float(weights[row] @ (queries[row] @ keys[t]).clamp(min=0))
            for t in range(position + 1)
        }
        best = sorted(sorted(scores, key=lambda t: (-scores[t], t))[:k])
        for found in (both, step):
            assert isinstance(found, Candidates)
            real = found.scores[row] > -torch.inf
            assert found.positions[row][real].tolist() == best


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(0, 1 << 30))
def test_parts_of_attention_merge_to_the_whole(counts, seed):
    """Each query over its own rows, dealt to three shards at random."""
    g = torch.Generator().manual_seed(seed)
    record, topk = latent_record("float64", latent_rank=6, rope_dim=2), 20
    rows = torch.randn(40, 8, dtype=torch.float64, generator=g)
    packed = encode_latent(record, rows[:, :6].contiguous(), rows[:, 6:].contiguous())
    queries = torch.randn(len(counts), 3, 8, dtype=torch.float64, generator=g)
    chosen = [torch.randperm(40, generator=g)[:n].sort().values for n in counts]
    shard, parts = torch.randint(0, 3, (40,), generator=g), []
    for s in range(3):
        mine = [c[shard[c] == s] for c in chosen]
        held = torch.tensor([len(c) for c in mine])
        parts.append(attend_part(record, packed, queries, torch.cat(mine), held, topk))
    whole = merge_partials(parts)
    for i, c in enumerate(chosen):
        if len(c) == 0:
            assert not whole.out[i].any()
            continue
        weights = torch.softmax(rows[c] @ queries[i].T, 0)
        assert torch.allclose(whole.out[i], weights.T @ rows[c, :6], rtol=1e-12, atol=1e-12)
        index = torch.zeros(1, 20, dtype=torch.int64)
        index[0, : len(c)] = c
        groups = groups_of(index, torch.tensor([len(c)]), topk)
        alone = attend_rows(record, packed, queries[i : i + 1], groups)
        assert torch.allclose(alone[0], whole.out[i], rtol=1e-12, atol=1e-12)
