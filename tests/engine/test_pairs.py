"""Deployments in which every option meets every other give one rank's tokens."""

import importlib.util
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import attrs
import numpy as np
import pair_oracle
import pytest
from engine_scenes import Arrival, Scene
from engine_world import config, greedy, request
from pair_scenes import FACTORS, RULES, covering, scene
from scene_play import play

from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig

ROOT = Path(__file__).parents[2]
NUM_ROWS = 32
CI = (0,)
"""Rows that every run serves; all others are served in the slow tier."""

NAMES = {
    "prefill_kv": ["prefill_kv_tokens"],
    "decode_kv": ["decode_kv_tokens"],
    "attention": ["access"],
    "decode_attention": ["decode_access"],
    "streaming": ["streaming", "stream_layers"],
    "hisparse": ["hisparse", "hisparse_device_nbytes"],
}
"""Fields of `LaunchConfig` by their factors, where names differ."""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("pairs_page", ROOT / "tools/pairs_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_lawful_pair_is_in_a_lawful_row():
    """Counted twice: by the generator, and from every lawful combination of what rules tie."""
    rows = covering().rows
    lawful = pair_oracle.lawful_pairs(FACTORS, RULES)
    assert all(pair_oracle.is_lawful(row, RULES) for row in rows)
    assert pair_oracle.met(rows) == lawful
    assert {frozenset(pair) for pair in covering().pairs} == lawful
    assert len(rows) == NUM_ROWS


def test_a_row_less_loses_pairs():
    rows = covering().rows
    times = Counter(pair for row in rows for pair in pair_oracle.met([row]))
    assert all(any(times[pair] == 1 for pair in pair_oracle.met([row])) for row in rows)


def test_every_option_is_a_factor_or_said_to_be_none(tool):
    factors = {field for name in FACTORS for field in NAMES.get(name, [name])}
    fields = {field.name for field in attrs.fields(LaunchConfig)}
    assert fields <= factors | set(tool.LEFT_OUT)
    assert not set(tool.LEFT_OUT) & factors


def test_rows_are_lawful_deployments(tmp_path):
    launches = [scene(row, tmp_path).launch for row in covering().rows]
    assert {launch.prefill_engines for launch in launches} == {1, 2}
    assert len(set(launches)) == len(launches)


@pytest.mark.parametrize("at", CI)
def test_the_row_gives_the_tokens_of_one_rank(at, tmp_path):
    play(scene(covering().rows[at], tmp_path))


def _all_others():
    return [i for i in range(NUM_ROWS) if i not in CI]


@pytest.mark.slow
@pytest.mark.timeout(900)  # 16 threads; seconds alone, minutes on a busy machine
@pytest.mark.parametrize("at", _all_others())
def test_all_rows_give_the_tokens_of_one_rank(at, tmp_path):
    play(scene(covering().rows[at], tmp_path))


def test_rows_are_pushed_behind_the_last_ones_of_who_left():
    """A HiSparse rank that is slow to flush a request that left, whose blocks the next one gets."""
    sizes = {"max_model_len": 32, "decode_kv_tokens": 32, "prefill_block": 4, "decode_block": 4}
    launch = config(
        **sizes,
        kv_dtype="float64",
        dtype="float64",
        max_num_seqs=1,
        hisparse=True,
        transfer="push",
        streaming=False,
        prefix=PrefixConfig(enabled=False),
        verify_transfers=False,
    )

    def words(seed, count):
        return np.random.default_rng(seed).integers(0, 320, count).tolist()

    first = request("a", words(1, 20), greedy(6))
    second = request("b", words(2, 28), greedy(3))
    retire = DecodeWorker.retire

    def late(worker, request_id):
        time.sleep(0.5)
        retire(worker, request_id)

    with mock.patch.object(DecodeWorker, "retire", late):
        play(Scene(launch, ((Arrival(first), Arrival(second)),)))


def test_the_page_is_of_these_rows(tool):
    """Every row ran, as it is now, and the page says what happened."""
    told = tool.runs()
    assert [one["options"] for one in told] == list(covering().rows)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(told)


def test_every_row_gave_the_tokens_of_one_rank(tool):
    assert not [one["error"] for one in tool.runs() if "error" in one]


def test_every_pair_class_that_others_refuse_is_met(tool):
    told = tool.runs()
    met = {number: len(tool.rows_with(told, number)) for number, *_ in tool.CLASSES}
    assert min(met.values()) > 0, met
    assert sorted([*met, int(tool.ELSEWHERE[0])]) == list(range(1, 16))


def test_a_row_that_failed_or_did_not_run_shows(tool):
    told = tool.runs()
    num_good = sum("error" not in one for one in told)
    wrong = tool.page([{**told[0], "error": "AssertionError: a"}, *told[1:]])
    assert "- row 0 did not: AssertionError: a\n" in wrong
    assert "| 0 | ✗ |" in wrong
    assert f"{num_good - 1} of {len(told)} deployments" in wrong
    assert f"{num_good - 1} of {len(told)} deployments" in tool.page(told[1:])


def test_a_wrong_token_is_an_error_of_its_row(tool, monkeypatch):
    def wrong(scene):
        raise AssertionError("b2")

    monkeypatch.setattr(tool, "play", wrong)
    told = tool.run(covering().rows[0], "0")
    assert told["error"] == "AssertionError: b2"
    assert "happened" not in told
