"""What a deployment refuses before any rank starts."""

import asyncio
import json
import subprocess
import sys
import threading

import pytest
from launch_world import ROOT, SERVE, TINY, config

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import CapacityError, KvflowError, LayoutError, PlanError
from kvflow.launch.checks import check_launch
from kvflow.launch.config import LaunchConfig
from kvflow.launch.processes import process_deployment
from kvflow.launch.threads import thread_deployment
from kvflow.models.config import ConfigError

# float32 rows of the fixture: 6 latent components of 32 + 16 numbers, 4 of index keys of 32.
LATENT_ROW = 6 * 48 * 4
UNIT = 4 * (LATENT_ROW + 4 * 32 * 4)


def model(directory, **changes):
    """The fixture's config with changes, in a directory without weights."""
    values = json.loads((TINY / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_drafts": 5}, "num_drafts = 5, must be at most 4"),
        ({"num_drafts": -1}, "num_drafts = -1, must be at least 0"),
        ({"hisparse_device_nbytes": 10**6}, "hisparse_device_nbytes = 1000000 without hisparse"),
        ({"max_model_len": 1}, "max_model_len = 1, must be at least 2"),
        (
            {"streaming": False, "stream_layers": 2},
            "stream_layers = 2 without streaming, must be 0",
        ),
        ({"served_model_name": "a\ud800"}, r"served_model_name = 'a\\ud800' .* text of UTF-8"),
        ({"model": "b/a\udcff"}, r"model = 'b/a\\udcff', the name must be text of UTF-8"),
        (
            {"hisparse": True, "hisparse_device_nbytes": 0},
            "hisparse_device_nbytes = 0, must be at least 1",
        ),
        (
            {"hisparse": True, "hisparse_device_nbytes": -5},
            "hisparse_device_nbytes = -5, must be at least 1",
        ),
        ({"transfer_costs": "/nowhere.json"}, "transfer_costs = '/nowhere.json', must be a file"),
        (
            {"transfer_costs": "/nowhere.json", "transport": "in-process"},
            "transfer_costs = '/nowhere.json' with transport = 'in-process', must be 'nixl'",
        ),
    ],
)
def test_values_that_are_wrong_for_every_model(changes, message):
    with pytest.raises(LayoutError, match=message):
        LaunchConfig(**{"model": "model"} | changes)


@pytest.mark.parametrize("name", ["tp", "decode_tp"])
def test_ranks_share_the_heads_evenly(name):
    for size in (1, 2, 4):
        check_launch(config(**{name: size}))
    for size in (3, 8):
        message = rf"^{name} = {size} must divide num_attention_heads = 4"
        with pytest.raises(LayoutError, match=message):
            check_launch(config(**{name: size}))


def test_a_model_without_mtp_drafts_nothing(tmp_path):
    for without in (0, None):
        model(tmp_path, num_nextn_predict_layers=without)
        check_launch(LaunchConfig(tmp_path))
        with pytest.raises(LayoutError, match=r"num_drafts = 1, must be 0.*predict_layers = 0"):
            check_launch(LaunchConfig(tmp_path, num_drafts=1))
    check_launch(config(num_drafts=4))


@pytest.mark.parametrize(("num_drafts", "block"), [(0, 4), (3, 8)])
def test_hisparse_needs_device_memory_for_its_batch(num_drafts, block):
    values = {"hisparse": True, "max_num_seqs": 5, "num_drafts": num_drafts, "decode_block": block}
    need = 5 * (2 * block + (num_drafts + 2) * 16) * LATENT_ROW
    check_launch(config(**values, hisparse_device_nbytes=need))
    with pytest.raises(
        CapacityError,
        match=rf"hisparse_device_nbytes = {need - 1}: .* takes {need} bytes .* cap is {need - 1}",
    ):
        check_launch(config(**values, hisparse_device_nbytes=need - 1))


def test_a_host_tier_holds_a_unit_and_its_label():
    need = UNIT + 32 + 4096
    check_launch(config(prefix=PrefixConfig(True, 4, need)))
    for size in (need - 1, 100):
        with pytest.raises(CapacityError, match=rf"host_nbytes = {size}: .* has {UNIT} bytes"):
            check_launch(config(prefix=PrefixConfig(True, 4, size)))


def test_a_disk_tier_holds_the_file_of_a_unit(tmp_path):
    """One page of header and the unit, rounded up to a page where the file begins."""
    need = 4096 + UNIT
    check_launch(config(prefix=PrefixConfig(True, 4, 1 << 20, tmp_path, need)))
    for size in (need - 1, 1):
        below = PrefixConfig(True, 4, 1 << 20, tmp_path / "none", size)
        with pytest.raises(
            CapacityError, match=rf"^disk_nbytes = {size}, must be at least {need}: .* 4 tokens$"
        ):
            check_launch(config(prefix=below))
    assert not (tmp_path / "none").exists()


def test_a_disk_tier_has_a_directory(tmp_path):
    fresh = tmp_path / "a" / "b"
    check_launch(config(prefix=PrefixConfig(True, 4, 1 << 20, fresh, 1 << 20)))
    assert fresh.is_dir()
    (tmp_path / "file").write_text("")
    below = PrefixConfig(True, 4, 1 << 20, tmp_path / "file" / "tier", 1 << 20)
    with pytest.raises(LayoutError, match=r"disk_directory = '.*tier', must be a directory"):
        check_launch(config(prefix=below))


def test_a_file_of_costs_holds_costs(tmp_path):
    path = tmp_path / "costs.json"
    for held in (b"{}", b"\xff", b"[" * 10**5):
        path.write_bytes(held)
        with pytest.raises(PlanError, match="no costs: "):
            check_launch(config(transfer_costs=path))


@pytest.mark.parametrize(
    "content", [None, "{", "[]", "{}", '{"model_type": "llama"}', "[" * 10**5], ids=range(6)
)
def test_a_model_is_a_directory_with_a_config(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"model = '{tmp_path}'"):
        check_launch(LaunchConfig(tmp_path))


@pytest.mark.parametrize("world", [thread_deployment, process_deployment])
def test_worlds_check_before_a_rank_starts(world):
    async def run():
        before = threading.active_count()
        with pytest.raises(KvflowError, match="tp = 3 must divide num_attention_heads = 4"):
            async with world(config(tp=3)):
                raise AssertionError("it started")
        assert threading.active_count() == before

    asyncio.run(run())


def test_serve_glm_ends_with_one_line():
    flags = ("--transport", "in-process", "--model", str(TINY), "--tp", "3")
    done = subprocess.run(
        [sys.executable, str(SERVE), *flags], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "serve_glm: tp = 3 must divide num_attention_heads = 4\n"
