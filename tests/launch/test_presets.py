"""Presets are lawful, differ from what they are not, and say what the Makefile's demo runs."""

import runpy
import shlex
import tomllib

import pytest
from launch_world import ROOT, SERVE, TINY

from kvflow.launch.checks import check_launch
from kvflow.launch.keys import checked_tree, tree_of
from kvflow.launch.options import KEYS, parse_options
from kvflow.launch.presets import PRESETS

MODEL = ROOT / "examples" / "models" / "tiny-glm-python"


def parse(*argv):
    return parse_options(argv, default_model=MODEL)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_lawful_file_and_deployment(name):
    tree = PRESETS[name]
    assert checked_tree(tree, KEYS) == tree
    check_launch(parse("--preset", name).launch)


def test_the_article_has_its_rank_counts():
    launch = parse("--preset", "article").launch
    assert (launch.pcp, launch.dcp, launch.tp, launch.prefill_size) == (8, 8, 1, 8)
    assert (launch.decode_ranks, launch.decode_size) == (8, 1)
    assert launch.num_drafts == 3
    assert launch.hisparse
    assert launch.kv_dtype == "fp8"
    assert launch.transport == "nixl"
    assert launch.prefix.host_nbytes > 0


def test_the_demo_is_what_make_demo_runs():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "serve_glm.py" in line)
    flags = shlex.split(line.partition("serve_glm.py")[2])
    assert "--demo" in flags
    assert parse(*flags).launch == parse("--preset", "demo").launch


def test_print_config_writes_a_file_and_starts_nothing(capsys):
    main = runpy.run_path(str(SERVE))["main"]
    argv = ["--preset", "article", "--model", str(TINY), "--port", "5", "--print-config"]
    assert main(argv) == 0
    said = tomllib.loads(capsys.readouterr().out)
    assert said["server"] == {"host": "127.0.0.1", "port": 5}
    assert said["pcp"] == 8
    launch = parse(*argv).launch
    assert set(said) - {"server"} == set(tree_of(launch))


def test_the_program_says_what_is_wrong_with_a_file(tmp_path, capsys):
    main = runpy.run_path(str(SERVE))["main"]
    path = tmp_path / "wrong.toml"
    path.write_text("pcp = 1\ndcpp = 2\n")
    assert main(["--config", str(path)]) == 1
    told = capsys.readouterr().err
    assert told == f"serve_glm: {path}: dcpp is no key of a configuration, is dcp meant?\n"
