"""KVCacheSpec: which components a model caches, in which records."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.record import Arrangement, KVDType, Record, index_record, latent_record

Kind = Literal["latent", "indexer"]
Part = Literal["main", "mtp"]


@frozen
class Component:
    """One cached tensor of one layer. `layer_id` is absolute: MTP layers follow the main ones."""

    kind: Kind
    layer_id: int
    record: Record
    part: Part = "main"

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.layer_id}"


@frozen
class KVCacheSpec:
    """The components of a model, in layer order, and what their bytes mean.

    `content` names what must be equal for two caches to hold the same thing (model, weights
    digest, formats, rope order, ...); it is compared field by field.

    >>> spec = KVCacheSpec.from_config(GLM_5_3, kv_dtype="fp8")
    >>> spec.nbytes_per_token, len(spec.components), spec.block_nbytes(64)
    (54728, 101, 3502592)
    """

    components: tuple[Component, ...]
    content: tuple[tuple[str, str], ...] = field(default=())

    def __attrs_post_init__(self) -> None:
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise LayoutError(f"components named twice: {twice}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.components)

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token over all components."""
        return sum(c.record.nbytes for c in self.components)

    def block_nbytes(self, block_size: int) -> int:
        """Bytes behind one block id that all components share."""
        return sum(c.record.page_nbytes(block_size) for c in self.components)

    def __getitem__(self, name: str) -> Component:
        for c in self.components:
            if c.name == name:
                return c
        raise LayoutError(f"no component {name!r}; the spec has {list(self.names)}")

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
        index_arrangement: Arrangement = "planar",
        content: Mapping[str, str] | None = None,
    ) -> "KVCacheSpec":
        """From the fields of an HF ``glm_moe_dsa`` config: a latent row per layer, an indexer key
        per "full" layer, and both for each of the ``num_nextn_predict_layers`` MTP layers."""
        R, dr, di = (  # noqa: N806 - the field's symbols
            int(config[k]) for k in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
        )
        latent = latent_record(kv_dtype, latent_rank=R, rope_dim=dr)
        key = index_record(kv_dtype, index_dim=di, arrangement=index_arrangement)
        num_layers = int(config["num_hidden_layers"])
        num_mtp = int(config.get("num_nextn_predict_layers") or 0)
        full = full_index_layers(config)
        components = []
        for i in range(num_layers + num_mtp):
            part: Part = "main" if i < num_layers else "mtp"
            components.append(Component("latent", i, latent, part))
            if part == "mtp" or full[i]:
                components.append(Component("indexer", i, key, part))
        meaning = {
            "spec_version": "1",
            "kv_dtype": kv_dtype,
            "rope_order": "interleaved",
            "rms_norm_eps": str(config.get("rms_norm_eps")),
            **(content or {}),
        }
        return cls(tuple(components), tuple(sorted(meaning.items())))


def full_index_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers own an indexer ("full"); the others ("shared") reuse the last full one's top-k.

    HF spells it ``indexer_types`` (or ``index_topk_pattern``, a string of F and S), vLLM as
    ``index_topk_freq`` and ``index_skip_topk_offset``: layer l is full iff
    ``max(l - offset + 1, 0) % freq == 0``. Spellings that disagree are refused.

    >>> full_index_layers({"num_hidden_layers": 5, "index_topk_freq": 3,
    ...                    "index_skip_topk_offset": 2})
    (True, True, False, False, True)
    """
    n = int(config["num_hidden_layers"])
    spellings: dict[str, tuple[bool, ...]] = {}
    if types := config.get("indexer_types"):
        spellings["indexer_types"] = tuple(t == "full" for t in types)
    if pattern := config.get("index_topk_pattern"):
        spellings["index_topk_pattern"] = tuple(t in ("F", "full") for t in pattern)
    if freq := config.get("index_topk_freq"):
        offset = int(config.get("index_skip_topk_offset") or 0)
        spellings["index_topk_freq"] = tuple(
            max(layer - offset + 1, 0) % int(freq) == 0 for layer in range(n)
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
