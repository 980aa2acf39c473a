"""KVCacheSpec: which components a model caches, in which records."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import Arrangement
from kvflow.layouts.record import (
    SCALE_GROUP,
    Field,
    KVDType,
    Record,
    index_record,
    latent_record,
)
from kvflow.layouts.values import integer, items_of, not_negative, tuple_of

Kind = Literal["latent", "indexer", "key", "value"]
Part = Literal["main", "mtp"]


@frozen
class Component:
    """One cached tensor of one layer: MLA's latent rows, the indexer's keys, or the keys and the
    values of attention heads. `layer_id` is absolute: MTP layers follow the main ones."""

    kind: Kind
    layer_id: int = field(converter=integer, validator=not_negative)
    record: Record
    part: Part = "main"

    def __attrs_post_init__(self) -> None:
        for value, known in ((self.kind, get_args(Kind)), (self.part, get_args(Part))):
            if value not in known:
                raise LayoutError(f"layer {self.layer_id}: {value!r} must be one of {known}")

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.layer_id}"


def _components(components: Iterable[Component]) -> tuple[Component, ...]:
    return tuple_of(Component, components)


def _content(content: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    pairs = tuple((key, value) for key, value in items_of(content))
    tuple_of(str, [text for pair in pairs for text in pair])
    return pairs


def _check_once(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise LayoutError(f"{what} named twice: {sorted({n for n in names if names.count(n) > 1})}")


@frozen
class KVCacheSpec:
    """The components of a model, in layer order, and what their bytes mean.

    `content` names what must be equal for two caches to hold the same thing (model, weights
    digest, formats, rope order, ...); it is compared field by field.

    >>> spec = KVCacheSpec.from_config(GLM_5_3, kv_dtype="fp8")
    >>> spec.nbytes_per_token, len(spec.components), spec.block_nbytes(64)
    (54728, 101, 3502592)
    """

    components: tuple[Component, ...] = field(converter=_components)
    content: tuple[tuple[str, str], ...] = field(default=(), converter=_content)

    def __attrs_post_init__(self) -> None:
        if not self.components:
            raise LayoutError("a spec has 0 components, must have at least 1")
        _check_once("components", [c.name for c in self.components])
        _check_once("content fields", [key for key, _ in self.content])

    @cached_property
    def _by_name(self) -> Mapping[str, Component]:
        return {c.name: c for c in self.components}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token over all components."""
        return sum(c.record.nbytes for c in self.components)

    def block_nbytes(self, block_size: int) -> int:
        """Bytes behind one block id that all components share."""
        return sum(c.record.page_nbytes(block_size) for c in self.components)

    def __getitem__(self, name: str) -> Component:
        if (component := self._by_name.get(name)) is None:
            raise LayoutError(f"no component {name!r}; the spec has {list(self.names)}")
        return component

    def select(self, *, part: Part | None = None, kind: Kind | None = None) -> tuple[str, ...]:
        """Names of the components of one part or kind."""
        return tuple(
            c.name for c in self.components if part in (None, c.part) and kind in (None, c.kind)
        )

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        kv_dtype: KVDType = "fp8",
        index_arrangement: Arrangement | str = "planar",
        content: Mapping[str, str] | None = None,
    ) -> "KVCacheSpec":
        """From the fields of an HF ``glm_moe_dsa`` config: a latent row per layer, an indexer key
        per "full" layer, and both for each of the ``num_nextn_predict_layers`` MTP layers."""
        R, dr, di = (  # noqa: N806 - the field's symbols
            _whole(config, k, 1) for k in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
        )
        latent = latent_record(kv_dtype, latent_rank=R, rope_dim=dr)
        key = index_record(kv_dtype, index_dim=di, arrangement=index_arrangement)
        full = full_index_layers(config)
        num_layers = len(full)
        num_mtp = _whole(config, "num_nextn_predict_layers", 0, default=0)
        components = []
        for i in range(num_layers + num_mtp):
            part: Part = "main" if i < num_layers else "mtp"
            components.append(Component("latent", i, latent, part))
            if part == "mtp" or full[i]:
                components.append(Component("indexer", i, key, part))
        eps = config.get("rms_norm_eps")
        meaning = _mla_meaning(kv_dtype) | {
            **({} if eps is None else {"rms_norm_eps": str(eps)}),
            **(content or {}),
        }
        return cls(tuple(components), tuple(sorted(meaning.items())))

    @classmethod
    def of_attention(
        cls,
        num_layers: int,
        *,
        num_heads: int,
        head_dim: int,
        kv_dtype: str = "bfloat16",
        key_order: Arrangement | str = "t h e",
        value_order: Arrangement | str = "t h e",
        content: Mapping[str, str] | None = None,
    ) -> "KVCacheSpec":
        """Keys and values of `num_heads` KV heads of `head_dim` elements in every layer (GQA), each
        a component of its own; NHD pages by default."""
        key = Record((Field("key", kv_dtype, head_dim, num_heads),), key_order)
        value = Record((Field("value", kv_dtype, head_dim, num_heads),), value_order)
        components = []
        for i in range(num_layers):
            components += [Component("key", i, key), Component("value", i, value)]
        meaning = {"spec_version": "1", "kv_dtype": kv_dtype, **(content or {})}
        return cls(tuple(components), tuple(sorted(meaning.items())))


def _mla_meaning(kv_dtype: KVDType) -> dict[str, str]:
    """What the bytes of MLA rows and indexer keys mean, as far as the format decides it; model,
    weights and eps come on top (`kvflow.layouts.identity.MEANING`)."""
    fp8 = kv_dtype == "fp8"
    return {
        "spec_version": "1",
        "kv_dtype": kv_dtype,
        "e4m3": "e4m3fn" if fp8 else "none",
        "scale_group": f"latent {SCALE_GROUP}, key whole" if fp8 else "none",
        "scale_rounding": "latent to nearest, key up to a power of two" if fp8 else "none",
        "rope_order": "interleaved",
        "norm_stage": "latent and key behind their norms, rope behind the rotation",
    }


def full_index_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers own an indexer ("full"); the others ("shared") reuse the last full one's top-k.

    HF spells it ``indexer_types`` (or ``index_topk_pattern``, a string of F and S), vLLM as
    ``index_topk_freq`` and ``index_skip_topk_offset``: layer l is full iff
    ``max(l - offset + 1, 0) % freq == 0``. Spellings that disagree are refused.

    >>> full_index_layers({"num_hidden_layers": 5, "index_topk_freq": 3,
    ...                    "index_skip_topk_offset": 2})
    (True, True, False, False, True)
    """
    n = _whole(config, "num_hidden_layers", 0)
    spellings: dict[str, tuple[bool, ...]] = {}
    for key in ("indexer_types", "index_topk_pattern"):
        if config.get(key) is not None:
            spellings[key] = _read_spelling(key, config[key])
    if config.get("index_topk_freq") is not None:
        freq = _whole(config, "index_topk_freq", 1)
        offset = _whole(config, "index_skip_topk_offset", 0, default=0)
        spellings["index_topk_freq"] = tuple(
            max(layer - offset + 1, 0) % freq == 0 for layer in range(n)
        )
    if not spellings:
        return (True,) * n
    first, *others = spellings
    for other in others:
        if spellings[other] != spellings[first]:
            raise LayoutError(
                f"{first} says full layers are {_full_ids(spellings[first])}, "
                f"{other} says {_full_ids(spellings[other])}; they must agree"
            )
    full = spellings[first]
    if len(full) != n:
        raise LayoutError(f"{first} describes {len(full)} layers, num_hidden_layers is {n}")
    if n and not full[0]:
        raise LayoutError(f"{first} makes layer 0 shared, but no layer before it owns a top-k")
    return full


_FULL = {"full": True, "F": True, "shared": False, "S": False}


def _read_spelling(key: str, words: Iterable[Any]) -> tuple[bool, ...]:
    for i, word in enumerate(words if isinstance(words, str) else items_of(words)):
        if not isinstance(word, str) or word not in _FULL:
            raise LayoutError(f"{key}[{i}] is {word!r}, must be one of {list(_FULL)}")
    return tuple(_FULL[word] for word in words)


def _whole(config: Mapping[str, Any], key: str, low: int, default: int | None = None) -> int:
    """A number of the config, which is no fraction and at least `low`."""
    value: Any = config.get(key)
    number = integer(default if value is None else value, key)  # type: ignore[arg-type]
    if number < low:
        raise LayoutError(f"{key} is {number}, must be at least {low}")
    return number


def _full_ids(full: tuple[bool, ...]) -> list[int]:
    return [i for i, f in enumerate(full) if f]


GLM_5_3: Mapping[str, Any] = {
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rms_norm_eps": 1e-5,
}
"""The fields of GLM-5.3's config that shape its KV cache."""
