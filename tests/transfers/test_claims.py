"""What a plan may claim: ranges inside both domains and of a bounded length."""

import re

import pytest

from kvflow.errors import PlanError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.text import parse_spec
from kvflow.transfers.claims import MAX_TOKENS, check_tokens

SPEC = parse_spec("tiny")


def over(start: int, stop: int) -> KVLayout:
    return KVLayout.uniform(SPEC, Placement.simple(Replicated(start, stop)), Paged(4))


def test_the_longest_range_of_one_plan() -> None:
    assert MAX_TOKENS == 67_108_864
    side = over(0, 2**40)
    check_tokens(side, side, (5, MAX_TOKENS + 5))
    said = f"tokens [5, {MAX_TOKENS + 6}) are {MAX_TOKENS + 1}, one plan moves at most {MAX_TOKENS}"
    with pytest.raises(PlanError, match=f"^{re.escape(said)}$"):
        check_tokens(side, side, (5, MAX_TOKENS + 6))


@pytest.mark.parametrize(
    ("tokens", "side"),
    [((2, 9), "source"), ((3, 11), "source"), ((3, 10), "target"), ((6, 5), "source")],
)
def test_ranges_lie_inside_both_domains(tokens: tuple[int, int], side: str) -> None:
    src, dst = over(3, 10), over(0, 9)
    for lawful in ((3, 9), (3, 3), (9, 9)):
        check_tokens(src, dst, lawful)
    domain = {"source": "[3, 10)", "target": "[0, 9)"}[side]
    said = f"must be a range inside the {side}'s {domain}"
    with pytest.raises(PlanError, match=f"{re.escape(said)}$"):
        check_tokens(src, dst, tokens)
