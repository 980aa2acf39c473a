"""Absorbed multi-head latent attention over selected cache rows.

The key up-projection is folded into the query and the value up-projection into the output, so
attention reads the cached rows as they are: R latent and dr rotated dims per token, one for all
heads. A rank computes some of the heads; every product is of one head, and the ranks' outputs are
gathered before the output projection, so their number changes no bit.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvflow.comm import Comm
from kvflow.kernels.codec import encode_latent
from kvflow.layouts.record import Record
from kvflow.models.config import GlmConfig
from kvflow.models.kvstep import KVStep
from kvflow.models.ops import Linear, per_head, rms_norm
from kvflow.models.rope import Rotation
from kvflow.models.selection import Selection


@frozen(eq=False)
class Attention:
    """MLA of one layer, of this rank's heads: `q_b` is ``[h, q_lora, dn + dr]`` with the softmax
    scale in it, `w_uk` ``[h, dn, R]``, `w_uv` ``[h, R, dv]``; norms and `o` are of all heads."""

    component: str
    record: Record
    q_a_norm: Tensor
    kv_a_norm: Tensor
    q_b: Tensor
    w_uk: Tensor
    w_uv: Tensor
    o: Linear
    config: GlmConfig

    def q_residual(self, q_a: Tensor) -> Tensor:
        """The normed low-rank query that attention and indexer share: ``[n_padded, q_lora]``."""
        return rms_norm(q_a, self.q_a_norm, self.config.latent_norm_eps)

    def latent_rows(self, kv: Tensor, rotation: Rotation, num_rows: int) -> Tensor:
        """Packed latent rows of the local tokens, of ``[n_padded, R + dr]``: uint8
        ``[num_rows, nbytes]``."""
        rank = self.config.kv_lora_rank
        latent = rms_norm(kv[:, :rank], self.kv_a_norm, self.config.latent_norm_eps)
        return encode_latent(self.record, latent[:num_rows], rotation(kv[:, rank:])[:num_rows])

    def __call__(
        self,
        q_residual: Tensor,
        rotation: Rotation,
        selection: Selection,
        kv: KVStep,
        num_rows: int,
        tp: Comm,
    ) -> Tensor:
        """q_residual ``[n_padded, q_lora]`` -> ``[n_padded, hidden]``, zeros in padded rows."""
        c, num_padded = self.config, len(q_residual)
        plain, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
        q = per_head(q_residual, self.q_b)
        absorbed = per_head(q[..., :plain], self.w_uk)
        turned = rotation(q[..., plain : plain + rope])
        queries = torch.cat([absorbed.transpose(0, 1), turned.transpose(0, 1)], -1)
        attended = kv.attend(self.component, queries[:num_rows], selection)
        out = q.new_zeros(len(q), num_padded, c.kv_lora_rank)
        out[:, :num_rows] = attended.transpose(0, 1)
        values = per_head(out, self.w_uv)[..., : c.v_head_dim].transpose(0, 1).flatten(1)
        if tp.size > 1:
            parts = tp.all_gather(values, [num_padded] * tp.size)
            values = torch.cat(torch.tensor_split(parts, tp.size), 1)
        return self.o(values)
