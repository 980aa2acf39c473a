"""Every benchmark, one after the other: planning, copies, gathers, transfers between processes.

    python benchmarks/run_all.py

Each prints its own table; within a table all calls took turns, so ratios can be read on a busy
machine too. docs/benchmarks.md says what the columns mean and what was measured when.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("planning.py", "copies.py", "gather_bytes.py", "context_gather.py", "transfer.py")


def main() -> int:
    failed = 0
    for script in SCRIPTS:
        print(f"\n=== {script}", flush=True)
        failed |= subprocess.run([sys.executable, str(HERE / script)]).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
