"""The training-side model of `glm_moe_dsa`: parameter names equal the checkpoint's keys.

The forward pass follows transformers' numerics; attention is MLA in its un-absorbed form over a
whole window (no cache), dense or limited to the indexer's top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Pass:
    """What one forward pass needs besides ids, and what it leaves for losses and measurements."""

    cos: Tensor
    sin: Tensor
    sparse: bool
    rows: Tensor | None = None  # query rows on which index scores and attention are kept
    mask: Tensor | None = None  # the last full layer's choice; shared layers reuse it
    # per full layer: (scores [B, R, T], one mean-over-heads attention [B, R, T] per layer served)
    groups: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    @classmethod
    def new(cls, c: dict[str, Any], length: int, sparse: bool, rows: Tensor | None = None) -> Pass:
        dim = c["qk_rope_head_dim"]
        inv = c["rope_parameters"]["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
        angle = torch.arange(length).float()[:, None] * inv
        return cls(angle.cos(), angle.sin(), sparse, rows)

    def rope(self, x: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Rotate the pairs of x [B, T, heads, d]; evens come out first, as in transformers."""
        cos, sin = self.cos[rows, None], self.sin[rows, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def linear(n_in: int, n_out: int, zero: bool = False) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=0.0 if zero else 0.5 * n_in**-0.5)
    return layer


def future(rows: Tensor, length: int) -> Tensor:
    """[R, length]: keys that a query row may not see."""
    return torch.arange(length)[None, :] > rows[:, None]


class Indexer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.dim, self.rot = c["index_n_heads"], c["index_head_dim"], 64
        self.topk = c["index_topk"]
        self.wq_b = linear(c["q_lora_rank"], self.heads * self.dim)
        self.wk = linear(c["hidden_size"], self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(c["hidden_size"], self.heads)

    def keys(self, h: Tensor, run: Pass) -> Tensor:
        k = self.k_norm(self.wk(h))[:, :, None]
        return torch.cat([run.rope(k[..., : self.rot]), k[..., self.rot :]], -1)[:, :, 0]

    def scores(self, h: Tensor, qr: Tensor, keys: Tensor, rows: Tensor, run: Pass) -> Tensor:
        """Scores [B, R, keys] of the given query rows, -inf in the future."""
        q = self.wq_b(qr[:, rows]).unflatten(-1, (self.heads, self.dim))
        q = torch.cat([run.rope(q[..., : self.rot], rows), q[..., self.rot :]], -1)
        dots = q.flatten(1, 2) @ (keys * self.dim**-0.5).mT
        dots = dots.relu().unflatten(1, (len(rows), self.heads))
        weights = self.weights_proj(h[:, rows]) * self.heads**-0.5
        scores = (weights[:, :, None] @ dots)[:, :, 0]
        return scores.masked_fill(future(rows, keys.shape[1]), -math.inf)

    @torch.no_grad()
    def choose(self, h: Tensor, qr: Tensor, keys: Tensor, run: Pass, chunk: int = 256) -> Tensor:
        """Boolean [B, 1, T, T]: the top-k keys of every query row, in row chunks."""
        n_batch, length = h.shape[:2]
        mask = torch.zeros(n_batch, length, length, dtype=torch.bool)
        for a in range(0, length, chunk):
            b = min(a + chunk, length)
            rows = torch.arange(a, b)
            picked = self.scores(h, qr, keys[:, :b], rows, run).topk(min(self.topk, b)).indices
            mask[:, a:b, :b].scatter_(2, picked, True)
            mask[:, a:b, :b].masked_fill_(future(rows, b), False)
        return mask[:, None]


class Attention(nn.Module):
    """MLA in its un-absorbed form, with an indexer on full layers."""

    def __init__(self, c: dict[str, Any], full: bool) -> None:
        super().__init__()
        self.c, hidden, rank = c, c["hidden_size"], c["kv_lora_rank"]
        self.heads, self.nope, self.value = c["num_attention_heads"], 32, c["v_head_dim"]
        self.rot = c["qk_rope_head_dim"]
        self.q_a_proj = linear(hidden, c["q_lora_rank"])
        self.q_a_layernorm = nn.RMSNorm(c["q_lora_rank"], eps=1e-6)  # 1e-6 as in transformers,
        self.q_b_proj = linear(c["q_lora_rank"], self.heads * (self.nope + self.rot))
        self.kv_a_proj_with_mqa = linear(hidden, rank + self.rot)
        self.kv_a_layernorm = nn.RMSNorm(rank, eps=1e-6)  # not rms_norm_eps
        self.kv_b_proj = linear(rank, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, hidden, zero=True)
        self.indexer = Indexer(c) if full else None

    def forward(self, h: Tensor, run: Pass) -> Tensor:
        length = h.shape[1]
        qr = self.q_a_layernorm(self.q_a_proj(h))
        q = self.q_b_proj(qr).unflatten(-1, (self.heads, -1))
        q = torch.cat([q[..., : self.nope], run.rope(q[..., self.nope :])], -1).transpose(1, 2)
        latent, k_rot = self.kv_a_proj_with_mqa(h).split([self.c["kv_lora_rank"], self.rot], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_rot = run.rope(k_rot[:, :, None]).expand(-1, -1, self.heads, -1)
        k = torch.cat([kv[..., : self.nope], k_rot], -1).transpose(1, 2)
        # the fast CPU kernel wants equal head sizes: pad the values, cut the result
        v = F.pad(kv[..., self.nope :], (0, q.shape[-1] - self.value)).transpose(1, 2)

        if self.indexer is not None and (run.sparse or run.rows is not None):
            h_in, qr_in = h.detach(), qr.detach()  # an indexer never trains the trunk
            keys = self.indexer.keys(h_in, run)
            if run.sparse:
                run.mask = self.indexer.choose(h_in, qr_in, keys, run)
            if run.rows is not None:
                run.groups.append((self.indexer.scores(h_in, qr_in, keys, run.rows, run), []))
        if run.rows is not None:
            with torch.no_grad():
                dots = q[:, :, run.rows] @ k.mT * q.shape[-1] ** -0.5
                dots.masked_fill_(future(run.rows, length), -math.inf)
                run.groups[-1][1].append(dots.softmax(-1).mean(1))
        if run.sparse:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=run.mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out[..., : self.value].transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid router; the balancing bias takes part in the choice only."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.k, self.scale = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.randn(c["n_routed_experts"], c["hidden_size"]) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(c["n_routed_experts"]))
        self.register_buffer("load", torch.zeros(c["n_routed_experts"]), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = F.linear(x, self.weight).sigmoid()
        ids = (score.detach() + self.e_score_correction_bias).topk(self.k).indices
        if self.training:
            self.load += ids.flatten().bincount(minlength=len(self.load))
        weight = score.gather(1, ids)
        return ids, weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scale

    def balance(self, rate: float) -> None:
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class MoE(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, n = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        self.gate = Gate(c)
        self.experts = nn.ModuleList(MLP(hidden, inner) for _ in range(n))
        self.shared_experts = MLP(hidden, inner * c["n_shared_experts"])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        ids, weight = self.gate(flat)
        out = self.shared_experts(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weight[token, slot, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], full: bool, dense: bool, mtp: bool = False) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(c, full)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(hidden, c["intermediate_size"]) if dense else MoE(c)
        if mtp:
            self.enorm, self.hnorm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
            self.eh_proj = linear(2 * hidden, hidden)
            self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(hidden, eps=eps)})

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), run)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyGlm(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c, n = c, c["num_hidden_layers"]
        layers = [
            Layer(c, c["indexer_types"][i] == "full", i < c["first_k_dense_replace"])
            for i in range(n)
        ]
        self.model = nn.ModuleDict()
        self.model["embed_tokens"] = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.model["layers"] = nn.ModuleList([*layers, Layer(c, True, False, mtp=True)])
        self.model["norm"] = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.lm_head = linear(c["hidden_size"], c["vocab_size"], zero=True)
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.1)

    def trunk(self, ids: Tensor, run: Pass) -> Tensor:
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"][:-1]:
            x = layer(x, run)
        return self.model["norm"](x)

    def mtp(self, hidden: Tensor, next_ids: Tensor, run: Pass) -> Tensor:
        """vLLM's convention: position t takes token t+1's embedding, zeroed at position 0."""
        layer = self.model["layers"][-1]
        embed = self.model["embed_tokens"](next_ids)
        embed = torch.cat([torch.zeros_like(embed[:, :1]), embed[:, 1:]], 1)
        x = layer.eh_proj(torch.cat([layer.enorm(embed), layer.hnorm(hidden)], -1))
        return layer.shared_head["norm"](layer(x, run))
