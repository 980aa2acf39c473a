"""What the fields of values accept, at the borders."""

import numpy as np
import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.values import (
    MOST,
    integer,
    items_of,
    not_negative,
    positive,
    token_range,
    tuple_of,
)


def test_the_borders_of_numbers() -> None:
    for check, low in ((positive, 1), (not_negative, 0)):
        for lawful in (low, low + 1, MOST - 1, MOST):
            check(None, None, lawful)
        with pytest.raises(LayoutError, match=f"= {low - 1}, must be at least {low}$"):
            check(None, None, low - 1)
        with pytest.raises(LayoutError, match=f"= {MOST + 1}, must be at most {MOST}$"):
            check(None, None, MOST + 1)
    assert MOST == 4_611_686_018_427_387_904


def test_integers_of_any_make() -> None:
    assert [integer(np.int8(-3)), integer(2**70)] == [-3, 2**70]
    assert type(integer(np.int64(5))) is int
    for bad, shown in ((True, "True .bool."), (1.0, "1.0 .float."), ("1", "'1' .str.")):
        with pytest.raises(LayoutError, match=f"^start is {shown}, must be an integer$"):
            integer(bad, "start")  # type: ignore[arg-type]


def test_a_range_has_two_ends() -> None:
    assert token_range([np.int64(3), 1]) == (3, 1)
    for bad in ((), (1,), (1, 2, 3)):
        with pytest.raises(LayoutError, match=f"are {len(bad)} numbers, must be a start and a"):
            token_range(bad)
    with pytest.raises(LayoutError, match=r"^start is 1\.5"):
        token_range((1.5, True))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"^stop is True"):
        token_range((1, True))


def test_several_values_are_no_text() -> None:
    assert items_of(x for x in "ab") == ("a", "b")
    for bad in ("ab", 3, None):
        with pytest.raises(LayoutError, match="expected several values"):
            items_of(bad)
    assert tuple_of(str, ["a"]) == ("a",)
    with pytest.raises(LayoutError, match="expected a str, got 1"):
        tuple_of(str, ["a", 1])  # type: ignore[list-item]
