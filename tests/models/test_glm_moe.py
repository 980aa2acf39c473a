"""Routing against reference vectors, and expert parallelism that changes no bit."""

import json

import pytest
import torch
from glm_fixture import FIXTURES, TINY
from safetensors import safe_open

from kvflow.comm import Comm, CommError, LocalComm, run_ranks
from kvflow.models import GlmConfig, load_weights, owned_experts
from kvflow.models.build import _moe
from kvflow.models.moe import Moe, Router
from kvflow.models.ops import Linear

VECTORS = FIXTURES / "router_vectors.safetensors"


@pytest.mark.parametrize("case", ["glm", "grouped", "nonorm"])
def test_router_vectors(tiny_config, case) -> None:
    with safe_open(VECTORS, framework="pt") as file:
        meta = json.loads(file.metadata()["meta"])[case]
        v = {n: file.get_tensor(f"{case}.{n}") for n in ("x", "weight", "bias", "ids_sorted", "w")}
    config = GlmConfig.from_hf(
        tiny_config
        | {
            "n_routed_experts": meta["E"],
            "num_experts_per_tok": meta["top_k"],
            "n_group": meta["n_group"],
            "topk_group": meta["topk_group"],
            "norm_topk_prob": meta["norm"],
            "routed_scaling_factor": meta["scale"],
        }
    )
    ids, weights = Router(Linear.from_hf(v["weight"]), v["bias"], config)(v["x"])
    assert torch.equal(ids, v["ids_sorted"].long())
    torch.testing.assert_close(weights, v["w"], rtol=1e-5, atol=1e-6)


def moe_layer(config: GlmConfig, rank: int, size: int, bias: torch.Tensor | None = None) -> Moe:
    experts = owned_experts(config.n_routed_experts, rank, size)
    weights = load_weights(TINY, config, dtype=torch.float64, experts=experts)
    if bias is not None:
        weights["model.layers.2.mlp.gate.e_score_correction_bias"] = bias
    return _moe(config, weights, "model.layers.2.mlp.", experts)


def oracle(config: GlmConfig, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Token by token, expert by expert, with plain matrix products."""
    w = load_weights(TINY, config, dtype=torch.float64, experts=range(8))
    p = "model.layers.2.mlp."

    def mlp(name: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (w[f"{p}{name}.{k}_proj.weight"] for k in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    out = []
    for row in x:
        scores = 1 / (1 + torch.exp(-(w[p + "gate.weight"] @ row)))
        choice = scores + (w[p + "gate.e_score_correction_bias"] if bias is None else bias)
        best = sorted(range(8), key=lambda e: -float(choice[e]))[:2]
        total = sum(float(scores[e]) for e in best)
        routed = sum(float(scores[e]) / total * 2.5 * mlp(f"experts.{e}", row) for e in best)
        out.append(routed + mlp("shared_experts", row))
    return torch.stack(out) if out else x


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_expert_parallel_changes_no_bit(tiny_config, size: int, skewed: bool) -> None:
    """0, 1, P-1 and 2P+1 tokens, with routing as it comes or all tokens on experts 5 and 6."""
    config = GlmConfig.from_hf(tiny_config)
    bias = None
    if skewed:
        bias = torch.zeros(8, dtype=torch.float64)
        bias[5:7] = 100.0
    alone = moe_layer(config, 0, 1, bias)
    generator = torch.Generator().manual_seed(size)
    for num in {0, 1, size - 1, 2 * size + 1}:
        x = torch.randn(num, 64, generator=generator, dtype=torch.float64)
        want = alone(x, LocalComm(), LocalComm())
        torch.testing.assert_close(want, oracle(config, x, bias), rtol=1e-12, atol=1e-12)

        def body(comm: Comm, x: torch.Tensor = x) -> torch.Tensor:
            mine = x[comm.rank :: comm.size]
            layer = moe_layer(config, comm.rank, comm.size, bias)
            return layer(mine, comm, LocalComm())

        for rank, got in enumerate(run_ranks(size, body)):
            assert torch.equal(got, want[rank::size])


def test_experts_of_another_group_are_refused(tiny_config) -> None:
    config = GlmConfig.from_hf(tiny_config)
    layer = moe_layer(config, 1, 2)
    with pytest.raises(CommError, match=r"owns experts range\(0, 8\), but range\(4, 8\)"):
        layer(torch.zeros(16, 64, dtype=torch.float64), LocalComm(), LocalComm())
