"""Glm: the forward pass of ``glm_moe_dsa``, over a `Comm` and a `KVStep` given per call.

The module holds weights and nothing else. Which rows other ranks compute, where the cache lives
and how it moves is the business of the two protocols.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from kvflow.comm import Comm, LocalComm
from kvflow.layouts.arrangement import Arrangement
from kvflow.layouts.record import KVDType
from kvflow.layouts.sharding import Ints
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.build import Layer, MtpLayer, Share, Weights, build_layer, build_mtp
from kvflow.models.config import ConfigError, GlmConfig
from kvflow.models.indexer import Indexer, first_positions
from kvflow.models.kvstep import KVStep
from kvflow.models.moe import Moe
from kvflow.models.ops import Linear, RmsNorm
from kvflow.models.rope import Rotation
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection, Shape
from kvflow.models.weights import load_weights, owned_experts, owned_heads, weights_digest

ALONE = LocalComm()


@frozen(eq=False)
class Step:
    """The local rows of one forward pass and what they attend to. `tp` are the ranks that compute
    the same rows for other heads."""

    rotation: Rotation
    segments: Sequence[Segment]
    kv: KVStep
    shape: Shape
    tp: Comm

    @cached_property
    def everything(self) -> Selection:
        """Every position up to a query's own, where none sees more than the top-k."""
        shape = self.shape
        chosen = [first_positions(s.positions, s.context_len) for s in shape.segments]
        return Selection.of(chosen, shape.segments, shape.topk, shape)


@frozen(eq=False)
class Glm:
    """A loaded model, of which this rank holds some of the routed experts and attention heads.

    Every method computes in the dtype of the weights, float32 or float64."""

    config: GlmConfig
    spec: KVCacheSpec
    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: RmsNorm
    head: Linear
    mtp: MtpLayer | None

    @classmethod
    def build(
        cls,
        config: GlmConfig,
        weights: Weights,
        spec: KVCacheSpec,
        experts: range,
        heads: range | None = None,
    ) -> "Glm":
        """From checkpoint tensors by HF name (see `load_weights`), the owned experts and heads
        (default: all)."""
        share = Share(experts, range(config.num_attention_heads) if heads is None else heads)
        embedding = weights["model.embed_tokens.weight"]
        tied = config.tie_word_embeddings
        return cls(
            config=config,
            spec=spec,
            embedding=embedding,
            layers=tuple(
                build_layer(config, weights, spec, i, share)
                for i in range(config.num_hidden_layers)
            ),
            final_norm=RmsNorm.of(weights["model.norm.weight"], config.rms_norm_eps),
            head=Linear.from_hf(embedding if tied else weights["lm_head.weight"]),
            mtp=(
                build_mtp(config, weights, spec, share) if config.num_nextn_predict_layers else None
            ),
        )

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        kv_dtype: KVDType,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        size: int = 1,
        tp_rank: int = 0,
        tp_size: int = 1,
        index_arrangement: Arrangement | str = "planar",
    ) -> "Glm":
        """Loads rank's share of an HF model directory: its routed experts among `size`
        expert-parallel ranks, its attention heads among `tp_size` ranks, and everything else. The
        spec's content carries the weights digest. Raises `ConfigError`, also for a `tp_size` that
        does not divide the heads, or `WeightError`."""
        config = GlmConfig.load(model_dir)
        heads = owned_heads(config.num_attention_heads, tp_rank, tp_size)
        experts = owned_experts(config.n_routed_experts, rank, size)
        weights = load_weights(model_dir, config, dtype=dtype, experts=experts)
        content = {"model": "glm_moe_dsa", "weights": weights_digest(model_dir)}
        spec = config.kv_spec(
            kv_dtype=kv_dtype, index_arrangement=index_arrangement, content=content
        )
        return cls.build(config, weights, spec, experts, heads)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        segments: Sequence[Segment],
        kv: KVStep,
        comm: Comm,
        tp: Comm = ALONE,
    ) -> Tensor:
        """Final hidden states ``[n, hidden]``, after the last norm, of this rank's new tokens.

        tokens int64 ``[n]``, in the order of the segments, may be device data that the host has
        not seen (`check_tokens` checks those it has); their KV rows are published on the way.
        `comm` are all ranks, over which experts are dealt; `tp` those of them that get the same
        rows and compute other heads. A collective over `comm`, `tp` and `kv`: ranks with n = 0
        call it too. Raises `ConfigError` for segments that do not add up to n."""
        self._check(tokens, segments)
        x = self.embedding.index_select(0, tokens)
        step = self._step(segments, kv, tp)
        selection = Selection.of((), (), self.config.index_topk)
        for layer in self.layers:
            x, selection = self._layer(layer, x, selection, step, comm)
        return self.final_norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden ``[m, hidden] -> [m, vocab]``."""
        return self.head(hidden)

    @torch.inference_mode()
    def write_mtp(
        self, next_tokens: Tensor, hidden: Tensor, segments: Sequence[Segment], kv: KVStep
    ) -> None:
        """Publishes the MTP layer's KV rows of this rank's tokens, without running the layer.

        The row of position t is made of `hidden` ``[n, hidden]`` (as `forward` returns it) at t
        and the embedding of token t + 1 (`next_tokens`, int64 ``[n]``), zeroed at position 0 as
        vLLM does. A collective over `kv`."""
        step = self._step(segments, kv)
        mtp, x = self._mtp_input(next_tokens, hidden, segments)
        self._publish(mtp.layer, self._inputs(mtp.layer, x), step)
        self._release(mtp.layer, kv)

    @torch.inference_mode()
    def mtp_forward(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        segments: Sequence[Segment],
        kv: KVStep,
        comm: Comm,
        shared: Selection | None = None,
        tp: Comm = ALONE,
    ) -> tuple[Tensor, Selection]:
        """Hidden states ``[n, hidden]`` of the MTP module, after its last norm, and what its rows
        attended to. Their `logits` are for token t + 2, and they are the `hidden` of a further
        pass at t + 1. Publishes as `write_mtp`; with a selection of an earlier pass, `shared`, it
        attends to that one and publishes no index keys. A collective over `comm` and `kv`."""
        step = self._step(segments, kv, tp)
        mtp, x = self._mtp_input(next_tokens, hidden, segments)
        layer = mtp.layer if shared is None else evolve(mtp.layer, indexer=None)
        selection = shared or Selection.of((), (), self.config.index_topk)
        x, selection = self._layer(layer, x, selection, step, comm)
        return mtp.final_norm(x), selection

    def check_tokens(self, tokens: Ints | Sequence[int]) -> None:
        """Raises `ConfigError` for token ids outside the vocabulary, which `forward` must not
        get."""
        ids, vocab = np.asarray(tokens, np.int64), self.config.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
            raise ConfigError(
                f"tokens span {ids.min()}..{ids.max()}, must lie in [0, vocab_size = {vocab})"
            )

    def _step(self, segments: Sequence[Segment], kv: KVStep, tp: Comm = ALONE) -> Step:
        positions, c = positions_of(segments), self.config
        rotation = Rotation.at(positions, c.qk_rope_head_dim, c.rope_theta, self.embedding.dtype)
        return Step(rotation, segments, kv, Shape(tuple(segments), c.index_topk), tp)

    def _layer(
        self, layer: Layer, x: Tensor, selection: Selection, step: Step, comm: Comm
    ) -> tuple[Tensor, Selection]:
        inputs = self._inputs(layer, x)
        self._publish(layer, inputs, step)
        q_residual = layer.attention.q_residual(inputs[0])
        if layer.indexer is not None:
            selection = self._select(layer.indexer, inputs[3], q_residual, step)
        x = x + layer.attention(q_residual, step.rotation, selection, step.kv, step.tp)
        self._release(layer, step.kv)
        h = layer.post_norm(x)
        mlp = layer.mlp
        out = mlp(h, comm, step.tp) if isinstance(mlp, Moe) else mlp(h)
        return x + out, selection

    def _inputs(self, layer: Layer, x: Tensor) -> tuple[Tensor, ...]:
        """Products of the normed input: q_a, kv_a, and of an indexer key and head weights."""
        return layer.inputs(layer.input_norm(x))

    def _select(
        self, indexer: Indexer, weights: Tensor, q_residual: Tensor, step: Step
    ) -> Selection:
        if step.kv.max_context_len <= self.config.index_topk:
            return step.everything
        chosen = indexer.topk(weights, q_residual, step.rotation, step.segments, step.kv)
        return Selection.of(chosen, step.segments, self.config.index_topk, step.shape)

    def _publish(self, layer: Layer, inputs: tuple[Tensor, ...], step: Step) -> None:
        rows = layer.attention.latent_rows(inputs[1], step.rotation)
        step.kv.publish(layer.attention.component, rows)
        if layer.indexer is not None:
            keys = layer.indexer.key_rows(inputs[2], step.rotation)
            step.kv.publish(layer.indexer.component, keys)

    def _release(self, layer: Layer, kv: KVStep) -> None:
        kv.release(layer.attention.component)
        if layer.indexer is not None:
            kv.release(layer.indexer.component)

    def _mtp_input(
        self, next_tokens: Tensor, hidden: Tensor, segments: Sequence[Segment]
    ) -> tuple[MtpLayer, Tensor]:
        if self.mtp is None:
            raise ConfigError("num_nextn_predict_layers = 0: this model has no MTP layer")
        self._check(next_tokens, segments)
        embedded = self.embedding.index_select(0, next_tokens)
        embedded = embedded.masked_fill((positions_of(segments) == 0)[:, None], 0.0)
        parts = self.mtp.enorm(embedded), self.mtp.hnorm(hidden)
        return self.mtp, self.mtp.eh_proj(torch.cat(parts, -1))

    def _check(self, tokens: Tensor, segments: Sequence[Segment]) -> None:
        num_rows = sum(len(s) for s in segments)
        if num_rows != len(tokens):
            raise ConfigError(
                f"{len(tokens)} tokens, but the segments hold {num_rows} positions; "
                f"they must be equal"
            )


def positions_of(segments: Sequence[Segment]) -> Tensor:
    """The positions of all segments, in order: int64 ``[n]``."""
    if not segments:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([s.positions for s in segments])
