"""The model: GLM (``glm_moe_dsa``) as a plain module over a `Comm` and a `KVStep`."""

from kvflow.models.config import ConfigError, GlmConfig
from kvflow.models.glm import Glm
from kvflow.models.kvstep import IndexQueries, KVStep
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.models.weights import (
    WeightError,
    load_weights,
    owned_experts,
    owned_heads,
    weights_digest,
)

__all__ = [
    "ConfigError",
    "Glm",
    "GlmConfig",
    "IndexQueries",
    "KVStep",
    "Segment",
    "Selection",
    "WeightError",
    "load_weights",
    "owned_experts",
    "owned_heads",
    "weights_digest",
]
