"""Comparisons with vLLM's own code, run from its wheel by `make peers`. Elsewhere nothing here is
collected: the files import vLLM."""

from collections import Counter
from importlib.util import find_spec

import pytest
import torch

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

_cases = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.stash[_cases] = Counter()


@pytest.fixture
def count(request: pytest.FixtureRequest):
    """count(what) notes one case more; the totals are printed at the end."""
    cases = request.config.stash[_cases]

    def note(what: str, number: int = 1) -> None:
        cases[what] += number

    return note


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for what, number in config.stash[_cases].items():
        terminalreporter.write_line(f"{number:>8,}  {what}")
