"""The capability page is what a run gives, and a wrong move would show in it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvflow.errors import TransferError
from kvflow.explain.matrix import KINDS, MODEL, REFUSED, TOKENS, Outcome, run_matrix, run_pair
from kvflow.testing import LawError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools/capability_matrix.py"
    spec = importlib.util.spec_from_file_location("capability_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)  # some 300 moves, byte by byte: seconds alone, minutes on a busy machine
def test_fault_k12_the_committed_page_is_what_a_run_gives(tool: ModuleType) -> None:
    committed = (ROOT / "docs/capabilities.md").read_text(encoding="utf-8")
    assert tool.page() == committed
    assert "✗ " not in committed.replace("✗ would be a failure", "")


def test_a_wrong_move_shows(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [f"{kind.text} {MODEL}" for kind in KINDS[1:3]]

    class Forgets:
        def execute(self, bound: object, sources: object, targets: object) -> None:
            pass

    monkeypatch.setattr(tool, "ReferenceExecutor", Forgets)
    outcome = run_pair(*pair, TOKENS, tool.move)
    assert (outcome.planned, outcome.verified, outcome.moved) == (True, True, False)
    assert not outcome.is_good
    assert outcome.error.startswith("LawError: target rank 0, component latent.0, token 8,")
    assert tool._mark(outcome).startswith("✗ LawError")
    for run in (tool.joint_hit, tool.recovery, tool.streaming):
        small = next(row[-1] for row in tool.SPECIAL if row[-3] is run)
        with pytest.raises(LawError):
            run(MODEL, *small)


def test_a_pair_says_how_far_it_got() -> None:
    refused = run_pair("dcp2 paged(4) tiny/fp8", "dcp2 paged(4) tiny/bfloat16", TOKENS)
    assert refused == Outcome(False, False, None, error=refused.error)
    assert refused.error.startswith("ContentMismatch: content field 'e4m3'")
    unread = run_pair("dcp2 pagd(4) tiny", "dcp2 paged(4) tiny", TOKENS)
    assert "pagd(4)" in unread.error
    good = run_pair("dcp2 paged(4) tiny", "replicated paged(4) tiny", TOKENS)
    assert (good.planned, good.verified, good.moved, good.num_links) == (True, True, None, 2)
    assert good.is_good

    def breaks(*args: object) -> None:
        raise TransferError("gone")

    broken = run_pair("dcp2 paged(4) tiny", "replicated paged(4) tiny", TOKENS, breaks)
    assert broken.error == "TransferError: gone"
    assert not broken.is_good


def test_every_kind_meets_every_kind() -> None:
    met: list[object] = []
    outcomes = run_matrix(KINDS[:3], lambda *case: met.append(case))
    assert len(outcomes) == len(met) == 9
    assert all(outcome.moved for outcome in outcomes.values())
    assert {row.number for row in REFUSED} == {1, 2, 3, 4, 5, 6, 7, 8, 10}
