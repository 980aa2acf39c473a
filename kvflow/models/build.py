"""Checkpoint tensors -> the modules of a layer."""

from collections.abc import Mapping

from attrs import frozen
from torch import Tensor

from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.attention import Attention
from kvflow.models.config import GlmConfig
from kvflow.models.indexer import Indexer
from kvflow.models.moe import Experts, Moe, Router
from kvflow.models.ops import Fan, Linear, Mlp, RmsNorm
from kvflow.models.product import Matrices

Weights = Mapping[str, Tensor]


@frozen(eq=False)
class Layer:
    """One decoder layer; `indexer` is None where the layer shares its leader's top-k. `inputs` are
    the products of its normed input: q_a and kv_a, and of an indexer key and head weights."""

    input_norm: RmsNorm
    inputs: Fan
    attention: Attention
    indexer: Indexer | None
    post_norm: RmsNorm
    mlp: Mlp | Moe


@frozen(eq=False)
class MtpLayer:
    """The multi-token-prediction module: a decoder layer fed with [embedding | hidden]."""

    enorm: RmsNorm
    hnorm: RmsNorm
    eh_proj: Linear
    layer: Layer
    final_norm: RmsNorm


@frozen
class Share:
    """What of every layer one rank holds: routed experts and attention heads."""

    experts: range
    heads: range


def build_layer(
    config: GlmConfig, weights: Weights, spec: KVCacheSpec, layer_id: int, share: Share
) -> Layer:
    """Layer `layer_id` (absolute), holding only the experts and heads of `share`."""
    p = f"model.layers.{layer_id}."
    main = layer_id < config.num_hidden_layers
    full = config.full_index[layer_id] if main else True
    dense = config.dense[layer_id] if main else False
    mlp = p + "mlp."
    return Layer(
        input_norm=RmsNorm.of(weights[p + "input_layernorm.weight"], config.rms_norm_eps),
        inputs=_inputs(config, weights, p + "self_attn.", full),
        attention=_attention(config, weights, spec, layer_id, share.heads),
        indexer=_indexer(config, weights, spec, layer_id) if full else None,
        post_norm=RmsNorm.of(weights[p + "post_attention_layernorm.weight"], config.rms_norm_eps),
        mlp=_mlp(weights, mlp) if dense else _moe(config, weights, mlp, share.experts),
    )


def build_mtp(config: GlmConfig, weights: Weights, spec: KVCacheSpec, share: Share) -> MtpLayer:
    """The MTP module, whose layer id follows the main layers'."""
    layer_id = config.num_hidden_layers
    p = f"model.layers.{layer_id}."
    return MtpLayer(
        enorm=RmsNorm.of(weights[p + "enorm.weight"], config.rms_norm_eps),
        hnorm=RmsNorm.of(weights[p + "hnorm.weight"], config.rms_norm_eps),
        eh_proj=Linear.from_hf(weights[p + "eh_proj.weight"]),
        layer=build_layer(config, weights, spec, layer_id, share),
        final_norm=RmsNorm.of(weights[p + "shared_head.norm.weight"], config.rms_norm_eps),
    )


def _inputs(c: GlmConfig, weights: Weights, a: str, full: bool) -> Fan:
    parts = [weights[a + "q_a_proj.weight"], weights[a + "kv_a_proj_with_mqa.weight"]]
    if full:
        scale = (c.index_n_heads * c.index_head_dim) ** -0.5
        parts += [weights[a + "indexer.wk.weight"]]
        parts += [weights[a + "indexer.weights_proj.weight"] * scale]
    return Fan.from_hf(parts)


def _attention(
    c: GlmConfig, weights: Weights, spec: KVCacheSpec, layer_id: int, heads: range
) -> Attention:
    a = f"model.layers.{layer_id}.self_attn."
    component = spec[f"latent.{layer_id}"]
    mine = slice(heads.start, heads.stop)
    num, query_dim = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    q_b = weights[a + "q_b_proj.weight"].view(num, query_dim, -1)[mine] * query_dim**-0.5
    kv_b = weights[a + "kv_b_proj.weight"].view(num, -1, c.kv_lora_rank)[mine]
    w_uk, w_uv = kv_b[:, : c.qk_nope_head_dim], kv_b[:, c.qk_nope_head_dim :]
    return Attention(
        component=component.name,
        record=component.record,
        q_a_norm=RmsNorm.of(weights[a + "q_a_layernorm.weight"], c.latent_norm_eps),
        kv_a_norm=RmsNorm.of(weights[a + "kv_a_layernorm.weight"], c.latent_norm_eps),
        q_b=Matrices.of(q_b.transpose(1, 2)),
        w_uk=Matrices.of(w_uk),
        w_uv=Matrices.of(w_uv.transpose(1, 2)),
        o=Linear.from_hf(weights[a + "o_proj.weight"]),
        config=c,
    )


def _indexer(c: GlmConfig, weights: Weights, spec: KVCacheSpec, layer_id: int) -> Indexer:
    p = f"model.layers.{layer_id}.self_attn.indexer."
    component = spec[f"indexer.{layer_id}"]
    return Indexer(
        component=component.name,
        record=component.record,
        wq_b=Linear.from_hf(weights[p + "wq_b.weight"]),
        k_norm=(weights[p + "k_norm.weight"], weights[p + "k_norm.bias"]),
        config=c,
    )


def _mlp(weights: Weights, prefix: str) -> Mlp:
    gate, up, down = (weights[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down"))
    return Mlp.from_hf(gate, up, down)


def _moe(c: GlmConfig, weights: Weights, prefix: str, experts: range) -> Moe:
    gate = Linear.from_hf(weights[prefix + "gate.weight"])
    mlps = [_mlp(weights, f"{prefix}experts.{e}.") for e in experts]
    return Moe(
        router=Router(gate, weights[prefix + "gate.e_score_correction_bias"], c),
        owned=experts,
        experts=Experts.of(mlps, gate.matrix.values),
        shared=_mlp(weights, prefix + "shared_experts.") if c.n_shared_experts else None,
    )
