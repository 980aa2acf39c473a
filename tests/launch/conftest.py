"""Fixtures shared by the launch tests."""

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
    """Starts a server; ends it whatever happens."""
    servers = []

    def build(*flags, **kwargs):
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        servers.append(Server(model, scratch, *flags, **kwargs))
        return servers[-1]

    yield build
    for server in servers:
        server.end()
