"""Runs the `kvflow` commands of docs/explain.md and writes what they print, and their drawings.

python tools/explain_page.py
"""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from kvflow.cli import main as kvflow

PAGE = Path(__file__).parents[1] / "docs" / "explain.md"
SHOWN = re.compile(r"(```sh\nkvflow (?P<command>.*)\n```\n\n```text\n)(?:.|\n)*?(?=```)")


def fresh(page: str) -> str:
    """The page with the output of each command below it; drawings land where commands say."""
    return SHOWN.sub(lambda match: match[1] + _output(match["command"]), page)


def _output(command: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = kvflow(shlex.split(command))
    if bool(status) == bool(out.getvalue()):
        raise SystemExit(f"{command}: exit status {status}, and prints {out.getvalue()!r}")
    return out.getvalue() or err.getvalue()


def main() -> int:
    """Writes the page; run at the root of the repository. Returns the exit status."""
    PAGE.write_text(fresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
