"""Flags of prefix reuse and its tiers."""

from pathlib import Path

import pytest

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import LayoutError
from kvflow.launch.options import parse_options

MODEL = Path("model")


def parsed(*flags):
    return parse_options(flags, default_model=MODEL).launch.prefix


def test_prefix_reuse_is_on_and_tiers_are_off_unless_asked_for():
    assert parsed() == PrefixConfig()
    assert parsed().enabled
    assert not parsed("--no-enable-prefix-caching").enabled


def test_sizes_are_gib():
    config = parsed(
        *("--host-tier-gib", "1.5", "--disk-tier-gib", "2", "--disk-tier-directory", "/tier"),
        *("--prefix-block", "16"),
    )
    assert config == PrefixConfig(True, 16, 3 << 29, Path("/tier"), 2 << 30)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--no-enable-prefix-caching", "--host-tier-gib", "1"], "without prefix reuse"),
        (
            ["--no-enable-prefix-caching", "--prefix-block", "8"],
            "block_size = 8 without prefix reuse, must be none",
        ),
        (["--disk-tier-gib", "1"], "needs a directory"),
        (["--disk-tier-directory", "/tier", "--disk-tier-gib", "1"], "a host tier, is 0 bytes"),
        (["--disk-tier-directory", "/tier", "--host-tier-gib", "1"], "needs a size, is 0"),
        (["--prefix-block", "0"], "block_size"),
    ],
)
def test_tiers_that_lack_what_they_need_are_refused(flags, text):
    with pytest.raises(LayoutError, match=text):
        parsed(*flags)


@pytest.mark.parametrize("flag", ["--host-tier-gib", "--disk-tier-gib"])
@pytest.mark.parametrize("size", ["-1", "nan", "inf", "-inf", "1e300", "4294967297"])
def test_sizes_that_are_no_number_of_bytes_end_the_program(flag, size, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(f"{flag}={size}")
    assert caught.value.code == 2
    assert f"{flag}: {size} GiB, must be in [0, 4294967296]" in capsys.readouterr().err


def test_no_size_above_zero_becomes_none():
    assert parsed("--host-tier-gib", "1e-12").host_nbytes == 1
    assert parsed("--host-tier-gib", "0").host_nbytes == 0


def test_a_disk_directory_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(LayoutError, match=r"disk_directory = '.*file', must be a directory"):
        PrefixConfig(True, 4, 1 << 20, path, 1 << 20)
