"""GlmConfig: the fields of a ``glm_moe_dsa`` config that a forward pass depends on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import NOTHING, fields, frozen

from kvflow.errors import KvflowError
from kvflow.layouts.arrangement import Arrangement
from kvflow.layouts.record import KVDType
from kvflow.layouts.spec import KVCacheSpec, full_index_layers


class ConfigError(KvflowError, ValueError):
    """A model configuration that is malformed, or asks for something kvflow does not compute."""


_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("glm_moe_dsa",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "num_nextn_predict_layers": (0, 1, None),
}
"""Fields that may be absent, but not hold another value: kvflow computes only these."""


@frozen
class GlmConfig:
    """Sizes and constants, named as in HF's config. `full_index` and `dense` say, per main layer,
    whether it owns an indexer and whether its MLP is dense."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    rope_theta: float
    full_index: tuple[bool, ...]
    dense: tuple[bool, ...]
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2**20

    latent_norm_eps = 1e-6
    """Epsilon of the q_a, kv_a and indexer key norms; HF's class default, not `rms_norm_eps`."""

    def __attrs_post_init__(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups or experts // groups < 2:
            raise ConfigError(
                f"n_routed_experts {experts} over n_group {groups}: groups must be equal, of >= 2"
            )
        if not 1 <= self.topk_group <= groups:
            raise ConfigError(f"topk_group {self.topk_group}, must be in [1, n_group = {groups}]")
        eligible = experts // groups * self.topk_group
        if not 1 <= self.num_experts_per_tok <= eligible:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok}, must be in [1, {eligible}]"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ConfigError(
                f"qk_rope_head_dim {self.qk_rope_head_dim}, must be even and at most "
                f"index_head_dim = {self.index_head_dim}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GlmConfig":
        """From the dict of an HF config.json. Raises `ConfigError` naming a field that is missing
        or that asks for something unsupported, `LayoutError` for indexer spellings at odds."""
        for name, allowed in _REQUIRED_VALUES.items():
            if name in config and config[name] not in allowed:
                raise ConfigError(f"{name} = {config[name]!r}, must be one of {list(allowed)}")
        values: dict[str, Any] = {
            "rope_theta": _rope_theta(config),
            "full_index": full_index_layers(config),
            "dense": _dense_layers(config),
        }
        for f in fields(cls):
            if f.name not in values and config.get(f.name) is not None:
                values[f.name] = config[f.name]
        missing = [f.name for f in fields(cls) if f.default is NOTHING and f.name not in values]
        if missing:
            raise ConfigError(f"the config lacks {missing}; all of them are required")
        return cls(**values)

    @classmethod
    def load(cls, model_dir: Path | str) -> "GlmConfig":
        """Reads ``config.json`` of a model directory."""
        return cls.from_hf(json.loads((Path(model_dir) / "config.json").read_text()))

    def kv_spec(
        self,
        *,
        kv_dtype: KVDType,
        index_arrangement: Arrangement | str = "planar",
        content: Mapping[str, str] | None = None,
    ) -> KVCacheSpec:
        """The components this model caches, its MTP layer included."""
        hf = {
            "num_hidden_layers": self.num_hidden_layers,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "index_head_dim": self.index_head_dim,
            "indexer_types": ["full" if f else "shared" for f in self.full_index],
            "rms_norm_eps": self.rms_norm_eps,
        }
        return KVCacheSpec.from_config(
            hf, kv_dtype=kv_dtype, index_arrangement=index_arrangement, content=content
        )


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "default")) != "default":
        raise ConfigError(f"rope_parameters.rope_type = {kind!r}, must be 'default'")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError("the config lacks rope_parameters.rope_theta (or rope_theta)")
    return float(theta)


def _dense_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """``mlp_layer_types`` wins over ``first_k_dense_replace``, which HF writes by default; were
    it wrong, the checkpoint's tensors would not fit."""
    n = int(config.get("num_hidden_layers") or 0)
    types = config.get("mlp_layer_types")
    first = config.get("first_k_dense_replace")
    if types is None:
        return tuple(i < int(first or 0) for i in range(n))
    dense = tuple(t == "dense" for t in types)
    if len(dense) != n:
        raise ConfigError(f"mlp_layer_types has {len(dense)} entries, num_hidden_layers is {n}")
    return dense
