"""The model: GLM (``glm_moe_dsa``) as a plain module over a `Comm` and a `KVStep`."""

from kvflow.models.config import ConfigError, GlmConfig
from kvflow.models.glm import Glm
from kvflow.models.kvstep import KVStep, Segment
from kvflow.models.weights import WeightError, load_weights, owned_experts, weights_digest

__all__ = [
    "ConfigError",
    "Glm",
    "GlmConfig",
    "KVStep",
    "Segment",
    "WeightError",
    "load_weights",
    "owned_experts",
    "weights_digest",
]
