"""Fixtures shared by the engine tests."""

import pytest
import torch
from engine_world import fixture_prompts


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prompts():
    return fixture_prompts()
