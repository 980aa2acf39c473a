"""docs/configuration.md is what the command line and the fields say."""

import importlib.util
import re
import tomllib

import pytest
from launch_world import ROOT, TINY

from kvflow.launch.keys import checked_tree
from kvflow.launch.options import KEYS, command_line, parse_options


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "configuration_doc.py"
    spec = importlib.util.spec_from_file_location("configuration_doc", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_the_generated_one(tool):
    assert ROOT / "docs" / "configuration.md" == tool.PAGE
    assert tool.PAGE.read_text() == tool.page(), "run tools/configuration_doc.py"


def test_every_flag_and_key_is_on_the_page(tool):
    text = tool.page()
    flags = set(re.findall(r"`(--[a-z-]+)`", text))
    known = {flag for action in command_line(TINY)._actions for flag in action.option_strings}
    switched_off = {flag for flag in known if flag.startswith("--no-")}
    assert known - switched_off - {"-h", "--help"} <= flags
    assert flags - {"--no-", "--decode-"} <= known
    for key in KEYS.values():
        assert f"| `{key.path[-1]}` | `--" in text


def test_the_toml_of_the_page_is_lawful(tool, tmp_path):
    found = re.findall(r"```toml\n(.*?)```", tool.page(), re.DOTALL)
    assert len(found) == 3
    for text in found:
        checked_tree(tomllib.loads(text), KEYS)
    (tmp_path / "options.toml").write_text(found[0])
    argv = ["--preset", "article", "--config", str(tmp_path / "options.toml")]
    assert parse_options(argv, default_model=TINY).launch.max_model_len == 4096
