"""Keys of a configuration: the fields of attrs classes, those of nested classes as tables.

Every flag, every key of a file and every line of docs/configuration.md is made from the fields
themselves, so a new field is reachable at once.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from attrs import NOTHING, Attribute, Factory, fields, frozen, has, resolve_types

from kvflow.errors import LayoutError

T = TypeVar("T")
Tree = Mapping[str, Any]
"""Values by key, those of a table as another mapping; a key that is absent says nothing."""

_RULES: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


@frozen
class Key:
    """A field. `path` is its name below those of its tables, `kind` what its values are, and
    `choices` all of them, if they are few. `default` is None for none."""

    path: tuple[str, ...]
    kind: type
    choices: tuple[Any, ...] = ()
    default: Any = None

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def rule(self) -> str:
        """What a value must be."""
        return f"one of {list(self.choices)}" if self.choices else _RULES[self.kind]

    def checked(self, value: Any) -> Any:
        """A value of a file as the field takes it. Raises `LayoutError` for another type."""
        if self.choices:
            lawful = type(value) is self.kind and value in self.choices
        elif self.kind is float:
            lawful = type(value) in (int, float)
        elif self.kind is Path:
            lawful = isinstance(value, str) and value != ""
        else:
            lawful = type(value) is self.kind
        if not lawful:
            raise LayoutError(f"{self.name} = {value!r}, must be {self.rule}")
        return self.kind(value) if self.kind in (float, Path) else value


def keys_of(cls: type, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Key]:
    """The keys of an attrs class by their paths, in order. Raises `TypeError` for a field whose
    type no file could hold."""
    found: dict[tuple[str, ...], Key] = {}
    for attribute, kind in _fields(cls):
        path = (*above, attribute.name)
        if has(kind):
            found |= keys_of(kind, path)
        else:
            found[path] = Key(path, *_kind(path, kind), default=_default(attribute))
    return found


def checked_tree(tree: Tree, keys: Mapping[tuple[str, ...], Key]) -> dict[str, Any]:
    """What a file says, as the fields take it. Raises `LayoutError` for a key that is none, a
    value of a wrong type, and a value where a table belongs, by name."""
    return _checked(tree, keys, ())


def merged(*trees: Tree) -> dict[str, Any]:
    """Later trees have precedence."""
    result: dict[str, Any] = {}
    for tree in trees:
        for name, value in tree.items():
            old = result.get(name, {})
            result[name] = merged(old, value) if isinstance(value, Mapping) else value
    return result


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A tree from values by path."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        table = tree
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = value
    return tree


def build(cls: type[T], tree: Tree, above: tuple[str, ...] = ()) -> T:
    """An instance of an attrs class from a tree of lawful keys. Raises `LayoutError` for values
    that the class refuses, with the name of its table."""
    values = dict(tree)
    for attribute, kind in _fields(cls):
        name = attribute.name
        if has(kind) and name in tree:
            values[name] = build(kind, merged(_defaults(attribute), tree[name]), (*above, name))
    try:
        return cls(**values)
    except LayoutError as error:
        raise LayoutError(": ".join((*above, str(error)))) from error


def tree_of(instance: Any) -> dict[str, Any]:
    """All values of an attrs instance that are not None."""
    tree = {}
    for attribute, kind in _fields(type(instance)):
        value = getattr(instance, attribute.name)
        if value is not None:
            tree[attribute.name] = tree_of(value) if has(kind) else value
    return tree


def _fields(cls: Any) -> Iterator[tuple["Attribute[Any]", Any]]:
    for attribute in fields(resolve_types(cls)):
        yield attribute, attribute.type


def _kind(path: tuple[str, ...], annotation: Any) -> tuple[type, tuple[Any, ...]]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and len(inner) == 2 and NoneType in inner:
        return _kind(path, next(kind for kind in inner if kind is not NoneType))
    if origin is Literal:
        return type(inner[0]), inner
    if annotation in _RULES:
        return annotation, ()
    raise TypeError(f"{'.'.join(path)} is a {annotation}, must be one of {list(_RULES)}")


def _default(attribute: "Attribute[Any]") -> Any:
    default: Any = attribute.default
    if isinstance(default, Factory):  # type: ignore[arg-type]
        return default.factory()
    return None if default is NOTHING else default


def _defaults(attribute: "Attribute[Any]") -> dict[str, Any]:
    default = _default(attribute)
    return {} if default is None else tree_of(default)


def _checked(
    tree: Tree, keys: Mapping[tuple[str, ...], Key], above: tuple[str, ...]
) -> dict[str, Any]:
    tables = {path[:n] for path in keys for n in range(1, len(path))}
    result: dict[str, Any] = {}
    for name, value in tree.items():
        path = (*above, name)
        if path in keys:
            result[name] = keys[path].checked(value)
        elif path not in tables:
            raise LayoutError(_unknown(".".join(path), [key.name for key in keys.values()]))
        elif isinstance(value, Mapping):
            result[name] = _checked(value, keys, path)
        else:
            raise LayoutError(f"{'.'.join(path)} = {value!r}, must be a table")
    return result


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    hint = f", is {near[0]} meant?" if near else ""
    return f"{name} is no key of a configuration{hint}"
