"""`kvflow doctor`: it sees what is there, what is missing, and that the core lives without NIXL."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from attrs import evolve

import kvflow
from kvflow import cli, doctor

BLOCK_IMPORTS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

NIXL = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_ep")


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter in which `blocked` modules are not installed."""
    script = BLOCK_IMPORTS.format(blocked=set(blocked)) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )


def doctor_without(*blocked: str) -> tuple[int, dict]:
    done = run_without(blocked, "from kvflow.cli import main\nsys.exit(main(['doctor', '--json']))")
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    return done.returncode, {f["name"]: f for f in report["findings"]} | {"works": report["works"]}


def test_the_blocker_blocks():
    done = run_without(NIXL, "import nixl_cu12")
    assert done.returncode == 1
    assert "No module named 'nixl_cu12'" in done.stderr


def test_fault_k10_transfers_work_without_nixl():
    """Import everything public and move bytes in process on a machine without NIXL or triton."""
    done = run_without(
        (*NIXL, "triton"),
        """
        import kvflow, kvflow.layouts.spec, kvflow.transfers.planner, kvflow.models
        import kvflow.server, kvflow.comm, kvflow.kernels.rows, kvflow.engine.api
        from kvflow.doctor import look_at_transfers
        finding = look_at_transfers()
        print(finding.status, finding.detail)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok 10 bytes over 2 links, equal to their source\n"


def test_fault_k10_doctor_says_what_missing_nixl_costs():
    status, found = doctor_without(*NIXL)
    assert status == 0
    assert found["works"] is True
    assert found["nixl"]["status"] == "missing"
    assert "--transport nixl" in found["nixl"]["cost"]
    assert "kvflow[nixl]" in found["nixl"]["cost"]


def test_without_torch_the_core_does_not_work():
    status, found = doctor_without("torch")
    assert status == 1
    assert found["works"] is False
    assert found["torch"]["status"] == "missing"
    assert found["in-process transfer"]["status"] == "broken"


@pytest.fixture(scope="module")
def findings() -> tuple[doctor.Finding, ...]:
    return doctor.examine()


def test_every_package_of_the_project_is_looked_at(findings):
    names = {f.name for f in findings}
    assert {p.distribution for p in doctor.PACKAGES} <= names
    assert {"python", "kvflow", "nixl", "gpu", "cpu"} <= names
    assert doctor.works(findings)
    assert all(f.cost for f in findings if f.status != "ok")


def test_nixl_is_tried_not_assumed(findings, monkeypatch, tmp_path):
    pytest.importorskip("nixl_cu12")
    real = {f.name: f for f in findings}["nixl"]
    assert real.status == "ok", real.detail
    assert "UCX agent created" in real.detail
    broken = tmp_path / "nixl" / "_api.py"
    broken.parent.mkdir()
    broken.with_name("__init__.py").touch()
    broken.write_text("raise OSError('libucp.so.0: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.look_at_nixl()
    assert finding.status == "broken"
    assert "libucp.so.0" in finding.detail
    assert finding.cost == doctor.NIXL_COST


def test_shared_memory_that_is_not_there():
    finding = doctor.look_at_shared_memory(Path("/nowhere"))
    assert (finding.status, finding.required) == ("missing", False)


def test_text_and_json_say_the_same(findings):
    text, value = doctor.as_text(findings), doctor.as_json(findings)
    assert value["version"] == kvflow.__version__
    assert json.loads(json.dumps(value)) == value
    for finding in value["findings"]:
        assert finding["name"] in text
        assert finding["detail"] in text
        assert finding["cost"] in text


def test_exit_status_follows_the_required_findings(monkeypatch, capsys):
    lost = doctor.Finding("torch", "missing", "not installed", "no moves", required=True)
    monkeypatch.setattr(doctor, "examine", lambda: (lost,))
    assert cli.main(["doctor"]) == 1
    assert "kvflow does not work here; without: torch" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: (evolve(lost, required=False),))
    assert cli.main(["doctor"]) == 0


def test_version_and_unknown_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == kvflow.__version__
    with pytest.raises(SystemExit) as stopped:
        cli.main(["cure"])
    assert stopped.value.code == 2
