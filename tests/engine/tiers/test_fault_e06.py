"""Fault E06: either way of moving a tier's files keeps the order, and none is taken silently."""

import asyncio
import itertools
import sys
import threading

import pytest
from symbolic_ranks import SymbolicRanks

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import TransferError
from kvflow.launch.config import LaunchConfig
from kvflow.launch.processes import files_of
from kvflow.transfers.executors.nixl_files import NixlFiles
from kvflow.transfers.executors.plain_files import PlainFiles

NUM_UNITS = 9


class Uneven:
    """Moves files, every second one only when a later one has arrived, if one comes."""

    def __init__(self, mover):
        self._mover, self._numbers = mover, itertools.count()
        self._later = [threading.Event() for _ in range(4 * NUM_UNITS)]

    def write(self, fd, offset, data):
        self._in_turn(self._mover.write, fd, offset, data)

    def read(self, fd, offset, data):
        self._in_turn(self._mover.read, fd, offset, data)

    def _in_turn(self, move, *args):
        number = next(self._numbers)
        if number % 2:
            self._later[number + 1].wait(0.05)
        move(*args)
        self._later[number].set()


@pytest.mark.parametrize("make_mover", [PlainFiles, NixlFiles])
def test_fault_e06_either_mover_of_files_keeps_rows_in_order(make_mover, tmp_path):
    """The ranks complain about any row that is read before it, or instead of what, was stored."""

    def ranks():
        sizes = {"num_blocks": 10, "host_units": 24, "mtp": True}
        return SymbolicRanks(2, 2, directory=tmp_path, files=Uneven(make_mover()), **sizes)

    async def run():
        prompt, other = range(4 * NUM_UNITS + 1), range(500, 500 + 4 * NUM_UNITS + 1)
        said = []
        for _ in range(2):
            engine = ranks()
            said += [await engine.serve(name, p) for name, p in (("a", prompt), ("b", other))]
            engine.assert_idle()
            await engine.close()
        return said

    assert asyncio.run(run()) == [0, 0, 4 * NUM_UNITS, 4 * NUM_UNITS]


def test_fault_e06_without_nixl_processes_move_no_files_in_another_way(tmp_path, monkeypatch):
    prefix = PrefixConfig(host_nbytes=1 << 20, disk_directory=tmp_path, disk_nbytes=1 << 20)
    config = LaunchConfig("unused", prefix=prefix)
    assert isinstance(files_of(config), NixlFiles)
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(TransferError, match="NIXL is not installed"):
        files_of(config)
