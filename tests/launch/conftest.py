"""Fixtures shared by the launch tests."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from launch_world import Server, fixture_prompts, model_with_tokenizer


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prompts():
    return fixture_prompts()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return model_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model, tmp_path):
    """Starts a server, whose place for temporary files is a short path or a `deep` one; ends it
    whatever happens."""
    servers = []

    def build(*flags, deep=False, **kwargs):
        scratch = Path(tempfile.mkdtemp(prefix="kv-"))
        place = scratch / ("d" * 50) if deep else scratch
        place.mkdir(exist_ok=True)
        servers.append((scratch, Server(model, place, tmp_path / "server.log", *flags, **kwargs)))
        return servers[-1][1]

    yield build
    for scratch, server in servers:
        server.end()
        shutil.rmtree(scratch)
