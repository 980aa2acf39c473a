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
        (["--disk-tier-gib", "1"], "needs a directory"),
        (["--disk-tier-directory", "/tier", "--disk-tier-gib", "1"], "a host tier, is 0 bytes"),
        (["--disk-tier-directory", "/tier", "--host-tier-gib", "1"], "needs a size, is 0"),
        (["--prefix-block", "0"], "block_size"),
        (["--host-tier-gib", "-1"], "host_nbytes"),
    ],
)
def test_tiers_that_lack_what_they_need_are_refused(flags, text):
    with pytest.raises(LayoutError, match=text):
        parsed(*flags)
