"""The first field in which two values differ: what a refused stage says."""

from collections.abc import Iterator

import attrs


def first_difference(a: object, b: object) -> str | None:
    """The first field in which two layouts differ, with both values, or None if they are equal.

    >>> from kvflow.layouts.sharding import RoundRobin
    >>> first_difference(RoundRobin(4, 1), RoundRobin(4, 16))
    'interleave is 1 here, 16 there'
    """
    return next(_differences(a, b, ""), None)


def _differences(a: object, b: object, path: str) -> Iterator[str]:
    if a == b:
        return
    kind = type(a)
    if kind is type(b) and attrs.has(kind):
        for f in attrs.fields(kind):
            yield from _differences(getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}")
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{i}]")
    else:
        yield f"{path.lstrip('.') or 'the value'} is {a} here, {b} there"
