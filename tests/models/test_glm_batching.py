"""A token's numbers do not depend on what else is computed with it: bit for bit, in any split of
requests over steps and ranks, in every cache format."""

from functools import cache

import pytest
import torch
from glm_drive import run_group, run_steps
from glm_fixture import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.comm import LocalComm
from kvflow.models import Glm

FORMATS = ["float64", "float32", "bfloat16", "fp8"]
generator = torch.Generator().manual_seed(5)
REQUESTS = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in (41, 3, 24)]


@cache
def load(kv_dtype: str, rank: int = 0, size: int = 1) -> Glm:
    dtype = torch.float64 if kv_dtype == "float64" else torch.float32
    return Glm.load(TINY, kv_dtype=kv_dtype, dtype=dtype, rank=rank, size=size)


@cache
def alone(kv_dtype: str):
    """Each request by itself, its whole prompt in one step, on one rank."""
    hidden, table = {}, {}
    for r, tokens in enumerate(REQUESTS):
        step = [[(r, 0, len(tokens))]]
        out, kv = run_steps(load(kv_dtype), LocalComm(), REQUESTS, step, lambda r, p: 0)
        hidden |= out
        table |= kv.table
    return hidden, table


def agrees(kv_dtype: str, hidden, table) -> None:
    want_hidden, want_table = alone(kv_dtype)
    assert hidden.keys() == want_hidden.keys()
    for key, value in hidden.items():
        assert torch.equal(value, want_hidden[key]), key
    assert table.keys() == want_table.keys()
    for key, value in table.items():
        assert torch.equal(value, want_table[key]), key


@st.composite
def schedules(draw):
    """Steps that bring every request from 0 to its length, each by chunks of its own."""
    done, steps = [0] * len(REQUESTS), []
    while any(d < len(t) for d, t in zip(done, REQUESTS, strict=True)):
        chunks = []
        for r, tokens in enumerate(REQUESTS):
            left = len(tokens) - done[r]
            num = min(left, draw(st.sampled_from([0, 1, 2, 7, 16, 41])))
            if num:
                chunks.append((r, done[r], num))
                done[r] += num
        if not chunks:
            r = next(r for r, t in enumerate(REQUESTS) if done[r] < len(t))
            chunks = [(r, done[r], 1)]
            done[r] += 1
        steps.append(chunks)
    return steps


@pytest.mark.parametrize("kv_dtype", FORMATS)
@settings(max_examples=4, deadline=None)
@given(steps=schedules())
def test_any_schedule_on_one_rank(kv_dtype, steps) -> None:
    hidden, kv = run_steps(load(kv_dtype), LocalComm(), REQUESTS, steps, lambda r, p: 0)
    agrees(kv_dtype, hidden, kv.table)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@settings(max_examples=4, deadline=None)
@given(steps=schedules(), size=st.integers(2, 4), seed=st.integers(0, 2**16))
def test_any_rows_on_any_rank(kv_dtype, steps, size, seed) -> None:
    """Rows are dealt to ranks at random, so some ranks have none in a step; every rank ends with
    the same cache and makes the same calls."""

    def owner(r: int, p: int) -> int:
        return (seed * 7919 + r * 104729 + (p // 3) * 15485863) % 1009 % size

    hidden, caches, traces = run_group(
        lambda rank, n: load(kv_dtype, rank, n), size, REQUESTS, steps, owner
    )
    for kv in caches:
        agrees(kv_dtype, hidden, kv.table)
    assert all(trace == traces[0] for trace in traces)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_short_steps_make_the_same_calls_on_every_rank(num_tokens: int) -> None:
    """Fault A01: with fewer tokens than ranks, and a rank with none, nobody hangs."""
    steps = [[(0, 0, num_tokens)], [(0, num_tokens, 2), (2, 0, 9)]]
    _, _, traces = run_group(
        lambda rank, n: load("float32", rank, n), 4, REQUESTS, steps, lambda r, p: p % 4
    )
    assert traces[0]
    assert all(trace == traces[0] for trace in traces)


def test_a_planted_difference_is_seen() -> None:
    hidden, kv = run_steps(
        load("fp8"), LocalComm(), REQUESTS, [[(r, 0, len(REQUESTS[r]))] for r in range(3)],
        lambda r, p: 0,
    )  # fmt: skip
    key = ("latent.4", 0, 40)
    kv.table[key] = kv.table[key].clone()
    kv.table[key][0] ^= 1
    with pytest.raises(AssertionError):
        agrees("fp8", hidden, kv.table)
