"""Fixtures shared by the model tests."""

import json
from typing import Any

import pytest
import torch
from glm_fixture import TINY
from safetensors.torch import load_file


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prompts() -> dict[str, dict[str, Any]]:
    return json.loads((TINY / "reference.json").read_text())["prompts"]


@pytest.fixture(scope="session")
def reference() -> dict[str, torch.Tensor]:
    return load_file(TINY / "reference.safetensors")


@pytest.fixture(scope="session")
def tiny_config() -> dict[str, Any]:
    return json.loads((TINY / "config.json").read_text())
