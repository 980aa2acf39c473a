"""Mixture of experts over expert-parallel ranks.

Each rank routes its own tokens, sends (token, expert) rows to the expert's owner and gets the
unsummed outputs back; the home rank adds them in expert order. A row's products have the same bits
whatever comes with it, so the result has for every number of ranks, and for one rank with few
tokens, which asks no device how many rows an expert has.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor

from kvflow.comm import Comm, CommError
from kvflow.models.config import GlmConfig
from kvflow.models.ops import Linear, Mlp, each_element, gated
from kvflow.models.product import ROW_TILE, Matrices, add_in_order
from kvflow.models.weights import owned_experts

FEW_ROWS = 64
"""Rows up to which one rank computes experts in shapes that do not depend on routing."""


@frozen(eq=False)
class Router:
    """Sigmoid scores, a bias that only chooses, groups ranked by their two best experts."""

    gate: Linear
    bias: Tensor
    config: GlmConfig

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x ``[n, hidden]`` -> expert ids int64 ``[n, k]``, ascending per token, and their weights
        ``[n, k]``. Ties go to the lower expert."""
        c = self.config
        every = each_element(torch.sigmoid_, self.gate.matrix.one(x).contiguous())
        scores = every[:, : self.gate.num_out]
        choice = scores + self.bias
        if c.n_group > 1:
            choice = choice.masked_fill(~self._eligible(choice), -torch.inf)
        best = choice.argsort(dim=-1, descending=True, stable=True)
        ids = best[:, : c.num_experts_per_tok].sort(dim=-1).values
        weights = scores.gather(1, ids)
        if c.norm_topk_prob:
            weights = weights / (add_in_order(weights)[:, None] + 1e-20)
        return ids, weights * c.routed_scaling_factor

    def _eligible(self, choice: Tensor) -> Tensor:
        groups = choice.reshape(
            len(choice), self.config.n_group, choice.shape[1] // self.config.n_group
        )
        rank = groups.topk(2, dim=-1).values.sum(-1).argsort(dim=-1, descending=True, stable=True)
        keep = torch.zeros_like(rank, dtype=torch.bool)
        keep.scatter_(1, rank[:, : self.config.topk_group], True)
        return keep.repeat_interleave(groups.shape[-1], dim=1)


@frozen(eq=False)
class Experts:
    """Routed experts of one size: `gate_up` ``[e, hidden, 2 * inner]``, `down` ``[e, inner,
    hidden padded]``."""

    gate_up: Matrices
    down: Matrices

    @classmethod
    def of(cls, mlps: Sequence[Mlp], like: Tensor) -> "Experts":
        """`like` says dtype and device when there are none."""
        if not mlps:
            return cls(Matrices.none(like), Matrices.none(like))
        return cls(
            Matrices.stack([m.gate_up for m in mlps]), Matrices.stack([m.down for m in mlps])
        )

    def __len__(self) -> int:
        return len(self.gate_up)

    def counted(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Outputs of rows ``[n, hidden]`` of which the first ``counts[0]`` go to expert 0, ..."""
        out, start = torch.empty_like(rows), 0
        for e, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                out[mine] = Mlp(self.gate_up[e : e + 1], self.down[e : e + 1])(rows[mine])
                start += count
        return out

    def few(self, x: Tensor, ids: Tensor) -> Tensor:
        """Unsummed outputs ``[n, k, hidden]`` of x ``[n, hidden]`` for expert ids ``[n, k]``: of
        each pair of token and expert, or of every token for all experts."""
        num, chosen = ids.shape
        num_pairs, num_tiles = ids.numel(), len(self) * -(-num // ROW_TILE)
        if num == 0:
            return x.new_empty(0, chosen, x.shape[1])
        if self.gate_up.term_block or 2 * num_pairs < num_tiles:
            pairs, which = x[:, None].expand(num, chosen, x.shape[1]).flatten(0, 1), ids.flatten()
            out = self.down.each(gated(self.gate_up.each(pairs, which)), which)
        else:
            every = self.down(gated(self.gate_up(x))).flatten(0, 1)
            rows = torch.arange(num, device=x.device)[:, None]
            out = every.index_select(0, (ids * num + rows).flatten())
        return out[:, : x.shape[1]].view(num, chosen, -1)


@frozen(eq=False)
class Moe:
    """Routed experts, of which this rank holds those `owned`, and a shared one for every token."""

    router: Router
    owned: range
    experts: Experts
    shared: Mlp | None

    def __call__(self, x: Tensor, comm: Comm, tp: Comm) -> Tensor:
        """x ``[n, hidden]`` -> ``[n, hidden]``.

        The ranks of `tp` hold the same rows: each computes a share of them. A collective, with 0
        rows too. Raises `CommError` when `comm` is not the group over which this rank's experts
        were chosen."""
        num_experts = self.router.config.n_routed_experts
        if self.owned != owned_experts(num_experts, comm.rank, comm.size):
            raise CommError(
                f"rank {comm.rank} of {comm.size} owns experts "
                f"{owned_experts(num_experts, comm.rank, comm.size)}, but {self.owned} are loaded"
            )
        if tp.size == 1:
            return self._share(x, comm)
        edges = [len(x) * r // tp.size for r in range(tp.size + 1)]
        out = self._share(x[edges[tp.rank] : edges[tp.rank + 1]], comm)
        return tp.all_gather(out, [stop - start for start, stop in pairwise(edges)])

    def _share(self, x: Tensor, comm: Comm) -> Tensor:
        ids, weights = self.router(x)
        alone = comm.size == 1 and len(x) <= FEW_ROWS
        outputs = self.experts.few(x, ids) if alone else self._routed(x, ids, comm)
        routed = add_in_order(outputs * weights[:, :, None])
        return routed if self.shared is None else self.shared(x) + routed

    def _routed(self, x: Tensor, ids: Tensor, comm: Comm) -> Tensor:
        """Unsummed expert outputs ``[n, k, hidden]`` for expert ids ``[n, k]``."""
        num_experts, num_chosen = self.router.config.n_routed_experts, ids.shape[1]
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        load = flat.bincount(minlength=num_experts)
        loads = comm.all_gather(load[None], [1] * comm.size)
        owned = [owned_experts(num_experts, r, comm.size) for r in range(comm.size)]
        counts = [int(load[e.start : e.stop].sum()) for e in owned]
        rows, received = comm.all_to_all(x.index_select(0, order // num_chosen), counts)
        computed = self._compute(rows, loads[:, self.owned.start : self.owned.stop])
        returned, _ = comm.all_to_all(computed, received)
        outputs = torch.empty_like(returned).index_copy_(0, order, returned)
        return outputs.view(*ids.shape, x.shape[1])

    def _compute(self, rows: Tensor, loads: Tensor) -> Tensor:
        """Outputs of owned experts. `rows` come by source rank, then expert; `loads`
        ``[size, num_owned]`` counts them."""
        counts = loads.sum(0).tolist()
        if len(loads) == 1:
            return self.experts.counted(rows, counts)
        expert_of_row = torch.arange(len(self.experts)).repeat(len(loads))
        order = expert_of_row.repeat_interleave(loads.flatten()).argsort(stable=True)
        out = torch.empty_like(rows)
        out[order] = self.experts.counted(rows[order], counts)
        return out
