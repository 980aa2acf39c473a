"""The cache of GLM-5.3 in numbers, and every spelling of its indexer layers."""

import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.record import index_record, latent_record
from kvflow.layouts.spec import GLM_5_3, Component, KVCacheSpec, full_index_layers

SPEC = KVCacheSpec.from_config(GLM_5_3, kv_dtype="fp8")


def full_ids(**config: object) -> list[int]:
    return [i for i, full in enumerate(full_index_layers(config)) if full]


def test_golden_glm_bytes() -> None:
    assert SPEC.nbytes_per_token == 54_728 == 78 * 656 + 21 * 132 + 788
    assert len(SPEC.components) == 101
    assert len(SPEC.select(kind="latent")) == 79
    assert len(SPEC.select(kind="indexer")) == 22
    assert SPEC.block_nbytes(64) == 3_502_592 == 79 * 41_984 + 22 * 8_448
    assert 101 * 1_048_576 // 64 == 1_654_784
    assert 54_728 * 1_048_576 // 2**20 == 54_728


def test_golden_glm_fields() -> None:
    latent, key = SPEC["latent.0"].record, SPEC["indexer.0"].record
    assert [(f.name, f.num_elements) for f in latent.fields] == [
        ("latent", 512), ("scale", 4), ("rope", 64),
    ]  # fmt: skip
    assert [(f.name, f.num_elements) for f in key.fields] == [("key", 128), ("scale", 1)]


def test_golden_both_offset_spellings_give_21_of_78_layers() -> None:
    three = full_ids(num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3)
    two = full_ids(num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=2)
    assert three == [0, 1, 2, *range(6, 75, 4)]
    assert two == [0, 1, *range(5, 78, 4)]
    assert len(three) == len(two) == 21


def test_explicit_spellings() -> None:
    types = ["full", "shared", "full", "shared"]
    assert full_ids(num_hidden_layers=4, indexer_types=types) == [0, 2]
    assert full_ids(num_hidden_layers=4, index_topk_pattern="FSFS") == [0, 2]
    assert full_ids(num_hidden_layers=4, index_topk_pattern=types) == [0, 2]
    assert full_ids(num_hidden_layers=4) == [0, 1, 2, 3]
    assert full_ids(num_hidden_layers=4, index_topk_freq=1) == [0, 1, 2, 3]
    assert full_ids(
        num_hidden_layers=4, indexer_types=types, index_topk_freq=2, index_skip_topk_offset=1
    ) == [0, 2]
    assert full_index_layers({"num_hidden_layers": 0, "index_topk_pattern": "F"} | {
        "index_topk_pattern": None}) == ()  # fmt: skip


def test_spellings_that_disagree_or_make_no_sense_are_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"indexer_types says .*\[0\], index_topk_pattern says .*\[0, 1\]"
    ):
        full_ids(num_hidden_layers=2, indexer_types=["full", "shared"], index_topk_pattern="FF")
    with pytest.raises(LayoutError, match="describes 1 layers, num_hidden_layers is 2"):
        full_ids(num_hidden_layers=2, index_topk_pattern="F")
    with pytest.raises(LayoutError, match="makes layer 0 shared"):
        full_ids(num_hidden_layers=2, index_topk_pattern="SF")
    with pytest.raises(LayoutError, match="num_hidden_layers is -1, must be at least 0"):
        full_ids(num_hidden_layers=-1)
    with pytest.raises(LayoutError, match="index_skip_topk_offset is -1, must be at least 0"):
        full_ids(num_hidden_layers=2, index_topk_freq=1, index_skip_topk_offset=-1)
    for freq in (2, 3, 4):
        with pytest.raises(LayoutError, match="makes layer 0 shared"):
            full_ids(num_hidden_layers=4, index_topk_freq=freq)


def test_components_stand_in_layer_order_with_absolute_ids() -> None:
    config = {
        "num_hidden_layers": 3, "num_nextn_predict_layers": 2, "kv_lora_rank": 4,
        "qk_rope_head_dim": 2, "index_head_dim": 4, "index_topk_pattern": "FSF",
    }  # fmt: skip
    spec = KVCacheSpec.from_config(config, content={"model": "m"})
    assert spec.names == (
        "latent.0", "indexer.0", "latent.1", "latent.2", "indexer.2",
        "latent.3", "indexer.3", "latent.4", "indexer.4",
    )  # fmt: skip
    assert spec.select(part="mtp") == ("latent.3", "indexer.3", "latent.4", "indexer.4")
    assert spec.select(part="main", kind="indexer") == ("indexer.0", "indexer.2")
    assert spec.select() == spec.names
    assert spec["latent.1"].record == latent_record("fp8", latent_rank=4, rope_dim=2)
    assert spec["indexer.4"].record == index_record("fp8", index_dim=4)
    assert spec["indexer.4"].layer_id == 4
    assert dict(spec.content) == {
        "spec_version": "1", "kv_dtype": "fp8", "rope_order": "interleaved",
        "model": "m", "e4m3": "e4m3fn",
        "scale_group": "latent 128, key whole",
        "scale_rounding": "latent to nearest, key up to a power of two",
        "norm_stage": "latent and key behind their norms, rope behind the rotation",
    }  # fmt: skip
    plain = dict(KVCacheSpec.from_config(config, kv_dtype="float32").content)
    assert {plain[k] for k in ("e4m3", "scale_group", "scale_rounding")} == {"none"}
    assert list(spec.content) == sorted(spec.content)
    rows = KVCacheSpec.from_config(config, kv_dtype="bfloat16", index_arrangement="row")
    assert str(rows["indexer.0"].record.arrangement) == "[key: t e]"
    assert dict(rows.content)["kv_dtype"] == "bfloat16"
    for missing in ({"num_nextn_predict_layers": None}, {"num_nextn_predict_layers": 0}):
        assert KVCacheSpec.from_config(config | missing).names == spec.names[:5]
    del config["num_nextn_predict_layers"]
    assert KVCacheSpec.from_config(config).names == spec.names[:5]


def test_a_spec_refuses_names_twice_and_unknown_ones() -> None:
    component = Component("latent", 0, latent_record("fp8", latent_rank=4, rope_dim=2))
    with pytest.raises(LayoutError, match=r"components named twice: \['latent.0'\]"):
        KVCacheSpec((component, Component("indexer", 0, component.record), component))
    with pytest.raises(LayoutError, match=r"no component 'x'; the spec has \['latent.0'\]"):
        KVCacheSpec((component,))["x"]
    with pytest.raises(LayoutError, match=r"content fields named twice: \['b'\]"):
        KVCacheSpec((component,), (("a", "1"), ("b", "1"), ("b", "2")))
    assert component.part == "main"


def test_a_spec_holds_something() -> None:
    """The language has no word for nothing."""
    with pytest.raises(LayoutError, match="has 0 components, must have at least 1"):
        KVCacheSpec(())


def test_fault_c02_page_bytes_do_not_depend_on_the_parallel_configuration() -> None:
    again = KVCacheSpec.from_config(dict(GLM_5_3), kv_dtype="fp8")
    assert again == SPEC
    assert [c.record.page_nbytes(64) for c in again.components] == [
        41_984 if c.kind == "latent" else 8_448 for c in SPEC.components
    ]


def test_fault_f13_components_are_named_by_absolute_layer() -> None:
    ids = [SPEC[name].layer_id for name in SPEC.select(kind="indexer", part="main")]
    assert ids == [0, 1, 2, *range(6, 75, 4)]
    assert SPEC.select(kind="indexer", part="mtp") == ("indexer.78",)
    assert 78 - len(ids) == 57


def test_keys_and_values_of_attention_heads() -> None:
    spec = KVCacheSpec.of_attention(2, num_heads=3, head_dim=4, content={"model": "m"})
    assert spec.names == ("key.0", "value.0", "key.1", "value.1")
    assert [c.layer_id for c in spec.components] == [0, 0, 1, 1]
    assert spec.nbytes_per_token == 2 * 2 * 3 * 4 * 2
    assert dict(spec.content)["model"] == "m"
    assert "model" not in dict(KVCacheSpec.of_attention(1, num_heads=1, head_dim=1).content)
