"""Text of whole layouts: a placement, the paging of each group, and what the cache holds."""

import json
import re
from typing import Any, get_args

from attrs import evolve

from kvflow.errors import LayoutError
from kvflow.layouts.layout import CacheGroup, KVLayout, Stage
from kvflow.layouts.spec import Kind, KVCacheSpec
from kvflow.layouts.text.members import format_members, read_members
from kvflow.layouts.text.placement import (
    PAGINGS,
    format_paging,
    format_placement,
    format_ranks,
    read_paging,
    read_placement,
    read_ranks,
)
from kvflow.layouts.text.scan import TextError, Word, unquoted, words_of
from kvflow.layouts.text.specs import (
    EXPECTED,
    format_spec,
    is_spec,
    read_content,
    read_spec,
    with_content,
)

_GROUP = re.compile(
    r'(?:(?P<name>[\w-]+|"(?:[^"\\]|\\.)*")(?:\[(?P<members>.*)\])?:)?(?P<paging>(?:paged|pool|dense)\([^()]*\))'
)
_EXTENTS = ("heads", "stages", "hosts", "content")


def parse_layout(text: str, spec: KVCacheSpec | None = None) -> KVLayout:
    """The layout that a text says; `spec` is what it holds where the text names nothing.

    Raises `TextError` (a `LayoutError`) pointing at the first word that is wrong.

    >>> str(parse_layout("dcp8(i=1) paged(64) glm-5.3/fp8"))
    'round_robin(8,i=1) kv:paged(64)[101]'
    """
    words = words_of(text)
    on = words[2] if len(words) > 2 and words[1].text == "on" else None
    placement = read_placement(words[0], on)
    groups, specs, extents = _sorted(words[3 if on else 1 :])
    if not groups:
        words[-1].fail(f"to be followed by {PAGINGS}")
    if len(specs) > 1:
        specs[1].fail("one spec, another one was named before")
    for word in specs:
        spec = read_spec(word)
    if spec is None:
        words[-1].fail(f"to be followed by {EXPECTED}")
    if "content" in extents:
        spec = _extended(spec, extents["content"])
    members = tuple(_read_group(spec, *group, len(groups) == 1) for group in groups)
    try:
        return KVLayout(spec, placement, members, **_read_extents(spec, extents))
    except TextError:
        raise
    except LayoutError as error:
        words[0].fail(f"a lawful layout, but {error}")


def parse_spec(text: str) -> KVCacheSpec:
    """What a cache holds, as in the text of a layout: a model, a record or components.

    >>> parse_spec("glm-5.3/fp8").nbytes_per_token
    54728
    """
    words = words_of(text)
    spec = read_spec(words[0])
    for word in words[1:]:
        spec = _extended(spec, word)
    return spec


def _extended(spec: KVCacheSpec, word: Word) -> KVCacheSpec:
    """The spec with the content that a word says besides."""
    content = with_content(spec.content, read_content(word))
    try:
        return evolve(spec, content=content)
    except LayoutError as error:
        word.fail(f"a lawful content, but {error}")


def parse_members(text: str, spec: KVCacheSpec) -> tuple[str, ...]:
    """Names of components, as in the text of a group: ``latent``, ``indexer.0-2+78``, ``all.3``.

    >>> parse_members("all.78", parse_spec("glm-5.3"))
    ('latent.78', 'indexer.78')
    """
    return read_members(spec, Word.alone(text))


def format_layout(layout: KVLayout, spec: KVCacheSpec | None = None) -> str:
    """The text that `parse_layout` reads as this layout; what it holds is left out if it is
    `spec`. Raises `LayoutError` for a sharding or paging that the language does not know.

    >>> format_layout(parse_layout("round_robin(8) kv:paged(64) glm-5.2"))
    'dcp8(i=1) paged(64) glm-5.3/fp8'
    """
    alone = len(layout.groups) == 1
    words = [format_placement(layout.placement)]
    words += [_format_group(layout.spec, group, alone) for group in layout.groups]
    if layout.spec != spec:
        words += format_spec(layout.spec)
    if layout.head_ranks:
        words.append(f"heads({format_ranks(layout.head_ranks)})")
    if layout.stages:
        words.append(f"stages({'|'.join(_format_stage(layout.spec, s) for s in layout.stages)})")
    if layout.hosts:
        words.append(f"hosts({format_ranks(layout.hosts)})")
    return " ".join(words)


_Group = tuple[Word, re.Match[str]]


def _sorted(words: list[Word]) -> tuple[list[_Group], list[Word], dict[str, Word]]:
    """Groups, specs, and the others by their names."""
    groups: list[_Group] = []
    specs, extents = [], {}
    for word in words:
        name = word.text.partition("(")[0]
        if name in _EXTENTS and word.call() is not None:
            if name in extents:
                word.fail(f"{name}(...) once, it was said before")
            extents[name] = word
        elif (match := _GROUP.fullmatch(word.text)) is not None:
            groups.append((word, match))
        elif is_spec(word):
            specs.append(word)
        else:
            called = f"{PAGINGS}; or {', '.join(f'{e}(...)' for e in _EXTENTS)}"
            word.fail(called if "(" in word.text else EXPECTED)
    return groups, specs, extents


# --- heads, stages, hosts -------------------------------------------------------------------------


def _read_extents(spec: KVCacheSpec, words: dict[str, Word]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, key in (("heads", "head_ranks"), ("hosts", "hosts")):
        if name in words:
            said[key] = read_ranks(words[name].sub(len(name) + 1, -1))
    if "stages" in words:
        parts = words["stages"].sub(len("stages") + 1, -1).split("|")
        said["stages"] = tuple(_read_stage(spec, part) for part in parts)
    return said


def _read_stage(spec: KVCacheSpec, word: Word) -> Stage:
    parts = word.split(" ")
    if len(parts) != 3 or parts[1].text != "on":
        word.fail("components on ranks, like all.0-38 on 0-3")
    (ranks,) = read_ranks(parts[2])
    return Stage(read_members(spec, parts[0]), tuple(ranks))


def _format_stage(spec: KVCacheSpec, stage: Stage) -> str:
    return f"{format_members(spec, stage.components)} on {format_ranks([stage.ranks])}"


# --- groups ---------------------------------------------------------------------------------------


def _read_group(spec: KVCacheSpec, word: Word, match: re.Match[str], alone: bool) -> CacheGroup:
    """`paging`, `name:paging` or `name[members]:paging`. Of several groups, one that is called
    like a kind holds that kind; any other holds everything, unless its members are said."""
    name = match["name"] or "kv"
    if name.startswith('"'):
        name = unquoted(word.sub(match.start("name"), match.end("name")))
    paging = read_paging(word.sub(match.start("paging")))
    if match["members"] is None:
        return CacheGroup(name, _usual_members(spec, name, alone), paging)
    inner = word.sub(match.start("members"), match.end("members"))
    return CacheGroup(name, read_members(spec, inner), paging)


def _usual_members(spec: KVCacheSpec, name: str, alone: bool) -> tuple[str, ...]:
    if name in get_args(Kind) and not alone:
        return spec.select(kind=name)  # type: ignore[arg-type]
    return spec.names


def _format_group(spec: KVCacheSpec, group: CacheGroup, alone: bool) -> str:
    name = group.name if re.fullmatch(r"[\w-]+", group.name) else json.dumps(group.name)
    paging = format_paging(group.paging)
    if group.components == _usual_members(spec, group.name, alone):
        return paging if group.name == "kv" else f"{name}:{paging}"
    return f"{name}[{format_members(spec, group.components)}]:{paging}"
