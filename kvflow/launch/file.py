"""One TOML file holds a whole configuration: read with its mistakes named, and written back."""

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvflow.errors import LayoutError
from kvflow.launch.keys import Key, Tree, checked_tree


def read_toml(path: Path, keys: Mapping[tuple[str, ...], Key]) -> dict[str, Any]:
    """What a file says. Raises `LayoutError`, with the file's name, for a text that is no TOML, a
    key that is none of `keys`, or a value of a wrong type; and `OSError` for no file."""
    try:
        return checked_tree(tomllib.loads(path.read_text(encoding="utf-8")), keys)
    except ValueError as error:
        raise LayoutError(f"{path}: {error}") from error


def to_toml(tree: Tree) -> str:
    """The file that holds `tree`: its own values, then a table for each mapping. Raises
    `LayoutError` for a text that UTF-8 cannot carry."""
    return "\n".join(_lines(tree, ()))


def _lines(tree: Tree, above: tuple[str, ...]) -> list[str]:
    tables = {name: value for name, value in tree.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_value(v)}" for name, v in tree.items() if name not in tables]
    if above and lines:
        lines = [f"\n[{'.'.join(above)}]", *lines]
    for name, table in tables.items():
        lines += _lines(table, (*above, name))
    return lines


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise LayoutError(f"{text!r} cannot be written to a file, must be text of UTF-8")
    # JSON's escapes are TOML's, but for the one control character that JSON leaves as it is
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
