"""The same model over real processes: experts on gloo ranks, rows gathered between them."""

import socket
from pathlib import Path

import forks
import pytest
import torch
from glm_drive import run_steps
from glm_fixture import TINY

from kvflow.comm import LocalComm, connect_gloo, disconnect
from kvflow.models import Glm

TOKENS = [list(range(3, 40))]
STEPS = [[(0, 0, 35)], [(0, 35, 1)], [(0, 36, 1)]]


def owner(request_idx: int, position: int) -> int:
    return position // 4 % 2


def rank_main(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    comm = connect_gloo(rank, 2, f"tcp://127.0.0.1:{port}")
    glm = Glm.load(TINY, kv_dtype="fp8", rank=rank, size=2)
    hidden, kv = run_steps(glm, comm, TOKENS, STEPS, owner)
    torch.save((hidden, kv.table), out / f"{rank}.pt")
    disconnect()


@pytest.mark.processes
def test_two_processes_equal_one_rank(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forks.run(rank_main, (port, tmp_path), 2)
    alone = Glm.load(TINY, kv_dtype="fp8")
    want, kv = run_steps(alone, LocalComm(), TOKENS, STEPS, lambda r, p: 0)
    parts = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    hidden = {key: value for part, _ in parts for key, value in part.items()}
    assert hidden.keys() == want.keys()
    assert all(torch.equal(hidden[key], want[key]) for key in want)
    for _, table in parts:
        assert table.keys() == kv.table.keys()
        assert all(torch.equal(table[key], kv.table[key]) for key in table)
