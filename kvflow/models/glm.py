"""Glm: the forward pass of ``glm_moe_dsa``, over a `Comm` and a `KVStep` given per call.

The module holds weights and nothing else. Which rows other ranks compute, where the cache lives
and how it moves is the business of the two protocols.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.layouts.arrangement import Arrangement
from kvflow.layouts.record import KVDType
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.build import Layer, MtpLayer, Weights, build_layer, build_mtp
from kvflow.models.config import ConfigError, GlmConfig
from kvflow.models.kvstep import KVStep
from kvflow.models.moe import Moe
from kvflow.models.ops import Linear, pad_rows, rms_norm
from kvflow.models.rope import Rotation
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.models.weights import load_weights, owned_experts, weights_digest


@frozen(eq=False)
class Step:
    """The local rows of one forward pass, padded to whole tiles, and what they attend to."""

    num_rows: int
    rotation: Rotation
    segments: Sequence[Segment]
    kv: KVStep


@frozen(eq=False)
class Glm:
    """A loaded model, of which this rank holds some of the routed experts.

    Every method computes in the dtype of the weights, float32 or float64."""

    config: GlmConfig
    spec: KVCacheSpec
    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Linear
    mtp: MtpLayer | None

    @classmethod
    def build(cls, config: GlmConfig, weights: Weights, spec: KVCacheSpec, experts: range) -> "Glm":
        """From checkpoint tensors by HF name (see `load_weights`) and the owned experts."""
        embedding = weights["model.embed_tokens.weight"]
        tied = config.tie_word_embeddings
        return cls(
            config=config,
            spec=spec,
            embedding=embedding,
            layers=tuple(
                build_layer(config, weights, spec, i, experts)
                for i in range(config.num_hidden_layers)
            ),
            final_norm=weights["model.norm.weight"],
            head=Linear.from_hf(embedding if tied else weights["lm_head.weight"]),
            mtp=(
                build_mtp(config, weights, spec, experts)
                if config.num_nextn_predict_layers
                else None
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
        index_arrangement: Arrangement | str = "planar",
    ) -> "Glm":
        """Loads rank's share of an HF model directory: its routed experts among `size`
        expert-parallel ranks, and everything else. The spec's content carries the weights
        digest. Raises `ConfigError` or `WeightError`."""
        config = GlmConfig.load(model_dir)
        experts = owned_experts(config.n_routed_experts, rank, size)
        weights = load_weights(model_dir, config, dtype=dtype, experts=experts)
        content = {"model": "glm_moe_dsa", "weights": weights_digest(model_dir)}
        spec = config.kv_spec(
            kv_dtype=kv_dtype, index_arrangement=index_arrangement, content=content
        )
        return cls.build(config, weights, spec, experts)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, segments: Sequence[Segment], kv: KVStep, comm: Comm
    ) -> Tensor:
        """Final hidden states ``[n, hidden]``, after the last norm, of this rank's new tokens.

        tokens int64 ``[n]``, in the order of the segments; their KV rows are published on the
        way. A collective over `comm` and `kv`: ranks with n = 0 call it too. Raises
        `ConfigError` for a token outside the vocabulary or segments that do not add up to n."""
        self._check(tokens, segments)
        x = pad_rows(self.embedding.index_select(0, tokens))
        step = self._step(len(tokens), segments, kv)
        selection = Selection.of((), (), self.config.index_topk)
        for layer in self.layers:
            x, selection = self._layer(layer, x, selection, step, comm)
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps)[: len(tokens)]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden ``[m, hidden] -> [m, vocab]``."""
        return self.head(pad_rows(hidden))[: len(hidden)]

    @torch.no_grad()
    def write_mtp(
        self, next_tokens: Tensor, hidden: Tensor, segments: Sequence[Segment], kv: KVStep
    ) -> None:
        """Publishes the MTP layer's KV rows of this rank's tokens, without running the layer.

        The row of position t is made of `hidden` ``[n, hidden]`` (as `forward` returns it) at t
        and the embedding of token t + 1 (`next_tokens`, int64 ``[n]``), zeroed at position 0 as
        vLLM does. A collective over `kv`."""
        step = self._step(len(next_tokens), segments, kv)
        mtp, x = self._mtp_input(next_tokens, hidden, segments)
        self._publish(mtp.layer, rms_norm(x, mtp.layer.input_norm, self._eps), step)
        self._release(mtp.layer, kv)

    @torch.no_grad()
    def mtp_forward(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        segments: Sequence[Segment],
        kv: KVStep,
        comm: Comm,
        shared: Selection | None = None,
    ) -> tuple[Tensor, Selection]:
        """Hidden states ``[n, hidden]`` of the MTP module, after its last norm, and what its rows
        attended to. Their `logits` are for token t + 2, and they are the `hidden` of a further
        pass at t + 1. Publishes as `write_mtp`; with a selection of an earlier pass, `shared`, it
        attends to that one and publishes no index keys. A collective over `comm` and `kv`."""
        step = self._step(len(next_tokens), segments, kv)
        mtp, x = self._mtp_input(next_tokens, hidden, segments)
        layer = mtp.layer if shared is None else evolve(mtp.layer, indexer=None)
        selection = shared or Selection.of((), (), self.config.index_topk)
        x, selection = self._layer(layer, x, selection, step, comm)
        return rms_norm(x, mtp.final_norm, self._eps)[: len(next_tokens)], selection

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps

    def _step(self, num_rows: int, segments: Sequence[Segment], kv: KVStep) -> Step:
        positions = pad_rows(positions_of(segments))
        c = self.config
        rotation = Rotation.at(positions, c.qk_rope_head_dim, c.rope_theta, self.embedding.dtype)
        return Step(num_rows, rotation, segments, kv)

    def _layer(
        self, layer: Layer, x: Tensor, selection: Selection, step: Step, comm: Comm
    ) -> tuple[Tensor, Selection]:
        h = rms_norm(x, layer.input_norm, self._eps)
        self._publish(layer, h, step)
        q_residual = layer.attention.q_residual(h)
        if layer.indexer is not None:
            chosen = layer.indexer.topk(h, q_residual, step.rotation, step.segments, step.kv)
            selection = Selection.of(chosen, step.segments, self.config.index_topk)
        x = x + layer.attention(q_residual, step.rotation, selection, step.kv)
        self._release(layer, step.kv)
        h = rms_norm(x, layer.post_norm, self._eps)
        mlp = layer.mlp
        return x + (mlp(h, step.num_rows, comm) if isinstance(mlp, Moe) else mlp(h)), selection

    def _publish(self, layer: Layer, hidden: Tensor, step: Step) -> None:
        rows = layer.attention.latent_rows(hidden, step.rotation, step.num_rows)
        step.kv.publish(layer.attention.component, rows)
        if layer.indexer is not None:
            keys = layer.indexer.key_rows(hidden, step.rotation, step.num_rows)
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
        parts = (
            rms_norm(pad_rows(embedded), self.mtp.enorm, self._eps),
            rms_norm(pad_rows(hidden), self.mtp.hnorm, self._eps),
        )
        return self.mtp, self.mtp.eh_proj(torch.cat(parts, -1))

    def _check(self, tokens: Tensor, segments: Sequence[Segment]) -> None:
        num_rows = sum(len(s) for s in segments)
        if num_rows != len(tokens):
            raise ConfigError(
                f"{len(tokens)} tokens, but the segments hold {num_rows} positions; "
                f"they must be equal"
            )
        vocab = self.config.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise ConfigError(
                f"tokens span {int(tokens.min())}..{int(tokens.max())}, "
                f"must lie in [0, vocab_size = {vocab})"
            )


def positions_of(segments: Sequence[Segment]) -> Tensor:
    """The positions of all segments, in order: int64 ``[n]``."""
    if not segments:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([s.positions for s in segments])
