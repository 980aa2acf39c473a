"""Absorbed multi-head latent attention over selected cache rows.

The key up-projection is folded into the query and the value up-projection into the output, so
attention reads the cached rows as they are: R latent and dr rotated dims per token, one for all
heads.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvflow.kernels.codec import encode_latent
from kvflow.layouts.record import Record
from kvflow.models.config import GlmConfig
from kvflow.models.kvstep import KVStep
from kvflow.models.ops import Linear, per_head, rms_norm
from kvflow.models.rope import Rotation
from kvflow.models.selection import Selection


@frozen(eq=False)
class Attention:
    """MLA of one layer. `w_uk` is ``[h, dn, R]``, `w_uv` is ``[h, R, dv]``."""

    component: str
    record: Record
    q_a: Linear
    q_a_norm: Tensor
    q_b: Linear
    kv_a: Linear
    kv_a_norm: Tensor
    w_uk: Tensor
    w_uv: Tensor
    o: Linear
    config: GlmConfig

    def q_residual(self, hidden: Tensor) -> Tensor:
        """The normed low-rank query that attention and indexer share: ``[n_padded, q_lora]``."""
        return rms_norm(self.q_a(hidden), self.q_a_norm, self.config.latent_norm_eps)

    def latent_rows(self, hidden: Tensor, rotation: Rotation, num_rows: int) -> Tensor:
        """Packed latent rows of the local tokens: uint8 ``[num_rows, nbytes]``."""
        rank = self.config.kv_lora_rank
        kv = self.kv_a(hidden)
        latent = rms_norm(kv[:, :rank].contiguous(), self.kv_a_norm, self.config.latent_norm_eps)
        return encode_latent(self.record, latent[:num_rows], rotation(kv[:, rank:])[:num_rows])

    def __call__(
        self, q_residual: Tensor, rotation: Rotation, selection: Selection, kv: KVStep
    ) -> Tensor:
        """q_residual ``[n_padded, q_lora]`` -> ``[n_padded, hidden]``, zeros in padded rows."""
        c = self.config
        q = self.q_b(q_residual).view(
            len(q_residual), c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        )
        q_nope, q_rope = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        queries = torch.cat([per_head(q_nope, self.w_uk), rotation(q_rope)], -1)
        queries = queries * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        num_rows = len(selection.counts)
        out = q.new_zeros(len(q), c.num_attention_heads, c.kv_lora_rank)
        out[:num_rows] = kv.attend(self.component, queries[:num_rows], selection)
        values = per_head(out, self.w_uv)[..., : c.v_head_dim]
        return self.o(values.reshape(len(q), c.num_attention_heads * c.v_head_dim))
