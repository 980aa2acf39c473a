"""The same over real processes: a second gloo group carries what runs ahead."""

import socket
from pathlib import Path

import forks
import pytest
import torch
from raw_world import Part, Raw, alone

from kvflow.comm import connect_gloo, disconnect
from kvflow.engine.access import AccessOptions

STEPS = ((Part(0, 0, 20), Part(1, 0, 3)), (Part(0, 20, 26), Part(1, 3, 4, 1)), (Part(0, 26, 27),))
WAYS = [("whole", "keys", 1 << 18), ("union", "queries", 9), ("queries", "keys", 9)]


def rank_main(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    comm = connect_gloo(rank, 2, f"tcp://127.0.0.1:{port}")
    found = []
    for attention, index, tokens in WAYS:
        world = Raw(2, 1, 2, 3, options=AccessOptions(attention, index, tokens))
        found.append(world._rank(comm, STEPS, world._tables(STEPS)))
    torch.save(found, out / f"{rank}.pt")
    disconnect()


@pytest.mark.processes
def test_processes_equal_one_rank(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forks.run(rank_main, (port, tmp_path), 2)
    parts = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)]
    reference = alone(STEPS, 1, 2)
    for (attention, _, _), *ranks in zip(WAYS, *parts, strict=True):
        found = {key: value for part in ranks for key, value in part.items()}
        assert found.keys() == reference.keys()
        for key, (chosen, out) in reference.items():
            assert found[key][0] == chosen
            close = torch.allclose(torch.from_numpy(found[key][1]), torch.from_numpy(out))
            assert close if attention == "queries" else (found[key][1] == out).all()
