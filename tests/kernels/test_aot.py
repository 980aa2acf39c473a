"""What the compiler makes of the kernels, with no GPU: registers, spills, 16-byte accesses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("aot_report.py")
MAX_REGISTERS = 64
# At least so many 16-byte (loads, stores) per kernel; -1: every store is one. A packed indexer
# row has 132 bytes and its scales have 4, so those sides cannot be wider than a word; a packed
# row of 584 bytes has 8-byte steps, a VNNI page items of 4 bytes.
WIDE = {
    "gather latent 0": (1, -1),
    "scatter latent 0": (1, -1),
    "gather latent outer 0": (1, -1),
    "scatter latent outer 0": (1, -1),
    "gather 584 0": (1, 0),
    "scatter 584 0": (0, -1),
    "gather 584 1": (0, 0),
    "scatter 584 1": (0, 0),
    "gather NHD 0": (1, -1),
    "scatter NHD 0": (1, -1),
    "gather HND 0": (1, -1),
    "scatter HND 0": (1, -1),
    "gather tiled 0": (0, 0),
    "scatter tiled 0": (0, 0),
    "repack 64 -> 16 0": (1, -1),
    "repack index 64 -> 16 0": (1, -1),
    "repack index 64 -> 16 1": (0, 0),
    "repack NHD -> HND 0": (1, -1),
    "repack NHD -> HND 1": (1, -1),
    "gather index 0": (1, 0),
    "scatter index 0": (0, -1),
    "gather index 1": (0, 0),
    "scatter index 1": (0, 0),
    "quantise latent bfloat16": (1, 0),
    "dequantise latent bfloat16": (0, 1),
    "quantise key bfloat16": (0, 0),
    "dequantise key bfloat16": (0, 0),
}


@pytest.fixture(scope="module", params=["sm_90", "gfx942"])
def reports(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), request.param],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return request.param, {report["kernel"]: report for report in found}


def problems(report: dict, wide: tuple[int, int]) -> list[str]:
    loads, stores = wide
    stores = report["stores"] if stores < 0 else stores
    limits = {
        "too many registers": report["registers"] > MAX_REGISTERS,
        "spills": report["spills"] > 0,
        "narrow loads": report["wide_loads"] < loads,
        "narrow stores": report["wide_stores"] < stores,
    }
    return [name for name, broken in limits.items() if broken]


def test_every_kernel_is_within_its_limits(reports):
    _, found = reports
    broken = {name: problems(found[name], wide) for name, wide in WIDE.items()}
    assert not {name: what for name, what in broken.items() if what}


def test_a_misaligned_view_and_a_spill_are_seen(reports):
    target, found = reports
    assert problems(found["gather misaligned 0"], WIDE["gather latent 0"]) == ["narrow loads"]
    assert problems(found["scatter misaligned 0"], WIDE["scatter latent 0"]) == ["narrow stores"]
    if target == "sm_90":  # ROCm's compiler ignores a limit on registers
        assert "spills" in problems(found["starved"], WIDE["quantise latent bfloat16"])
    assert problems({**found["gather latent 0"], "registers": 65}, (1, -1)) == [
        "too many registers"
    ]


def test_the_machine_code_accesses_memory_as_ptx_says(reports):
    target, found = reports
    if target == "sm_90":
        whole = ("stores", "wide_loads", "wide_stores")  # ptxas drops loads that repeat
        for name in ("gather latent 0", "gather index 0"):
            machine = found[name]["machine"]
            assert {k: machine[k] for k in whole} == {k: found[name][k] for k in whole}
            assert machine["spills"] == 0
        assert found["starved"]["machine"]["spills"] > 0
