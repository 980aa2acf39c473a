"""Runs `interpreter_suite.py` in a process of its own: the interpreter must be chosen before triton
is first imported, and an interpreted process can compile nothing afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(sys.platform != "linux", reason="triton has no wheel elsewhere")
def test_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "interpreter_suite.py"],
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
