"""Fresh random models against transformers' eager float32 implementation."""

import pytest
import torch
from dense_kv import DenseKV, segment
from glm_drive import greedy

from kvflow.comm import LocalComm
from kvflow.models import Glm


def random_model(path, seed: int, types: list[str], experts: tuple[int, int, int, int]):
    """Saves a random HF model; at least 16 index heads, as few heads make exact score ties."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    num, top, groups, kept = experts
    n = len(types)
    config = GlmMoeDsaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=n, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48,
        kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20,
        index_n_heads=16, index_head_dim=32, index_topk=12, indexer_types=types,
        mlp_layer_types=["dense"] + ["sparse"] * (n - 1), n_routed_experts=num,
        num_experts_per_tok=top, n_group=groups, topk_group=kept, n_shared_experts=1,
        routed_scaling_factor=1.5, max_position_embeddings=512, num_nextn_predict_layers=0,
        initializer_range=0.2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(0.05 * torch.randn_like(buffer))
    model.save_pretrained(path)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "types", "experts"),
    [
        (0, ["full", "shared", "full", "shared"], (8, 2, 1, 1)),
        (1, ["full", "full", "shared"], (16, 4, 4, 2)),
        (2, ["full", "shared", "shared", "full"], (6, 3, 3, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_same_logits_and_tokens(tmp_path, seed, types, experts) -> None:
    model = random_model(tmp_path, seed, types, experts)
    glm, comm = Glm.load(tmp_path, kv_dtype="float32"), LocalComm()
    ids = torch.randint(0, 200, (70,), generator=torch.Generator().manual_seed(seed))
    kv, part = DenseKV(comm, glm.spec), [segment(0, range(70), 70)]
    kv.begin(part)
    got = glm.logits(glm.forward(ids, part, kv, comm))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
        more = model.generate(ids[None], max_new_tokens=16, do_sample=False, eos_token_id=None)
    torch.testing.assert_close(got, want, rtol=0, atol=3e-4)
    assert greedy(glm, ids.tolist(), 16) == more[0, 70:].tolist()
