"""Mixture of experts over expert-parallel ranks.

Each rank routes its own tokens, sends (token, expert) rows to the expert's owner and gets the
unsummed outputs back; the home rank adds them in expert order. Expert products run on fixed
tiles, so the result has the same bits for every number of ranks.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvflow.comm import Comm, CommError
from kvflow.models.config import GlmConfig
from kvflow.models.ops import Linear, Mlp, pad_rows
from kvflow.models.weights import owned_experts


@frozen(eq=False)
class Router:
    """Sigmoid scores, a bias that only chooses, groups ranked by their two best experts."""

    gate: Linear
    bias: Tensor
    config: GlmConfig

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x ``[n_padded, hidden]`` -> expert ids int64 ``[n_padded, k]``, ascending per token,
        and their weights ``[n_padded, k]``. Ties go to the lower expert."""
        c = self.config
        scores = torch.sigmoid(self.gate(x))
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


def add_in_order(x: Tensor) -> Tensor:
    """``[n, k, ...] -> [n, ...]``: the sum over axis 1, first to last."""
    total = x[:, 0].clone()
    for j in range(1, x.shape[1]):
        total += x[:, j]
    return total


@frozen(eq=False)
class Moe:
    """Routed experts, of which this rank holds `experts`, and a shared expert for every token."""

    router: Router
    experts: range
    mlps: tuple[Mlp, ...]
    shared: Mlp | None

    def __call__(self, x: Tensor, num_rows: int, comm: Comm) -> Tensor:
        """x ``[n_padded, hidden]`` with `num_rows` real rows -> ``[n_padded, hidden]``.

        A collective, with 0 rows too. Raises `CommError` when `comm` is not the group over which
        this rank's experts were chosen."""
        num_experts = self.router.config.n_routed_experts
        if self.experts != owned_experts(num_experts, comm.rank, comm.size):
            raise CommError(
                f"rank {comm.rank} of {comm.size} owns experts "
                f"{owned_experts(num_experts, comm.rank, comm.size)}, but {self.experts} are loaded"
            )
        ids, weights = self.router(x)
        outputs = self._routed(x, ids[:num_rows], comm)
        out = x.new_zeros(x.shape)
        out[:num_rows] = add_in_order(outputs * weights[:num_rows, :, None])
        return out if self.shared is None else out + self.shared(x)

    def _routed(self, x: Tensor, ids: Tensor, comm: Comm) -> Tensor:
        """Unsummed expert outputs ``[n, k, hidden]`` for expert ids ``[n, k]``."""
        num_experts, num_chosen = self.router.config.n_routed_experts, ids.shape[1]
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        load = flat.bincount(minlength=num_experts)
        loads = comm.all_gather(load[None], [1] * comm.size)
        owned = [owned_experts(num_experts, r, comm.size) for r in range(comm.size)]
        counts = [int(load[e.start : e.stop].sum()) for e in owned]
        rows, received = comm.all_to_all(x[order // num_chosen], counts)
        computed = self._compute(rows, loads[:, self.experts.start : self.experts.stop])
        returned, _ = comm.all_to_all(computed, received)
        outputs = torch.empty_like(returned)
        outputs[order] = returned
        return outputs.view(*ids.shape, x.shape[1])

    def _compute(self, rows: Tensor, loads: Tensor) -> Tensor:
        """Outputs of owned experts. `rows` come by source rank, then expert; `loads`
        ``[size, num_owned]`` counts them."""
        expert_of_row = torch.arange(len(self.mlps)).repeat(len(loads))
        expert_of_row = expert_of_row.repeat_interleave(loads.flatten())
        out = torch.empty_like(rows)
        for e in torch.unique(expert_of_row).tolist():
            mine = (expert_of_row == e).nonzero().flatten()
            out[mine] = self.mlps[e](pad_rows(rows[mine]))[: len(mine)]
        return out
