"""The two identities of a cache: what its bytes mean (content), and where they lie (placement).

Content must be equal between two caches or their bytes must not be exchanged; placement may
differ, and a difference yields a plan. Both are tuples of named texts, so that a difference is
always reported as a field with two values; the fingerprint is for keys only.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator

import attrs
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.record import Record
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.layouts.values import items_of, tuple_of

Pairs = tuple[tuple[str, str], ...]

MEANING = (
    "spec_version",
    "model",
    "weights",
    "kv_dtype",
    "e4m3",
    "scale_group",
    "scale_rounding",
    "rope_order",
    "rms_norm_eps",
    "norm_stage",
)
"""What every content states besides its components, in the order of comparison: the version of
this list, the model and the digest of its weights; the format of the cache, the e4m3 variant, how
many values share a scale and how scales are rounded; the order of rope pairs in a row, the eps of
the norms, and behind which norm a row is taken. Other fields may follow; they are compared too."""

FORMAT = ("kv_dtype", "e4m3", "scale_group", "scale_rounding")
"""The fields of `MEANING` that say how values are stored; converting a cache changes these alone.
"""


def _pairs(values: Iterable[tuple[str, str]]) -> Pairs:
    pairs = tuple((key, value) for key, value in items_of(values))
    tuple_of(str, [text for pair in pairs for text in pair])
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise LayoutError(f"fields named twice: {sorted({k for k in keys if keys.count(k) > 1})}")
    return pairs


@frozen
class Difference:
    """A field in which two identities differ; None on the side that does not have it. `components`
    are those it is said of, empty for a field of the whole."""

    field: str
    source: str | None
    target: str | None
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        of = f" of {_shortened(self.components)}" if self.components else ""
        return f"{self.field}{of}: source {self.source!r}, target {self.target!r}"


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"


@frozen
class ContentIdentity:
    """What the bytes of a cache mean: `meaning` in the order of `MEANING`, then by name;
    `components` by name, each as its part of the model and its fields.

    >>> from kvflow.layouts.spec import GLM_5_3
    >>> content = ContentIdentity.of(KVCacheSpec.from_config(GLM_5_3))
    >>> dict(content.components)["latent.78"]
    'mtp latent:float8_e4m3fn[512] scale:float32[4] rope:bfloat16[64]'
    """

    meaning: Pairs = field(converter=_pairs)
    components: Pairs = field(converter=_pairs)

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "ContentIdentity":
        """Order and grouping of the components do not matter, their absolute layer ids do."""
        rank = {name: i for i, name in enumerate(MEANING)}
        meaning = sorted(spec.content, key=lambda pair: (rank.get(pair[0], len(rank)), pair[0]))
        inside = sorted(spec.components, key=lambda c: (c.layer_id, c.kind))
        return cls(meaning, [(c.name, _meaning_of(c)) for c in inside])

    @property
    def unstated(self) -> tuple[str, ...]:
        """Fields of `MEANING` that this content leaves open."""
        stated = {key for key, value in self.meaning if value.strip()}
        return tuple(name for name in MEANING if name not in stated)

    def differences(self, target: "ContentIdentity") -> Iterator[Difference]:
        """From this side (the source) to another, first things first."""
        mine, theirs = dict(self.meaning), dict(target.meaning)
        rest = sorted((mine.keys() | theirs.keys()) - set(MEANING))
        for name in (*MEANING, *rest):
            if mine.get(name) != theirs.get(name):
                yield Difference(name, mine.get(name), theirs.get(name))
        here, there = dict(self.components), dict(target.components)
        for name in dict.fromkeys((*here, *there)):
            if here.get(name) != there.get(name):
                yield Difference("component", here.get(name), there.get(name), (name,))

    @property
    def fingerprint(self) -> str:
        """sha256 (hex), equal on any machine and in any process; for keys, never for messages."""
        return _fingerprint(self.meaning, self.components)


@frozen
class PlacementIdentity:
    """Where the bytes of a cache lie: `whole` says how tokens are dealt to which ranks,
    `components` (name, then pairs) the group whose block table it shares, block size, memory and
    page arrangement of each."""

    whole: Pairs = field(converter=_pairs)
    components: tuple[tuple[str, Pairs], ...]

    @classmethod
    def of(cls, layout: KVLayout) -> "PlacementIdentity":
        sharding = layout.placement.sharding
        whole = [("sharding", type(sharding).__name__), ("num_shards", str(sharding.num_shards))]
        whole += [pair for pair in _parameters(sharding) if pair not in whole]
        whole.append(("ranks", "|".join(",".join(map(str, g)) for g in layout.placement.ranks)))
        further = [f.name for f in attrs.fields(KVLayout) if f.name not in _SAID_APART]
        whole += [(name, str(getattr(layout, name))) for name in further]
        inside = sorted(layout.spec.components, key=lambda c: (c.layer_id, c.kind))
        return cls(whole, tuple((c.name, _place_of(c, layout)) for c in inside))

    def differences(self, target: "PlacementIdentity") -> tuple[Difference, ...]:
        """Field by field; a field that differs alike in several shared components is said once."""
        mine, theirs = dict(self.whole), dict(target.whole)
        found = [
            Difference(name, mine.get(name), theirs.get(name))
            for name in dict.fromkeys((*mine, *theirs))
            if mine.get(name) != theirs.get(name)
        ]
        there = dict(target.components)
        alike: dict[tuple[str, str | None, str | None], list[str]] = {}
        for component, pairs in self.components:
            others = dict(there.get(component, pairs))
            for name, value in pairs:
                if value != others.get(name):
                    alike.setdefault((name, value, others.get(name)), []).append(component)
        return (*found, *(Difference(*key, tuple(names)) for key, names in alike.items()))

    @property
    def fingerprint(self) -> str:
        """sha256 (hex): layouts of equal placement, and of the same component names, share it."""
        return _fingerprint(self.whole, self.components)


_SAID_APART = ("spec", "placement", "groups")


def _meaning_of(component: Component) -> str:
    return f"{component.part} {_fields_of(component.record)}"


def _fields_of(record: Record) -> str:
    """Every field as name:dtype[elements], heads included where there are several."""
    texts = []
    for f in record.fields:
        shape = f"{f.num_heads}x{f.num_elements}" if f.num_heads > 1 else str(f.num_elements)
        texts.append(f"{f.name}:{f.dtype}[{shape}]")
    return " ".join(texts)


def _parameters(sharding: object) -> Pairs:
    kind = type(sharding)
    if not attrs.has(kind):
        return (("parameters", str(sharding)),)
    return tuple((f.name, str(getattr(sharding, f.name))) for f in attrs.fields(kind))


def _place_of(component: Component, layout: KVLayout) -> Pairs:
    group = layout.group_of(component.name)
    paging = group.paging
    return (
        ("group", group.name),
        ("block_size", str(paging.block_size)),
        ("memory", type(paging).__name__),
        ("arrangement", str(component.record.arrangement)),
    )


def _fingerprint(*said: object) -> str:
    return hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()
