"""Drives a model over a `DenseKV` for tests: any split of any requests over ranks and steps."""

from collections.abc import Callable, Sequence

import torch
from dense_kv import DenseKV, segment
from torch import Tensor

from kvflow.comm import Comm, LocalComm, run_ranks
from kvflow.models import Glm

Chunk = tuple[int, int, int]
"""(request, first new position, number of new tokens) of one step."""


def run_steps(
    glm: Glm,
    comm: Comm,
    requests: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Chunk]],
    owner: Callable[[int, int], int],
    tp: Comm = LocalComm(),  # noqa: B008
) -> tuple[dict[tuple[int, int], Tensor], DenseKV]:
    """Hidden states by (request, position) of the tokens this rank owns, and its cache. The ranks
    of `tp` own the same tokens."""
    kv, hidden = DenseKV(comm, glm.spec), {}
    for chunks in steps:
        segments = []
        for r, start, num in chunks:
            mine = [p for p in range(start, start + num) if owner(r, p) == comm.rank // tp.size]
            segments.append(segment(r, mine, start + num))
        rows = [(s.request_idx, p) for s in segments for p in s.positions.tolist()]
        tokens = torch.tensor([requests[r][p] for r, p in rows], dtype=torch.int64)
        kv.begin(segments)
        out = glm.forward(tokens, segments, kv, comm, tp)
        assert out.shape == (len(rows), glm.config.hidden_size)
        assert sorted(kv.published) == sorted(kv.released) == sorted(glm.spec.select(part="main"))
        hidden.update(zip(rows, out, strict=True))
    return hidden, kv


def run_group(
    load: Callable[[int, int], Glm],
    size: int,
    requests: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Chunk]],
    owner: Callable[[int, int], int],
) -> tuple[dict[tuple[int, int], Tensor], list[DenseKV], list[list[object]]]:
    """The same on `size` thread ranks: hidden states of all tokens, caches and call traces."""
    traces: list[list[object]] = [[] for _ in range(size)]

    def body(comm: Comm) -> tuple[dict[tuple[int, int], Tensor], DenseKV]:
        return run_steps(load(comm.rank, comm.size), comm, requests, steps, owner)

    results = run_ranks(size, body, traces=traces)
    hidden = {key: h for part, _ in results for key, h in part.items()}
    return hidden, [kv for _, kv in results], traces


def greedy(glm: Glm, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Prefill in one step, then one token at a time."""
    comm = LocalComm()
    kv, tokens, done = DenseKV(comm, glm.spec), list(prompt), 0
    for _ in range(num_tokens):
        part = [segment(0, range(done, len(tokens)), len(tokens))]
        kv.begin(part)
        hidden = glm.forward(torch.tensor(tokens[done:]), part, kv, comm)
        done = len(tokens)
        tokens.append(int(glm.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
