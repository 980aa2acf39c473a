"""benchmarks/run_all.py names scripts and options that exist."""

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent.parent / "benchmarks"
BESIDE = {"kernels.py", "growth.py", "strategies.py", "run_all.py"}
"""Run on their own: they measure one machine, or take long."""


def run_all():
    spec = importlib.util.spec_from_file_location("run_all", HERE / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_benchmark_is_run_with_options_it_has():
    named = set()
    for script, *options in run_all().commands(quick=True, traces=Path("traces")):
        text = (HERE / script).read_text()
        for option in options:
            assert not option.startswith("--") or f'add_argument("{option}"' in text, script
        named.add(script)
    scripts = {p.name for p in HERE.glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    assert named == scripts - BESIDE


def test_traces_and_haste_are_asked_for():
    commands = list(run_all().commands(quick=False, traces=None))
    assert all(not options for _, *options in commands)
    assert ["prefix_granularity.py"] not in commands
