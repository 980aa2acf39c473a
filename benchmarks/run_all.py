"""Every benchmark that compares something, one after the other.

    python benchmarks/run_all.py [--quick] [--traces FILE]

Each prints its own table; within a table all calls took turns, so ratios can be read on a busy
machine too. docs/benchmarks.md says what the columns mean and what was measured when. With --quick
each takes the options below, which make it short and its figures rough. Agent traces are not part
of this repository: what reads them is left out without a file of them.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
QUICK = {
    "planning.py": ("--tokens", "65536", "--rounds", "3"),
    "copies.py": ("--tokens", "2048", "--rows", "16384", "--layers", "6", "--rounds", "3"),
    "gather_bytes.py": ("--tokens", "4096", "--rounds", "3"),
    "context_gather.py": ("--ranks", "4", "--cached", "8192", "--layers", "6"),
    "transfer.py": ("--tokens", "512", "--layers", "3", "--rounds", "3", "--skip-naive"),
    "generate.py": ("--rounds", "1", "--steps", "4", "--prompts", "64"),
    "acceptance.py": ("--texts", "2"),
    "overlap.py": ("--cached", "1024", "--rounds", "3"),
    "selection_curves.py": (),
    "exposed.py": (),
    "streaming.py": ("--tokens", "512", "--chunk", "128", "--repeats", "2"),
    "router_simulation.py": ("--fleets", "2", "--shares", "1", "--live", "20", "--seconds", "420"),
}
"""Scripts in the order they run, and what makes them quick."""
TRACES = "prefix_granularity.py"


def commands(*, quick: bool, traces: Path | None) -> Iterator[list[str]]:
    """Script and options of each benchmark."""
    for script, options in QUICK.items():
        yield [script, *(options if quick else ())]
    if traces is not None:
        yield [TRACES, "--traces", str(traces)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs, rough figures")
    parser.add_argument("--traces", type=Path, help=f"agent sessions for {TRACES}")
    args = parser.parse_args()
    failed = []
    for script, *options in commands(quick=args.quick, traces=args.traces):
        print(f"\n=== {' '.join([script, *options])}", flush=True)
        if subprocess.run([sys.executable, str(HERE / script), *options]).returncode:
            failed.append(script)
    if args.traces is None:
        print(f"\nleft out: {TRACES}, which needs --traces")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
