"""Weights: a safetensors checkpoint in HF form -> checked, cast tensors by name."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kvflow.errors import KvflowError
from kvflow.models.config import ConfigError, GlmConfig

Shape = tuple[int, ...]


class WeightError(KvflowError, ValueError):
    """A checkpoint that does not hold the tensors its config describes."""


def owned_experts(num_experts: int, rank: int, size: int) -> range:
    """The contiguous experts rank owns among `size` expert-parallel ranks; sizes differ by at
    most one, and ranks beyond the experts own none.

    >>> [list(owned_experts(5, r, 3)) for r in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(rank * num_experts // size, (rank + 1) * num_experts // size)


def owned_heads(num_heads: int, rank: int, size: int) -> range:
    """The contiguous attention heads rank owns among `size` tensor-parallel ranks. Raises
    `ConfigError` for a rank outside the group or a size that does not divide the heads.

    >>> owned_heads(64, 1, 2)
    range(32, 64)
    """
    if size < 1 or num_heads % size:
        raise ConfigError(f"tp_size {size} must divide num_attention_heads = {num_heads}")
    if not 0 <= rank < size:
        raise ConfigError(f"tp_rank {rank}, must be in [0, tp_size = {size})")
    return range(rank * num_heads // size, (rank + 1) * num_heads // size)


def weight_shapes(config: GlmConfig) -> dict[str, Shape]:
    """Every tensor of the checkpoint and its shape, the MTP layer's included."""
    c = config
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for i, (full, dense) in enumerate(zip(c.full_index, c.dense, strict=True)):
        shapes.update(_layer_shapes(c, f"model.layers.{i}.", full, dense))
    for i in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers):
        p = f"model.layers.{i}."
        shapes.update(_layer_shapes(c, p, full=True, dense=False))
        shapes[p + "eh_proj.weight"] = (c.hidden_size, 2 * c.hidden_size)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            shapes[p + norm + ".weight"] = (c.hidden_size,)
    return shapes


def _layer_shapes(c: GlmConfig, prefix: str, full: bool, dense: bool) -> dict[str, Shape]:
    a, h, width = prefix + "self_attn.", c.num_attention_heads, c.hidden_size
    q_dim, kv_dim = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim
    shapes: dict[str, Shape] = {
        prefix + "input_layernorm.weight": (width,),
        prefix + "post_attention_layernorm.weight": (width,),
        a + "q_a_proj.weight": (c.q_lora_rank, width),
        a + "q_a_layernorm.weight": (c.q_lora_rank,),
        a + "q_b_proj.weight": (h * q_dim, c.q_lora_rank),
        a + "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, width),
        a + "kv_a_layernorm.weight": (c.kv_lora_rank,),
        a + "kv_b_proj.weight": (h * kv_dim, c.kv_lora_rank),
        a + "o_proj.weight": (width, h * c.v_head_dim),
    }
    if full:
        shapes[a + "indexer.wq_b.weight"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        shapes[a + "indexer.wk.weight"] = (c.index_head_dim, width)
        shapes[a + "indexer.k_norm.weight"] = (c.index_head_dim,)
        shapes[a + "indexer.k_norm.bias"] = (c.index_head_dim,)
        shapes[a + "indexer.weights_proj.weight"] = (c.index_n_heads, width)
    m, inner = prefix + "mlp.", c.moe_intermediate_size
    if dense:
        return shapes | _mlp_shapes(m, width, c.intermediate_size)
    shapes[m + "gate.weight"] = (c.n_routed_experts, width)
    shapes[m + "gate.e_score_correction_bias"] = (c.n_routed_experts,)
    for e in range(c.n_routed_experts):
        shapes.update(_mlp_shapes(f"{m}experts.{e}.", width, inner))
    if c.n_shared_experts:
        shapes.update(_mlp_shapes(m + "shared_experts.", width, inner * c.n_shared_experts))
    return shapes


def _mlp_shapes(prefix: str, width: int, inner: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (inner, width),
        prefix + "up_proj.weight": (inner, width),
        prefix + "down_proj.weight": (width, inner),
    }


def weight_files(model_dir: Path | str) -> list[Path]:
    """The safetensors files of a model directory, by its index when it has one."""
    root = Path(model_dir)
    index = root / "model.safetensors.index.json"
    if index.exists():
        return sorted({root / f for f in json.loads(index.read_text())["weight_map"].values()})
    single = root / "model.safetensors"
    if not single.exists():
        raise WeightError(f"{root} holds neither {single.name} nor {index.name}")
    return [single]


def load_weights(
    model_dir: Path | str, config: GlmConfig, *, dtype: torch.dtype, experts: range
) -> dict[str, Tensor]:
    """Tensors by HF name, cast to `dtype`, without the routed experts outside `experts`.

    Every shape is checked, also of the experts left out. Raises `WeightError` naming the key and
    both shapes for a tensor that is missing, unexpected, misshapen or not a plain float."""
    expected = weight_shapes(config)
    loaded: dict[str, Tensor] = {}
    seen: set[str] = set()
    for path in weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                piece = file.get_slice(key)
                check_weight(key, tuple(piece.get_shape()), expected.get(key), where=path.name)
                if piece.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise WeightError(
                        f"{key} is {piece.get_dtype()}, must be F64, F32, F16 or BF16"
                    )
                seen.add(key)
                if _is_owned(key, experts):
                    loaded[key] = file.get_tensor(key).to(dtype)
    for key, shape in expected.items():
        if key not in seen:
            raise WeightError(f"{key} is missing; the config expects shape {list(shape)}")
    return loaded


def check_weight(key: str, shape: Shape, expected: Shape | None, *, where: str) -> None:
    """Raises `WeightError` unless a stored tensor has the shape its config expects."""
    if expected is None:
        raise WeightError(
            f"{where} holds {key} of shape {list(shape)}; the config expects no such tensor"
        )
    if shape != expected:
        raise WeightError(
            f"{key} has shape {list(shape)} in {where}; the config expects {list(expected)}"
        )


def _is_owned(key: str, experts: range) -> bool:
    _, found, rest = key.partition(".mlp.experts.")
    return not found or int(rest.split(".")[0]) in experts


def weights_digest(model_dir: Path | str) -> str:
    """sha256 over the names and contents of the weight files: the identity of a checkpoint."""
    digest = hashlib.sha256()
    for name, content in _file_digests(model_dir):
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _file_digests(model_dir: Path | str) -> Iterator[tuple[str, str]]:
    for path in weight_files(model_dir):
        with path.open("rb") as file:
            yield path.name, hashlib.file_digest(file, "sha256").hexdigest()
