"""docs/catalogue.md is what the catalogue says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvflow.layouts.catalogue import CATALOGUE, names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("catalogue_doc", ROOT / "tools/catalogue_doc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_the_generated_one(tool):
    assert tool.PAGE == ROOT / "docs" / "catalogue.md"
    written = tool.PAGE.read_text()
    assert written == tool.page(), "run tools/catalogue_doc.py"


def test_the_page_has_a_row_and_a_source_for_every_entry(tool):
    lines = tool.page().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(names())
    said = [line for line in lines if line.startswith("- `")]
    for e in CATALOGUE:
        assert sum(f"`{e.name}`" in line and e.source.says in line for line in said) == 1
