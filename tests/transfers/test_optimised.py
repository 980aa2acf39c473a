"""``python -O`` changes nothing: the same pairs, the same plans, the same refusals."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

CHILD = Path(__file__).with_name("optimised_child.py")


def test_laws_and_refusals_do_not_rest_on_asserts() -> None:
    runs = [
        subprocess.Popen([sys.executable, *options, str(CHILD)], stdout=subprocess.PIPE, text=True)
        for options in ([], ["-O"])
    ]
    outputs = [run.communicate(timeout=240)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    (plain, *told), (optimised, *told_optimised) = outputs
    assert (plain, optimised) == ("asserts on", "asserts off")
    assert told == told_optimised
    laws = [line.split() for line in told if line.startswith("law ")]
    by_move = [Counter(words[2] for words in laws[nth::3]) for nth in range(3)]
    assert by_move[0] == {"accepted": 40}
    assert set(by_move[1]) == {"LawError"}, "a changed byte is seen in every pair"
    assert by_move[2]["LawError"] > 20, "and tokens that did not move, where there are any"
    refusals = told[len(laws) :]
    assert [line for line in refusals if line == "accepted"] == refusals[:1]
    assert len(refusals) == 19
