"""`kvflow calibrate`: measured constants are lawful, a file is never overwritten by accident."""

import multiprocessing as mp
import os
import sys
import time
from collections import Counter

import numpy as np
import pytest

from kvflow import calibrate, cli
from kvflow.errors import TransferError
from kvflow.transfers.cost import Costs, Rate
from kvflow.transfers.executors.nixl import settle_environment

settle_environment()


@pytest.mark.processes
def test_it_measures_prints_and_writes_a_file_that_loads(tmp_path, capsys) -> None:
    path = tmp_path / "costs.json"
    assert cli.main(["calibrate", str(path), "--tokens", "512", "--rounds", "2"]) == 0
    costs = Costs.from_json(path.read_text())
    said = capsys.readouterr().out
    assert calibrate.as_text(costs) in said
    assert str(path) in said
    for rate in (costs.wire, costs.copy):
        assert rate.seconds(10**6, 10**9) > 0


def test_it_refuses_to_overwrite_before_it_measures(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "costs.json"
    path.write_text("mine")
    monkeypatch.setattr(calibrate, "measure", lambda *_: Costs(Rate(1, 1)))
    assert cli.main(["calibrate", str(path)]) == 1
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert cli.main(["calibrate", str(path), "--force"]) == 0
    assert Costs.from_json(path.read_text()).wire == Rate(1, 1)


@pytest.mark.parametrize("words", [["--tokens", "0"], ["--rounds", "0"]])
def test_it_refuses_to_measure_nothing(words: list[str], tmp_path, capsys) -> None:
    path = tmp_path / "costs.json"
    assert cli.main(["calibrate", str(path), *words]) == 2
    assert f"{words[0][2:]} is 0, must be at least" in capsys.readouterr().err
    assert not path.exists()


def test_a_busy_spell_costs_more_rounds_and_no_sense() -> None:
    """What moves little is slow in the first round alone: it fits nothing, the medians do."""
    calls = Counter()

    def little() -> None:
        calls["little"] += 1
        if calls["little"] == 2:  # the first call warms
            time.sleep(0.05)

    methods = {"much": lambda: time.sleep(0.01), "little": little}

    def fit(seconds: dict[str, float]) -> Costs:
        calls["fit"] += 1
        left = seconds["much"] - seconds["little"]
        return Costs(calibrate._rate((1000, 10**6, left), (10, 10**6, left / 2)))

    costs = calibrate._fitted(methods, 1, fit)
    assert calls["fit"] == calls["little"] - 1 > 1
    assert costs.wire.seconds(1000, 10**6) > 0.001


def test_times_that_never_fit_are_an_error_in_the_end() -> None:
    calls = Counter()

    def fit(seconds: dict[str, float]) -> Costs:
        calls["fit"] += 1
        return Costs(calibrate._rate((1000, 10**6, -seconds["one"]), (10, 10**6, 0.0)))

    with pytest.raises(TransferError, match="fit no costs: measure again"):
        calibrate._fitted({"one": lambda: calls.update(["one"])}, 3, fit)
    assert calls == {"one": 1 + 3 * calibrate._BATCHES, "fit": calibrate._BATCHES}


def test_a_rate_is_what_two_measurements_say() -> None:
    rate = calibrate._rate((1000, 10**6, 3.0), (10, 10**6, 1.02))
    assert np.isclose(rate.per_item, 2e-3)
    assert np.isclose(rate.per_byte, 1e-6)


def test_a_rate_is_never_negative() -> None:
    noise = calibrate._rate((1000, 10**6, 1.0), (10, 10**6, 1.1))
    assert noise.per_item == 0
    assert np.isclose(noise.per_byte, 1.05e-6)
    assert calibrate._rate((1000, 10, 1.0), (10, 1000, 0.001)).per_byte == 0
    with pytest.raises(TransferError, match="fit no costs"):
        calibrate._rate((1000, 10**6, -1.0), (10, 10**6, 0.0))


def test_without_nixl_it_says_so_at_once(monkeypatch, capsys, tmp_path) -> None:
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    assert cli.main(["calibrate", str(tmp_path / "costs.json")]) == 2
    assert "NIXL is not installed" in capsys.readouterr().err


@pytest.mark.processes
def test_a_source_process_that_dies_is_an_error(monkeypatch, capfd) -> None:
    monkeypatch.setattr(calibrate, "_serve", os._exit)  # a call that fails: it takes one argument
    with pytest.raises(TransferError, match="the source process has ended"):
        calibrate.measure(256, 1)
    assert "TypeError" in capfd.readouterr().err
    assert not mp.active_children()
