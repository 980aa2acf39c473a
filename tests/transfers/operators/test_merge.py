"""The merge of partial attention equals one softmax over the union of the shards."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stages import problems

from kvflow.comm import LocalComm, ThreadComm, ThreadGroup
from kvflow.errors import LayoutError
from kvflow.testing import Attention, LawError, check_reduce_scatter, scatter_on_threads
from kvflow.transfers.operators import PartialAttention, ReduceScatter, merge_partials
from kvflow.transfers.operators.elementary import exponential, logarithm

BASES = st.sampled_from(["e", "2"])
DTYPES = st.sampled_from([torch.float64, torch.float32])


@given(problem=problems(), axis=st.sampled_from(["head", "token"]), base=BASES, dtype=DTYPES,
       data=st.data())  # fmt: skip
def test_reduce_scatter_keeps_the_law_on_threads(problem, axis, base, dtype, data) -> None:
    left = problem.scores.shape[1 if axis == "head" else 0]
    counts = []
    for _ in range(problem.size - 1):
        counts.append(data.draw(st.integers(0, left)))
        left -= counts[-1]
    counts = (*counts, left)
    scatter = scatter_on_threads(lambda comm: ReduceScatter(comm, axis, counts, base))
    check_reduce_scatter(scatter, problem, axis, counts, base=base, dtype=dtype)


@given(problem=problems(size=1), base=BASES)
def test_reduce_scatter_of_a_group_of_one(problem: Attention, base: str) -> None:
    stage = ReduceScatter(LocalComm(), "head", (problem.scores.shape[1],), base)
    scatter = lambda parts: [stage.execute(parts[0])]  # noqa: E731
    check_reduce_scatter(scatter, problem, "head", stage.counts, base=base)


@given(problem=problems(), base=BASES, dtype=DTYPES, data=st.data())
def test_empty_shards_are_the_identity_bit_for_bit(problem, base, dtype, data) -> None:
    parts = [problem.partial(s, base, dtype) for s in range(problem.size)]
    empty = problem.partial(problem.size, base, dtype)
    assert bool(empty.out.isnan().all()), "what an empty shard holds is never read"
    at = data.draw(st.integers(0, len(parts)))
    one, two = merge_partials(parts), merge_partials([*parts[:at], empty, *parts[at:]])
    assert torch.equal(one.out, two.out)
    assert torch.equal(one.lse, two.lse)
    held = [s for s in range(problem.size) if bool((problem.shard == s).any())]
    if len(held) == 1:
        assert torch.equal(one.out, parts[held[0]].out)
        assert torch.equal(one.lse, parts[held[0]].lse)


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 48])
def test_fault_a10_empty_ranks_give_zero_and_minus_infinity(prompt: int) -> None:
    """DCP=4, block 16, dealt by blocks."""
    noise = torch.Generator().manual_seed(prompt)
    scores = torch.randn(2, 3, prompt, generator=noise, dtype=torch.float64)
    values = torch.randn(prompt, 3, 4, generator=noise, dtype=torch.float64)
    problem = Attention(scores, values, torch.arange(prompt) // 16 % 4, 4)
    assert bool((problem.partial(3, "e", torch.float64).lse == -math.inf).all())
    scatter = scatter_on_threads(lambda comm: ReduceScatter(comm, "head", (1, 1, 1, 0), "e"))
    check_reduce_scatter(scatter, problem, "head", (1, 1, 1, 0))


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fault_a11_a23_rows_without_tokens_give_zeros_and_no_nan(base: str, dtype) -> None:
    """A batch with context lengths 0, 5, 0 on four ranks, of which one is empty altogether."""
    lse = torch.full((3, 2), -math.inf, dtype=dtype)
    lse[1] = torch.tensor([0.5, -2.0], dtype=dtype)
    out = torch.full((3, 2, 4), math.nan, dtype=dtype)
    out[1] = 7.0
    nothing = PartialAttention(
        torch.full_like(out, math.nan), torch.full_like(lse, -math.inf), base
    )
    merged = merge_partials([nothing, PartialAttention(out, lse, base), nothing, nothing])
    assert torch.equal(merged.out[1], out[1])
    assert torch.equal(merged.lse, lse)
    assert not merged.out[::2].any()


def test_a_nan_stays_visible_and_in_its_row() -> None:
    lse = torch.tensor([[0.0], [math.nan]])
    parts = [PartialAttention(torch.ones(2, 1, 1), lse, "e"), PartialAttention(
        torch.ones(2, 1, 1), torch.zeros(2, 1), "e")]  # fmt: skip
    merged = merge_partials(parts)
    assert merged.out[0].item() == 1.0
    assert merged.lse[0].item() == pytest.approx(math.log(2))
    assert merged.out[1].isnan()
    assert merged.lse[1].isnan()


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_lse_that_is_none_spoils_its_row_and_no_other(base: str, bad: float) -> None:
    out = torch.ones(3, 2, 4, dtype=torch.float64)
    lse = torch.zeros(3, 2, dtype=torch.float64)
    spoiled = lse.clone()
    spoiled[1, 0] = bad
    good = PartialAttention(out, lse, base)
    for parts in ([PartialAttention(out, spoiled, base), good], [good] * 2):
        merged = merge_partials(parts)
        want = torch.zeros(3, 2, dtype=torch.bool)
        want[1, 0] = parts[0] is not good
        assert torch.equal(merged.lse.isnan(), want)
        assert torch.equal(merged.out.isnan(), want[..., None].expand(3, 2, 4))


@given(problem=problems(), base=BASES, dtype=DTYPES)
def test_a_row_does_not_depend_on_its_batch(problem: Attention, base: str, dtype) -> None:
    parts = [problem.partial(s, base, dtype) for s in range(problem.size)]
    merged = merge_partials(parts)
    for q in range(problem.scores.shape[0]):
        alone = merge_partials(
            [PartialAttention(p.out[q : q + 1], p.lse[q : q + 1], base) for p in parts]
        )
        assert torch.equal(alone.out[0], merged.out[q])
        assert torch.equal(alone.lse[0], merged.lse[q])


@given(problem=problems(), dtype=DTYPES)
def test_bases_agree_once_they_are_converted(problem: Attention, dtype) -> None:
    natural, binary = (
        merge_partials([problem.partial(s, base, dtype) for s in range(problem.size)])
        for base in ("e", "2")
    )
    assert natural.to_base_e().base == "e"
    for one, two in ((natural.to_base_2(), binary), (natural, binary.to_base_e())):
        assert one.base == two.base
        tolerance = 1e-4 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one.lse, two.lse, rtol=tolerance, atol=tolerance)
    tolerance = 8000 * torch.finfo(dtype).eps  # scores of 1000s lose digits in either base
    torch.testing.assert_close(natural.out, binary.out, rtol=tolerance, atol=tolerance)


def test_what_does_not_merge_is_refused() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    natural, binary = PartialAttention(out, lse, "e"), PartialAttention(out, lse, "2")
    with pytest.raises(LayoutError, match="parts 0 and 1 do not merge: base is e here, 2 there"):
        merge_partials([natural, binary])
    assert merge_partials([natural, binary.to_base_e()]).base == "e"
    double = PartialAttention(out.double(), lse.double(), "e")
    with pytest.raises(LayoutError, match=r"dtype is torch\.float32 here, torch\.float64 there"):
        merge_partials([natural, double])
    with pytest.raises(LayoutError, match=r"shape is \[2, 3, 4\] here, \[1, 3, 4\] there"):
        merge_partials([natural, PartialAttention(out[:1], lse[:1], "e")])
    with pytest.raises(LayoutError, match="one or more parts, got 0"):
        merge_partials([])


def test_what_is_no_partial_attention_is_refused() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    for arguments, message in [
        ((out, lse, "10"), "the log base is '10', must be 'e' or '2'"),
        ((out, lse.T, "e"), r"out is \[2, 3, 4\] and lse \[3, 2\]"),
        ((out[0], lse[0], "e"), r"must be \[q, h, dv\] and \[q, h\]"),
        ((out.bfloat16(), lse, "e"), r"out is torch\.bfloat16 and lse torch\.float32"),
        ((out.double(), lse, "e"), r"must both be one of"),
        ((out, lse.to("meta"), "e"), "out is on cpu, lse on meta"),
    ]:
        with pytest.raises(LayoutError, match=message):
            PartialAttention(*arguments)


def test_a_scatter_refuses_what_does_not_fit() -> None:
    comm = ThreadComm(ThreadGroup(2), 0)
    with pytest.raises(LayoutError, match=r"counts \[1, 2, 3\] must be 2 numbers"):
        ReduceScatter(comm, "head", (1, 2, 3), "e")
    with pytest.raises(LayoutError, match=r"counts \[1, -1\]"):
        ReduceScatter(comm, "head", (1, -1), "e")
    with pytest.raises(LayoutError, match="axis is 'dv', must be 'head' or 'token'"):
        ReduceScatter(comm, "dv", (1, 1), "e")
    with pytest.raises(LayoutError, match="log base is 'ten'"):
        ReduceScatter(comm, "head", (1, 1), "ten")
    stage = ReduceScatter(comm, "token", (1, 2), "e")
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(LayoutError, match=r"2 tokens to scatter, counts \[1, 2\] add up to 3"):
        stage.execute(PartialAttention(out, lse, "e"))
    with pytest.raises(LayoutError, match="has log base 2, the stage e"):
        stage.execute(PartialAttention(out, lse, "2"))


def test_the_law_of_the_merge_is_seen_to_fail() -> None:
    noise = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 9, generator=noise, dtype=torch.float64)
    values = torch.randn(9, 4, 3, generator=noise, dtype=torch.float64)
    problem = Attention(scores, values, torch.arange(9) % 3, 3)
    stage = scatter_on_threads(lambda comm: ReduceScatter(comm, "head", (2, 1, 1), "e"))

    def run(change) -> str:
        def scatter(parts):
            mine = list(stage(parts))
            mine[1] = change(parts, mine)
            return mine

        with pytest.raises(LawError) as refused:
            check_reduce_scatter(scatter, problem, "head", (2, 1, 1))
        return str(refused.value)

    said = run(lambda parts, mine: PartialAttention(mine[1].out + 1e-15, mine[1].lse, "e"))
    assert said.startswith("rank 1: out[0, 0, 0] is")
    said = run(lambda parts, mine: PartialAttention(mine[1].out, mine[1].lse + 1.0, "e"))
    assert said.startswith("rank 1: lse[0, 0] is")
    assert "must be torch.float64 [2, 1, 3]" in run(lambda parts, mine: mine[0])


def test_a_wrong_merge_is_seen_by_the_oracle(monkeypatch) -> None:
    """A merge that is wrong on all ranks alike: every shard weighs the same."""
    from kvflow.testing import attention

    def mean(parts):
        out = torch.stack([p.out.nan_to_num() for p in parts]).mean(0)
        return PartialAttention(out, parts[0].lse, parts[0].base)

    monkeypatch.setattr(attention, "merge_partials", mean)
    scores, values = torch.arange(8.0).double().view(1, 2, 4), torch.eye(4).double()[:, None]
    problem = Attention(scores, values.expand(4, 2, 4), torch.arange(4) % 2, 2)

    def scatter(parts):
        whole = mean(parts)
        return [PartialAttention(whole.out[:, r : r + 1], whole.lse[:, r : r + 1], "e")
                for r in (0, 1)]  # fmt: skip

    with pytest.raises(LawError, match="one softmax over all tokens is"):
        check_reduce_scatter(scatter, problem, "head", (1, 1))


@given(st.lists(st.floats(-690, 0), max_size=70), BASES)
def test_exponential_is_close_to_the_truth_and_the_same_in_every_lane(xs, base: str) -> None:
    many = exponential(torch.tensor(xs, dtype=torch.float64), base)
    for x, got in zip(xs, many.tolist(), strict=True):
        assert got == pytest.approx(math.exp(x) if base == "e" else 2.0**x, rel=1e-15)
        assert exponential(torch.tensor([x], dtype=torch.float64), base).item() == got


@given(st.lists(st.floats(1, 1e6), max_size=70), BASES)
def test_logarithm_is_close_to_the_truth_and_the_same_in_every_lane(xs, base: str) -> None:
    many = logarithm(torch.tensor(xs, dtype=torch.float64), base)
    for x, got in zip(xs, many.tolist(), strict=True):
        assert got == pytest.approx(
            math.log(x) if base == "e" else math.log2(x), rel=1e-15, abs=1e-15
        )
        assert logarithm(torch.tensor([x], dtype=torch.float64), base).item() == got


def test_both_are_close_over_a_whole_octave() -> None:
    up, down = torch.linspace(1, 2, 3001).double(), -torch.linspace(0, 2, 3001).double()
    for base, log, exp in (("e", math.log, math.exp), ("2", math.log2, lambda x: 2.0**x)):
        for x, got in zip(up.tolist(), logarithm(up, base).tolist(), strict=True):
            assert abs(got - log(x)) <= 2.0**-52
        for x, got in zip(down.tolist(), exponential(down, base).tolist(), strict=True):
            assert abs(got - exp(x)) <= 2.0**-51 * exp(x)


def test_the_ends_of_the_line() -> None:
    ends = torch.tensor([0.0, -math.inf, -1e300, math.nan], dtype=torch.float64)
    for base in ("e", "2"):
        assert exponential(ends, base)[:3].tolist() == [1.0, 0.0, 0.0]
        assert exponential(ends, base)[3].isnan()
        assert logarithm(torch.ones(1, dtype=torch.float64), base).item() == 0.0
        assert logarithm(ends[3:], base).isnan()
    assert logarithm(torch.tensor([8.0], dtype=torch.float64), "2").item() == 3.0


@pytest.mark.slow
def test_fault_two_bases_are_an_error_of_types_too(tmp_path) -> None:
    code = """
import torch
from kvflow.transfers.operators import PartialAttention, merge_partials
out, lse = torch.zeros(1, 1, 1), torch.zeros(1, 1)
merge_partials([PartialAttention(out, lse, "e"), PartialAttention(out, lse, "2").to_base_e()])
merge_partials([PartialAttention(out, lse, "e"), PartialAttention(out, lse, "2")])
"""
    (tmp_path / "two_bases.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "two_bases.py")]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "two_bases.py:6: error" in done.stdout
    assert done.stdout.count("error:") == 1
