"""Attention heads over tensor-parallel ranks, with experts over all ranks and tokens over groups:
hidden states, MTP module and cache rows equal one rank's, bit for bit."""

from functools import cache

import pytest
import torch
from dense_kv import DenseKV, segment
from glm_drive import run_steps
from glm_fixture import TINY

from kvflow.comm import Comm, CommError, LocalComm, SubComm, consecutive_group, run_ranks
from kvflow.models import ConfigError, Glm, GlmConfig, owned_experts, owned_heads
from kvflow.models.build import _moe
from kvflow.models.weights import load_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64, "fp8": torch.float32}
generator = torch.Generator().manual_seed(7)
REQUESTS = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in (37, 5, 50)]
STEPS = [
    [(0, 0, 30), (1, 0, 1)],
    [(0, 30, 1), (1, 1, 3), (2, 0, 49)],
    [(0, 31, 1), (2, 49, 1)],
    [(0, 32, 5), (1, 4, 1)],
]


@cache
def load(kv_dtype: str, rank: int = 0, size: int = 1, tp_rank: int = 0, tp_size: int = 1) -> Glm:
    return Glm.load(
        TINY, kv_dtype=kv_dtype, dtype=DTYPES[kv_dtype], rank=rank, size=size,
        tp_rank=tp_rank, tp_size=tp_size,
    )  # fmt: skip


@cache
def alone(kv_dtype: str):
    hidden, kv = run_steps(load(kv_dtype), LocalComm(), REQUESTS, STEPS, lambda r, p: 0)
    return hidden, kv.table


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize(("pcp", "tp_size"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_ranks_equal_one_rank(kv_dtype: str, pcp: int, tp_size: int) -> None:
    def body(comm: Comm):
        tp = consecutive_group(comm, tp_size)
        glm = load(kv_dtype, comm.rank, comm.size, tp.rank, tp_size)
        return run_steps(glm, comm, REQUESTS, STEPS, lambda r, p: (r + p // 3) % pcp, tp)

    want, table = alone(kv_dtype)
    seen = set()
    for hidden, kv in run_ranks(pcp * tp_size, body):
        seen |= hidden.keys()
        assert all(torch.equal(value, want[key]) for key, value in hidden.items())
        assert kv.table.keys() == table.keys()
        assert all(torch.equal(row, table[key]) for key, row in kv.table.items())
    assert seen == want.keys()


def test_mtp_over_heads_equals_one_rank() -> None:
    tokens = torch.tensor(REQUESTS[0])
    part = [segment(0, range(len(tokens)), len(tokens))]

    def body(comm: Comm):
        tp = consecutive_group(comm, comm.size)
        glm = load("float32", comm.rank, comm.size, tp.rank, tp.size)
        kv = DenseKV(comm, glm.spec)
        kv.begin(part)
        hidden = glm.forward(tokens, part, kv, comm, tp)
        kv.begin(part)
        return glm.mtp_forward(tokens, hidden, part, kv, comm, tp=tp)[0]

    want = body(LocalComm())
    for got in run_ranks(2, body):
        assert torch.equal(got, want)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("pcp", "tp_size"), [(1, 2), (2, 2), (1, 4)])
def test_experts_see_each_token_once(tiny_config, pcp: int, tp_size: int, skewed: bool) -> None:
    """0, 1, P-1 and 2P+1 tokens, as they come and all on two experts; each is sent once for each
    of its experts, however many ranks hold it, and who holds it does not matter."""
    config, size = GlmConfig.from_hf(tiny_config), pcp * tp_size
    sent: list[int] = []

    def layer(rank: int, num_ranks: int):
        experts = owned_experts(config.n_routed_experts, rank, num_ranks)
        weights = load_weights(TINY, config, dtype=torch.float32, experts=experts)
        if skewed:
            bias = torch.zeros(8)
            bias[5:7] = 100.0
            weights["model.layers.2.mlp.gate.e_score_correction_bias"] = bias
        return _moe(config, weights, "model.layers.2.mlp.", experts)

    whole = layer(0, 1)
    x = torch.randn(2 * size + 1, 64, generator=torch.Generator().manual_seed(size))
    for num in sorted({0, 1, size - 1, 2 * size + 1}):
        want = whole(x[:num], LocalComm(), LocalComm())
        for deal in (lambda i: i % pcp, lambda i: 0):
            sent.clear()

            def body(comm: Comm, num: int = num, deal=deal, want=want) -> list[int]:
                tp = consecutive_group(comm, tp_size)
                mine = [i for i in range(num) if deal(i) == comm.rank // tp_size]
                got = layer(comm.rank, size)(x[mine], Counting(comm, sent), tp)
                assert torch.equal(got, want[mine])
                return mine

            run_ranks(size, body)
            assert sum(sent) == num * config.num_experts_per_tok


class Counting:
    """A `Comm` that notes how many rows a rank dispatches: those of each first exchange."""

    def __init__(self, comm: Comm, sent: list[int]) -> None:
        self.comm, self.sent, self.exchanges = comm, sent, 0
        self.rank, self.size = comm.rank, comm.size
        self.all_gather = comm.all_gather

    def all_to_all(self, rows, counts, received=None):
        if self.exchanges == 0:
            self.sent.append(len(rows))
        self.exchanges += 1
        return self.comm.all_to_all(rows, counts, received)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 3, "tp_size 3 must divide num_attention_heads = 4"),
        (0, 8, "tp_size 8 must divide num_attention_heads = 4"),
        (2, 2, r"tp_rank 2, must be in \[0, tp_size = 2\)"),
    ],
)
def test_heads_that_do_not_divide(rank: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Glm.load(TINY, kv_dtype="fp8", tp_rank=rank, tp_size=size)


def test_owned_heads() -> None:
    for size in (1, 2, 4, 8):
        heads = [h for r in range(size) for h in owned_heads(8, r, size)]
        assert heads == list(range(8))


def test_sub_groups() -> None:
    def body(comm: Comm):
        sub = consecutive_group(comm, 2)
        mine = torch.full((comm.rank, 2), comm.rank)
        first = comm.rank // 2 * 2
        gathered = sub.all_gather(mine, [first, first + 1])
        swapped, counts = sub.all_to_all(torch.tensor([comm.rank * 10, comm.rank * 10 + 1]), [1, 1])
        sub.barrier()
        again = sub.channel().all_gather(mine, [first, first + 1])
        assert torch.equal(again, gathered)
        return gathered[:, 0].tolist(), swapped.tolist(), counts

    assert run_ranks(4, body) == [
        ([1], [0, 10], [1, 1]),
        ([1], [1, 11], [1, 1]),
        ([2, 2, 3, 3, 3], [20, 30], [1, 1]),
        ([2, 2, 3, 3, 3], [21, 31], [1, 1]),
    ]
    with pytest.raises(CommError, match="sub-groups of 3 ranks must divide a group of 1"):
        consecutive_group(LocalComm(), 3)
    with pytest.raises(CommError, match=r"sub-group \[1\] of rank 0"):
        SubComm(LocalComm(), (1,))
