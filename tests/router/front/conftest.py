"""The tokenizer of the server's tests, and their engine."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "server"), str(TESTS / "launch")]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    from server_helpers import write_tokenizer

    directory = tmp_path_factory.mktemp("scripted")
    return write_tokenizer(directory)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    from kvflow.server import load_tokenizer

    return load_tokenizer(tokenizer_dir)
