"""Text of a choice of components: `latent`, `indexer.0-2+78`, `all.3`, joined by commas."""

from collections.abc import Sequence
from typing import get_args

from kvflow.layouts.spec import Kind, KVCacheSpec
from kvflow.layouts.text.scan import Word
from kvflow.layouts.text.specs import format_layers, read_layers

KINDS = (*get_args(Kind), "all")


def read_members(spec: KVCacheSpec, word: Word) -> tuple[str, ...]:
    """Names of components, item by item, those of an item in the order of the spec."""
    names: list[str] = []
    for item in word.split(",") if word.text else []:
        kind, dot, _ = item.text.partition(".")
        if kind not in KINDS:
            item.fail(f"one of {', '.join(KINDS)}, with .layers if wanted")
        found = _selected(spec, kind, set(read_layers(item.sub(len(kind) + 1))) if dot else None)
        if not found:
            item.fail(f"components that the cache holds, its first ones are {spec.names[:4]}")
        names += found
    return tuple(names)


def format_members(spec: KVCacheSpec, names: Sequence[str]) -> str:
    """The inverse of `read_members`: each item as long as it can be."""
    items, at = [], 0
    while at < len(names):
        text, length = max(_candidates(spec, names[at:]), key=lambda item: item[1])
        items.append(text)
        at += length
    return ",".join(items)


def _selected(spec: KVCacheSpec, kind: str, layers: set[int] | None) -> list[str]:
    return [
        c.name
        for c in spec.components
        if kind in (c.kind, "all") and (layers is None or c.layer_id in layers)
    ]


def _candidates(spec: KVCacheSpec, names: Sequence[str]) -> list[tuple[str, int]]:
    """Items that select a beginning of `names`, with how many components each selects."""
    found = []
    for kind in ("all", spec[names[0]].kind):
        every = _selected(spec, kind, None)
        if every == list(names[: len(every)]):
            found.append((kind, len(every)))
        else:
            found += _longest(spec, kind, names)
    return found


def _longest(spec: KVCacheSpec, kind: str, names: Sequence[str]) -> list[tuple[str, int]]:
    """The item of some layers of a kind that selects the longest beginning of `names`, if any."""
    for length in range(len(names), 0, -1):
        layers = {spec[name].layer_id for name in names[:length]}
        if _selected(spec, kind, layers) == list(names[:length]):
            return [(f"{kind}.{format_layers(sorted(layers))}", length)]
    return []
