"""Configs and checkpoints: what is read, what is refused and how it is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from glm_fixture import TINY
from safetensors.torch import load_file, save_file

from kvflow.comm import LocalComm
from kvflow.errors import LayoutError
from kvflow.layouts.spec import GLM_5_3
from kvflow.models import (
    ConfigError,
    Glm,
    GlmConfig,
    Segment,
    WeightError,
    load_weights,
    owned_experts,
    weights_digest,
)
from kvflow.models.weights import weight_shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        ({"kv_lora_rank": None}, r"lacks \['kv_lora_rank'\]"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"n_group": 3}, "n_routed_experts 8 over n_group 3"),
        ({"topk_group": 2}, "topk_group 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
    ],
)
def test_refused_configs_name_the_field(tiny_config, change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        GlmConfig.from_hf(tiny_config | change)


def test_spellings_that_disagree(tiny_config) -> None:
    with pytest.raises(LayoutError, match="index_topk_freq"):
        GlmConfig.from_hf(tiny_config | {"index_topk_freq": 2})


def test_both_spellings(tiny_config) -> None:
    hf = {k: v for k, v in tiny_config.items() if k not in ("indexer_types", "rope_parameters")}
    vllm = GlmConfig.from_hf(hf | {"rope_theta": 1e6, "mlp_layer_types": None})
    assert vllm == GlmConfig.from_hf(tiny_config)
    assert vllm.full_index == (True, True, False, False, True)
    assert vllm.dense == (True, False, False, False, False)


def test_kv_spec_of_glm_5_3(tiny_config) -> None:
    rest = {k: tiny_config[k] for k in tiny_config if not k.startswith(("indexer_", "mlp_layer"))}
    config = GlmConfig.from_hf(rest | dict(GLM_5_3) | {"first_k_dense_replace": 3})
    spec = config.kv_spec(kv_dtype="fp8")
    assert (spec.nbytes_per_token, len(spec.components)) == (54728, 101)


@pytest.mark.parametrize("num", [0, 1, 5, 8, 256])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 11])
def test_owned_experts_partition(num: int, size: int) -> None:
    ranges = [owned_experts(num, r, size) for r in range(size)]
    assert [e for r in ranges for e in r] == list(range(num))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def saved(tmp_path: Path, edit) -> Path:
    tensors = load_file(TINY / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(TINY / "config.json", tmp_path)
    return tmp_path


def load(path: Path, experts: range = range(8)):
    return load_weights(path, GlmConfig.load(path), dtype=torch.float64, experts=experts)


def test_all_tensors_are_expected_and_only_owned_experts_loaded() -> None:
    full = load(TINY)
    shapes = weight_shapes(GlmConfig.load(TINY))
    assert {k: tuple(v.shape) for k, v in full.items()} == shapes
    assert all(v.dtype == torch.float64 for v in full.values())
    part = load(TINY, range(2, 4))
    left_out = {k for k in full if ".experts." in k and int(k.split(".")[5]) not in (2, 3)}
    assert len(left_out) == 5 * 6 * 3
    assert part.keys() == full.keys() - left_out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("model.layers.5.enorm.weight"),
            r"model.layers.5.enorm.weight is missing; the config expects shape \[64\]",
        ),
        (
            lambda t: t.update({"model.layers.1.extra": torch.zeros(3)}),
            r"holds model.layers.1.extra of shape \[3\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(319, 64)}),
            r"lm_head.weight has shape \[319, 64\] in model.safetensors; .* expects \[320, 64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}),
            "model.norm.weight is I64",
        ),
    ],
)
def test_bad_checkpoints_name_the_tensor(tmp_path, edit, message) -> None:
    with pytest.raises(WeightError, match=message):
        load(saved(tmp_path, edit))


def test_a_bad_expert_of_another_rank_is_seen(tmp_path) -> None:
    key = "model.layers.1.mlp.experts.7.up_proj.weight"
    path = saved(tmp_path, lambda t: t.update({key: torch.zeros(1, 64)}))
    with pytest.raises(WeightError, match=r"experts.7.up_proj.weight has shape \[1, 64\]"):
        load(path, range(4))


def test_no_checkpoint(tmp_path) -> None:
    with pytest.raises(WeightError, match="holds neither"):
        weights_digest(tmp_path)


def test_sharded_checkpoint_and_digests(tmp_path) -> None:
    tensors = load_file(TINY / "model.safetensors")
    names = sorted(tensors)
    weight_map = {k: f"part-{i % 3}.safetensors" for i, k in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({k: tensors[k] for k in names if weight_map[k] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(TINY / "config.json", tmp_path)
    sharded, single = load(tmp_path), load(TINY)
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[k], single[k]) for k in single)
    before = weights_digest(tmp_path)
    assert before == weights_digest(tmp_path)
    changed = tmp_path / "part-1.safetensors"
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert weights_digest(tmp_path) != before


def test_spec_carries_the_digest() -> None:
    spec = Glm.load(TINY, kv_dtype="fp8").spec
    assert dict(spec.content)["weights"] == weights_digest(TINY)


class NoKV:
    """For calls that must be refused before they reach the cache."""


def test_tokens_that_do_not_fit_the_segments() -> None:
    glm = Glm.load(TINY, kv_dtype="fp8")
    part = [Segment(0, torch.arange(3), 3)]
    with pytest.raises(ConfigError, match="2 tokens, but the segments hold 3"):
        glm.forward(torch.tensor([1, 2]), part, NoKV(), LocalComm())


@pytest.mark.parametrize("tokens", [[1, 2, 320], [-1, 5]])
def test_tokens_outside_the_vocabulary(tokens) -> None:
    glm = Glm.load(TINY, kv_dtype="fp8")
    with pytest.raises(ConfigError, match=r"must lie in \[0, vocab_size = 320\)"):
        glm.check_tokens(tokens)
    glm.check_tokens([0, 319])
    glm.check_tokens([])


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 3], r"0..3 of request 4, must lie in \[0, context_len = 3\)"),
        ([-1, 2], "-1..2"),
        ([0, 2, 1], "must ascend"),
        ([0.5], "must be int64"),
        ([[0]], "must be int64"),
    ],
)
def test_bad_segments(positions, message) -> None:
    with pytest.raises(LayoutError, match=message):
        Segment(4, torch.tensor(positions), 3)


def test_a_model_without_mtp(tiny_config) -> None:
    config = GlmConfig.from_hf(tiny_config | {"num_nextn_predict_layers": 0})
    weights = load(TINY)
    glm = Glm.build(config, weights, config.kv_spec(kv_dtype="fp8"), range(8))
    with pytest.raises(ConfigError, match="no MTP layer"):
        glm.write_mtp(torch.tensor([1]), torch.zeros(1, 64), [Segment(0, torch.tensor([0]), 1)], NoKV())  # fmt: skip  # noqa: E501
