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
from kvflow.models.ops import Linear, RmsNorm
from kvflow.models.product import Matrices
from kvflow.models.rope import Rotation
from kvflow.models.selection import Selection


@frozen(eq=False)
class Attention:
    """MLA of one layer, of this rank's heads: `q_b` is ``[h, q_lora, dn + dr]`` with the softmax
    scale in it, `w_uk` ``[h, dn, R]``, `w_uv` ``[h, R, dv]``; norms and `o` are of all heads."""

    component: str
    record: Record
    q_a_norm: RmsNorm
    kv_a_norm: RmsNorm
    q_b: Matrices
    w_uk: Matrices
    w_uv: Matrices
    o: Linear
    config: GlmConfig

    def q_residual(self, q_a: Tensor) -> Tensor:
        """The normed low-rank query that attention and indexer share: ``[n, q_lora]``."""
        return self.q_a_norm(q_a)

    def latent_rows(self, kv: Tensor, rotation: Rotation) -> Tensor:
        """Packed latent rows of ``[n, R + dr]``: uint8 ``[n, nbytes]``."""
        rank = self.config.kv_lora_rank
        latent = self.kv_a_norm(kv[:, :rank])
        return encode_latent(self.record, latent, rotation(kv[:, rank:]))

    def __call__(
        self,
        q_residual: Tensor,
        rotation: Rotation,
        selection: Selection,
        kv: KVStep,
        tp: Comm,
    ) -> Tensor:
        """q_residual ``[n, q_lora]`` -> ``[n, hidden]``."""
        c = self.config
        q = self.q_b(q_residual)
        plain, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
        absorbed = self.w_uk(q[..., :plain])[..., : c.kv_lora_rank]
        turned = rotation(q[..., plain : plain + rope])
        queries = torch.cat([absorbed, turned], -1).transpose(0, 1)
        attended = kv.attend(self.component, queries, selection)
        values = self.w_uv(attended.transpose(0, 1))[..., : c.v_head_dim]
        values = values.transpose(0, 1).flatten(1)
        if tp.size > 1:
            parts = tp.all_gather(values, [len(values)] * tp.size)
            values = torch.cat(torch.tensor_split(parts, tp.size), 1)
        return self.o(values)
