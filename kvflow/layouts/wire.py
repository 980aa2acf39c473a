"""Layouts as plain dicts of JSON types, and back: what peers tell each other about their caches.

A layout that arrives is built through the same constructors as any other, so it is lawful or it
raises. `FORM` is checked first; unknown kinds and fields are refused.
"""

from typing import Any

import attrs

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import CacheGroup, KVLayout, Stage
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, Paged, Pool
from kvflow.layouts.record import Field, Record
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import Component, KVCacheSpec

FORM = 2
"""Version of the wire form."""

_KINDS: dict[str, type] = {
    c.__name__: c for c in (RoundRobin, Replicated, BalancedChunks, Contiguous, Paged, Dense, Pool)
}


def layout_to_wire(layout: KVLayout) -> dict[str, Any]:
    """A dict of str, int, list and dict only."""
    return {
        "form": FORM,
        "content": [list(pair) for pair in layout.spec.content],
        "components": [_component_to_wire(c) for c in layout.spec.components],
        "sharding": _kind_to_wire(layout.placement.sharding),
        "ranks": [list(group) for group in layout.placement.ranks],
        "groups": [
            {"name": g.name, "components": list(g.components), "paging": _kind_to_wire(g.paging)}
            for g in layout.groups
        ],
        "head_ranks": [list(group) for group in layout.head_ranks],
        "stages": [[list(s.components), list(s.ranks)] for s in layout.stages],
        "hosts": [list(host) for host in layout.hosts],
    }


def layout_from_wire(data: dict[str, Any]) -> KVLayout:
    """The inverse of `layout_to_wire`. Raises `LayoutError` for another form or unlawful data."""
    if not isinstance(data, dict):
        raise LayoutError(f"a layout is a dict, got {type(data).__name__}")
    if type(data.get("form")) is not int or data["form"] != FORM:
        raise LayoutError(f"layout has wire form {data.get('form')!r}, this side reads {FORM}")
    try:
        content = tuple((key, value) for key, value in data["content"])
        spec = KVCacheSpec(tuple(map(_component_from_wire, data["components"])), content)
        groups = tuple(
            CacheGroup(g["name"], g["components"], _kind_from_wire(g["paging"]))
            for g in data["groups"]
        )
        stages = tuple(Stage(components, ranks) for components, ranks in data["stages"])
        placement = Placement(_kind_from_wire(data["sharding"]), data["ranks"])
        return KVLayout(spec, placement, groups, data["head_ranks"], stages, data["hosts"])
    except LayoutError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LayoutError(f"malformed layout: {error!r}") from error


def _component_to_wire(c: Component) -> dict[str, Any]:
    fields = [[f.name, f.dtype, f.num_elements, f.num_heads] for f in c.record.fields]
    return {
        "kind": c.kind,
        "layer_id": c.layer_id,
        "part": c.part,
        "fields": fields,
        "arrangement": str(c.record.arrangement),
    }


def _component_from_wire(data: dict[str, Any]) -> Component:
    fields = tuple(Field(name, dtype, n, heads) for name, dtype, n, heads in data["fields"])
    record = Record(fields, data["arrangement"])
    return Component(data["kind"], data["layer_id"], record, data["part"])


def _kind_to_wire(value: Any) -> dict[str, Any]:
    return {"kind": type(value).__name__, **attrs.asdict(value)}


def _kind_from_wire(data: dict[str, Any]) -> Any:
    fields = dict(data)
    kind = fields.pop("kind")
    if kind not in _KINDS:
        raise LayoutError(f"unknown kind {kind!r}, must be one of {sorted(_KINDS)}")
    return _KINDS[kind](**fields)
