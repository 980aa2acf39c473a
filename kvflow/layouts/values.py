"""What the fields of values accept: integers become Python ints, iterables become tuples.

Index arithmetic is exact only in Python ints and int64 arrays, and equal values must be equal in
type, hash and text. So every constructor takes its numbers and sequences through here.
"""

from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from kvflow.errors import LayoutError

T = TypeVar("T")

MOST = 2**62
"""The largest number that a value may hold: arrays of 64 bits hold it too."""


def integer(value: SupportsIndex, what: str = "a value") -> int:
    """`value` as a Python int, numpy's integers included. Raises `LayoutError` for a bool, a
    float, a text and all else that is no integer."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return index(value)
        except TypeError:
            pass
    raise LayoutError(f"{what} is {value!r} ({type(value).__name__}), must be an integer")


def positive(instance: object, attribute: object, value: int) -> None:
    _between(instance, attribute, value, 1)


def not_negative(instance: object, attribute: object, value: int) -> None:
    _between(instance, attribute, value, 0)


def _between(instance: object, attribute: object, value: int, low: int) -> None:
    for lawful, rule in (value >= low, f"at least {low}"), (value <= MOST, f"at most {MOST}"):
        if not lawful:
            name = getattr(attribute, "name", "value")
            raise LayoutError(f"{type(instance).__name__}.{name} = {value}, must be {rule}")


def token_range(tokens: Iterable[SupportsIndex]) -> tuple[int, int]:
    """A start and a stop. Raises `LayoutError` for anything else than two integers."""
    ends = items_of(tokens)
    if len(ends) != 2:
        raise LayoutError(f"tokens {ends} are {len(ends)} numbers, must be a start and a stop: 2")
    return integer(ends[0], "start"), integer(ends[1], "stop")


def items_of(values: object) -> tuple[Any, ...]:
    """The values as a tuple. Raises `LayoutError` for a text or no iterable at all."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise LayoutError(f"expected several values, got {values!r}")
    return tuple(values)


def tuple_of(kind: type[T], values: Iterable[T]) -> tuple[T, ...]:
    """The values as a tuple. Raises `LayoutError` for one of another type, or no iterable."""
    items = items_of(values)
    for item in items:
        if not isinstance(item, kind):
            raise LayoutError(f"expected a {kind.__name__}, got {item!r}")
    return items


def names(values: Iterable[str]) -> tuple[str, ...]:
    return tuple_of(str, values)
