"""The command line: vLLM's names where the meaning is the same, and refusals with both numbers."""

from pathlib import Path

import pytest
from launch_world import TINY

from kvflow.errors import LayoutError
from kvflow.launch.config import LaunchConfig
from kvflow.launch.options import ServerOptions, parse_options
from kvflow.layouts.sharding import RoundRobin
from kvflow.models.config import GlmConfig
from kvflow.transfers.cost import Costs, Rate


def parse(*argv):
    return parse_options(argv, default_model=TINY)


def test_the_command_of_the_readme():
    flags = "--pcp 4 --dcp 4 --interleave 1 --decode-ranks 2 --prefill-block 16 --decode-block 64"
    options = parse("--model", "dir", *flags.split(), "--kv-dtype", "fp8", "--port", "8000")
    assert options.launch == LaunchConfig(
        "dir", pcp=4, dcp=4, interleave=1, decode_ranks=2, prefill_block=16, decode_block=64
    )
    assert options.server == ServerOptions("127.0.0.1", 8000)
    assert not options.demo


@pytest.mark.parametrize(
    ("flag", "value", "name", "parsed"),
    [
        ("--prefill-context-parallel-size", "8", "pcp", 8),
        ("--cp-kv-cache-interleave-size", "64", "interleave", 64),
        ("--data-parallel-size", "8", "decode_ranks", 8),
        ("--block-size", "32", "decode_block", 32),
        ("--kv-cache-dtype", "bfloat16", "kv_dtype", "bfloat16"),
        ("--max-model-len", "4096", "max_model_len", 4096),
        ("--max-num-batched-tokens", "512", "max_num_batched_tokens", 512),
        ("--max-num-seqs", "3", "max_num_seqs", 3),
        ("--served-model-name", "glm", "served_model_name", "glm"),
        ("--dtype", "float64", "dtype", "float64"),
        ("--transport", "in-process", "transport", "in-process"),
    ],
)
def test_long_flags_have_the_names_that_vllm_users_know(flag, value, name, parsed):
    assert getattr(parse(flag, value).launch, name) == parsed


def test_dcp_acts_on_the_prefill_ranks():
    launch = parse("--pcp", "4", "--decode-context-parallel-size", "2").launch
    assert (launch.pcp, launch.dcp) == (4, 2)


def test_expert_parallel_is_accepted():
    assert parse("--enable-expert-parallel").launch == parse().launch


def test_defaults_are_those_of_the_config():
    assert parse().launch == LaunchConfig(TINY)
    assert parse().launch.model_name == "tiny_glm_scaled"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pcp", "4", "--dcp", "3"], "dcp 3 must divide pcp 4"),
        (["--pcp", "2", "--dcp", "4"], "dcp 4 must divide pcp 2"),
        (["--pcp", "0"], "pcp = 0, must be at least 1"),
        (["--interleave", "0"], "interleave = 0, must be at least 1"),
        (["--prefill-block", "-4"], "prefill_block = -4, must be at least 1"),
        (
            ["--max-model-len", "100", "--decode-kv-tokens", "64"],
            "decode_kv_tokens = 64 is below max_model_len 100",
        ),
    ],
)
def test_values_that_make_no_lawful_deployment(argv, message):
    with pytest.raises(LayoutError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-dtype", "int4"], "invalid choice: 'int4'"),
        (["--transport", "carrier-pigeon"], "invalid choice: 'carrier-pigeon'"),
        (["--pcp", "four"], "invalid int value: 'four'"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_argparse_refuses(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# --- what the config says about the model and its caches


def test_model_facts_come_from_its_directory(tmp_path):
    launch = LaunchConfig(TINY)
    assert launch.eos_ids() == frozenset([1])
    assert launch.vocab_size() == 320
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 4], "vocab_size": 9}')
    assert LaunchConfig(tmp_path).eos_ids() == frozenset([3, 4])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert LaunchConfig(tmp_path).eos_ids() == frozenset([5])
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert LaunchConfig(Path(tmp_path)).eos_ids() == frozenset()


def test_layouts_of_both_sides():
    """A06: ranks of one DCP coordinate are replicas; DCP adds no ranks."""
    spec = GlmConfig.load(TINY).kv_spec(kv_dtype="fp8")
    launch = LaunchConfig(TINY, pcp=4, dcp=2, interleave=3, prefill_block=16, decode_block=32)
    layout = launch.prefill_layout(spec)
    assert layout.placement.sharding == RoundRobin(2, 3)
    assert sorted(r for ranks in layout.placement.ranks for r in ranks) == [0, 1, 2, 3]
    assert [len(ranks) for ranks in layout.placement.ranks] == [2, 2]
    assert layout.groups[0].paging.block_size == 16
    target = launch.decode_layout(spec)
    assert target.placement.sharding.num_shards == 1
    assert target.groups[0].paging.block_size == 32


@pytest.mark.parametrize(
    "wrong",
    [
        {"pcp": 2.0},
        {"interleave": 1.5},
        {"decode_block": True},
        {"dcp": 0},
        {"kv_dtype": "int8"},
        {"dtype": "bf16"},
        {"transport": "pigeon"},
    ],
)
def test_unlawful_values_are_refused_by_name(wrong):
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(LayoutError, match=rf"{name}.*{value}|{value}.*integer"):
        LaunchConfig("model", **wrong)


def test_ports_outside_the_range_are_refused(capsys):
    for port in ("-1", "65536"):
        with pytest.raises(SystemExit):
            parse_options(["--port", port], default_model=Path("model"))
        assert f"port {port}, must be in [0, 65536)" in capsys.readouterr().err


def test_measured_costs_come_from_a_file(tmp_path):
    path = tmp_path / "costs.json"
    measured = Costs(Rate(1e-6, 2e-10), Rate(3e-8, 4e-10), 5e-4)
    path.write_text(measured.to_json())
    assert parse("--transfer-costs", str(path)).launch.costs() == measured
    assert parse().launch.costs() == Costs()
