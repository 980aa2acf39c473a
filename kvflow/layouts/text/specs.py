"""Text of what a cache holds: a model by name, a record, or a list of components."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product, takewhile
from types import MappingProxyType
from typing import Any, get_args

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import Arrangement
from kvflow.layouts.record import KVDType, Record
from kvflow.layouts.spec import GLM_5_3, Component, Kind, KVCacheSpec, Part
from kvflow.layouts.text.records import (
    RECORDS,
    format_record,
    is_record,
    order_text,
    read_order,
    read_record,
)
from kvflow.layouts.text.scan import TextError, Word, unquoted

TINY: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "index_head_dim": 8,
        "indexer_types": ["full", "shared"],
    }
)
"""A model small enough to move by hand: five components, three layers."""

MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"glm-5.3": GLM_5_3, "glm-5.2": GLM_5_3, "tiny": TINY}
)
"""Models by name. The caches of GLM-5.2 and 5.3 have the same shape."""

MAX_LAYERS = 1 << 16
"""Layers of one spec that a text can name."""
_INDEX = ("planar", "row")
_GQA = re.compile(r"gqa\(([1-9][0-9]*),([1-9][0-9]*),([1-9][0-9]*)\)(?:/(\w+))?(?:\[(.*)\])?")
EXPECTED = (
    f"a model ({', '.join(MODELS)}, gqa(LAYERS,HEADS,DIM)), "
    f"a record ({', '.join(RECORDS)}) or {{component:record,...}}"
)
_ITEM = re.compile(
    r"(?P<kind>\w+)\.(?P<layers>[0-9+/-]+)(?:@(?P<part>\w+))?:(?P<record>.*)", re.DOTALL
)
_LAYERS = re.compile(r"([0-9]+)(?:-([0-9]+)(?:/([0-9]+))?)?")


def is_spec(word: Word) -> bool:
    """Whether a word looks like a spec."""
    known = word.text.split("/")[0] in MODELS or word.text.startswith(("{", "gqa("))
    return known or is_record(word)


def read_spec(word: Word) -> KVCacheSpec:
    """`MODEL[/DTYPE][/row]`, a record (one component, layer 0), or components in braces: those of
    a brace stand in layer order, several braces follow each other."""
    try:
        if word.text.startswith("{"):
            return KVCacheSpec(tuple(c for brace in _braces(word) for c in _read_brace(brace)))
        if word.text.startswith("gqa("):
            return _read_gqa(word)
        if is_record(word):
            record = read_record(word)
            return KVCacheSpec((Component(_kind_of(record), 0, record),))
        return _read_model(word)
    except TextError:
        raise
    except LayoutError as error:
        word.fail(f"a lawful spec, but {error}")


def _kind_of(record: Record) -> Kind:
    """The kind that a record alone suggests: the language says any other one in braces."""
    name = record.fields[0].name
    if name != "latent" and record.num_heads == 1:
        return "indexer"
    return name if name in get_args(Kind) else "latent"  # type: ignore[return-value]


def _read_model(word: Word) -> KVCacheSpec:
    name, *options = word.split("/")
    if name.text not in MODELS:
        word.fail(EXPECTED)
    dtype, index = "fp8", "planar"
    for option in options:
        if option.text in get_args(KVDType):
            dtype = option.text
        elif option.text in _INDEX:
            index = option.text
        else:
            option.fail(f"one of {', '.join((*get_args(KVDType), *_INDEX))}")
    return _model(name.text, dtype, index)


@lru_cache
def _model(name: str, dtype: str, index: str) -> KVCacheSpec:
    return KVCacheSpec.from_config(MODELS[name], kv_dtype=dtype, index_arrangement=index)  # type: ignore[arg-type]


def _read_gqa(word: Word) -> KVCacheSpec:
    match = _GQA.fullmatch(word.text)
    if match is None:
        word.fail("gqa(LAYERS,HEADS,DIM), with /DTYPE and [order] if wanted")
    layers, heads, dim = (word.sub(*match.span(i)).number(EXPECTED) for i in (1, 2, 3))
    _check_num_layers(word, layers)
    order = read_order(word.sub(match.start(5), match.end(5))) if match[5] else "t h e"
    return _gqa(layers, heads, dim, match[4] or "bfloat16", order)


@lru_cache
def _gqa(
    num_layers: int, num_heads: int, head_dim: int, dtype: str, order: Arrangement | str
) -> KVCacheSpec:
    return KVCacheSpec.of_attention(
        num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        kv_dtype=dtype,
        key_order=order,
        value_order=order,
    )


# --- components -----------------------------------------------------------------------------------


def _braces(word: Word) -> list[Word]:
    """`{a}{b}` as the insides of its braces."""
    found, begin, depth = [], 0, 0
    for at, c in enumerate(word.text):
        if depth <= 0 and c != "{":
            word.sub(at).fail("{component:record,...}")
        depth += (c == "{") - (c == "}")
        if depth <= 0:
            found.append(word.sub(begin + 1, at))
            begin = at + 1
    return found


def _read_brace(word: Word) -> list[Component]:
    components = [c for item in word.split(",") for c in _read_item(item)]
    return sorted(components, key=lambda c: c.layer_id)


def _read_item(word: Word) -> list[Component]:
    match = _ITEM.fullmatch(word.text)
    if match is None:
        word.fail("components as kind.layers:record, like latent.0-77:fp8_ds_mla")
    record = read_record(word.sub(match.start("record")))
    kind, part = match["kind"], match["part"] or "main"
    layers = read_layers(word.sub(match.start("layers"), match.end("layers")))
    return [Component(kind, layer, record, part) for layer in layers]  # type: ignore[arg-type]


def read_layers(word: Word) -> list[int]:
    """`0-2+6-74/4+78` as numbers: ranges with both ends, perhaps with a step."""
    layers: list[int] = []
    for part in word.split("+"):
        match = _LAYERS.fullmatch(part.text)
        if match is None:
            part.fail("layers as 3, 0-77 or 6-74/4, joined by +")
        begin, end, by = (part.sub(*match.span(i)) if match[i] else None for i in (1, 2, 3))
        first = (begin or part).number("a layer")
        last = first if end is None else end.number("a layer")
        step = 1 if by is None else by.number("a step of layers")
        if last < first or step < 1:
            part.fail("layers that ascend")
        chosen = range(first, last + 1, step)
        _check_num_layers(part, len(layers) + len(chosen))
        layers += chosen
    return layers


def _check_num_layers(word: Word, num: int) -> None:
    if num > MAX_LAYERS:
        word.fail(f"at most {MAX_LAYERS} layers, these are {num}")


def format_layers(layers: Sequence[int]) -> str:
    """The inverse of `read_layers` for ascending numbers."""
    parts, left = [], list(layers)
    while left:
        num = _num_steady(left)
        step = (left[num - 1] - left[0]) // max(num - 1, 1)
        if num == 2 and step > 1:  # two numbers are no range, but for neighbours
            num = 1
        said = str(left[0])
        if num > 1:
            said += f"-{left[num - 1]}" + (f"/{step}" if step > 1 else "")
        parts.append(said)
        left = left[num:]
    return "+".join(parts)


def _num_steady(numbers: Sequence[int]) -> int:
    """How many numbers, from the first on, are one step apart."""
    steps = [b - a for a, b in pairwise(numbers)]
    return 1 + sum(1 for _ in takewhile(lambda step: step == steps[0], steps))


def format_spec(spec: KVCacheSpec) -> list[str]:
    """The words of a spec: the model or the components, and the content where it has to be said."""
    for name, known in _named(spec):
        if known.components == spec.components and _extends(known.content, spec.content):
            own = [pair for pair in spec.content if pair not in known.content]
            return [name, *_content_words(own)]
    if len(spec.components) == 1:
        (component,) = spec.components
        if component == Component(_kind_of(component.record), 0, component.record):
            return [format_record(component.record), *_content_words(spec.content)]
    braces = "".join(f"{{{_format_brace(run)}}}" for run in _ordered_runs(spec.components))
    return [braces, *_content_words(spec.content)]


def _named(spec: KVCacheSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """Names that a spec might have, with what each of them means."""
    first = spec.components[0]
    if [f.name for f in first.record.fields] == ["key"] == [first.kind]:
        (field,), order = first.record.fields, order_text(first.record)
        numbers = (len(spec.components) // 2, field.num_heads, field.num_elements)
        usual = "" if order == "row" else f"[{order}]"
        said = f"gqa({','.join(map(str, numbers))})/{field.dtype}{usual}"
        if numbers[0]:
            yield said, _read_gqa(Word.alone(said))
        return
    for name, dtype, index in product(MODELS, get_args(KVDType), _INDEX):
        options = f"/{dtype}" + (f"/{index}" if index != "planar" else "")
        yield name + options, _model(name, dtype, index)


def _extends(known: Iterable[tuple[str, str]], said: Iterable[tuple[str, str]]) -> bool:
    """Whether `said` is what `with_content` makes of `known` and the pairs that are not in it."""
    own = [pair for pair in said if pair not in set(known)]
    return with_content(known, own) == tuple(said)


def _ordered_runs(components: tuple[Component, ...]) -> list[tuple[Component, ...]]:
    """Cut where the layers step back, so that a brace says each run; else one by one."""
    cuts = [
        i for i in range(1, len(components)) if components[i].layer_id < components[i - 1].layer_id
    ]
    edges = [0, *cuts, len(components)]
    runs: list[tuple[Component, ...]] = []
    for a, b in pairwise(edges):
        run = components[a:b]
        text = _format_brace(run)
        same = tuple(_read_brace(Word.alone(text))) == run
        runs += [run] if same else [(c,) for c in run]
    return runs


def _format_brace(components: Iterable[Component]) -> str:
    layers: dict[tuple[Kind, Part, Record], list[int]] = {}
    for c in components:
        layers.setdefault((c.kind, c.part, c.record), []).append(c.layer_id)
    return ",".join(
        f"{kind}.{format_layers(ids)}{'' if part == 'main' else '@' + part}:{format_record(record)}"
        for (kind, part, record), ids in layers.items()
    )


# --- content --------------------------------------------------------------------------------------


def read_content(word: Word) -> list[tuple[str, str]]:
    """`content(key=value,...)`; what is no plain word is quoted as in JSON."""
    call = word.call()
    if call is None or call[0] != "content":
        word.fail("content(key=value,...)")
    pairs = []
    for argument in call[1]:
        parts = argument.split("=")
        if len(parts) != 2:
            argument.fail("key=value")
        pairs.append((unquoted(parts[0]), unquoted(parts[1])))
    return pairs


def with_content(
    known: Iterable[tuple[str, str]], own: Iterable[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """What a model says of its content, and what else is said: sorted if both say something."""
    both = (*known, *own)
    return tuple(sorted(both)) if known and own else both


def _content_words(content: Sequence[tuple[str, str]]) -> list[str]:
    pairs = ",".join(f"{_quoted(key)}={_quoted(value)}" for key, value in content)
    return [f"content({pairs})"] if content else []


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w./-]+", text, re.ASCII) else json.dumps(text)
