"""Content and placement as values: what differs is named, in any process alike."""

import os
import subprocess
import sys

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts import (
    CacheGroup,
    KVCacheSpec,
    KVLayout,
    Paged,
    Placement,
    Pool,
    Replicated,
    RoundRobin,
)
from kvflow.layouts.identity import MEANING, ContentIdentity, Difference, PlacementIdentity
from kvflow.layouts.layout import Stage
from kvflow.testing import layouts, rearranged, specs

CONFIG = {
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "index_head_dim": 4,
    "indexer_types": ["full", "shared", "full"],
    "rms_norm_eps": 1e-5,
}
SPEC = KVCacheSpec.from_config(CONFIG, content={"model": "toy", "weights": "w1"})


def with_field(spec: KVCacheSpec, name: str, value: str) -> KVCacheSpec:
    return evolve(spec, content=tuple((dict(spec.content) | {name: value}).items()))


def differences(a: KVCacheSpec, b: KVCacheSpec) -> list[Difference]:
    return list(ContentIdentity.of(a).differences(ContentIdentity.of(b)))


def test_equal_specs_have_one_identity_whatever_their_order() -> None:
    other = KVCacheSpec(SPEC.components[::-1], SPEC.content[::-1])
    assert other != SPEC
    assert ContentIdentity.of(other) == ContentIdentity.of(SPEC)
    assert ContentIdentity.of(other).fingerprint == ContentIdentity.of(SPEC).fingerprint


def test_the_meaning_is_stated_in_full_and_in_order() -> None:
    content = ContentIdentity.of(with_field(SPEC, "adapter", "none"))
    assert [key for key, _ in content.meaning] == [*MEANING, "adapter"]
    assert content.unstated == ()
    bare = evolve(SPEC, content=[p for p in SPEC.content if p[0] not in ("weights", "e4m3")])
    assert ContentIdentity.of(bare).unstated == ("weights", "e4m3")


@pytest.mark.parametrize("name", [*MEANING, "adapter"])
def test_every_field_differs_alone_and_changes_the_fingerprint(name: str) -> None:
    a, b = with_field(SPEC, name, "one"), with_field(SPEC, name, "two")
    assert differences(a, b) == [Difference(name, "one", "two")]
    assert ContentIdentity.of(a).fingerprint != ContentIdentity.of(b).fingerprint
    missing = evolve(a, content=[p for p in a.content if p[0] != name])
    assert differences(a, missing) == [Difference(name, "one", None)]
    assert differences(missing, a) == [Difference(name, None, "one")]


def test_differences_come_in_the_order_of_meaning_then_by_layer() -> None:
    other = with_field(with_field(SPEC, "adapter", "x"), "model", "y")
    other = evolve(other, components=other.components[:-2])
    assert [d.field for d in differences(SPEC, other)] == [
        "model",
        "adapter",
        "component",
        "component",
    ]
    assert [d.components for d in differences(SPEC, other)][2:] == [("indexer.3",), ("latent.3",)]


@given(st.data())
def test_page_arrangement_is_placement_and_not_content(data) -> None:
    spec = data.draw(specs())
    other = data.draw(rearranged(spec))
    assert differences(spec, other) == []


@given(st.data())
def test_placements_differ_in_no_field_exactly_if_they_are_equal(data) -> None:
    spec = data.draw(specs())
    a, b = (data.draw(layouts(spec, (0, 9))) for _ in range(2))
    assert PlacementIdentity.of(a).differences(PlacementIdentity.of(a)) == ()
    same = PlacementIdentity.of(a) == PlacementIdentity.of(b)
    assert (PlacementIdentity.of(a).differences(PlacementIdentity.of(b)) == ()) == same
    assert (PlacementIdentity.of(a).fingerprint == PlacementIdentity.of(b).fingerprint) == same
    if not same:
        assert a != b


def test_a_field_of_many_components_is_said_once() -> None:
    a = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2, 4)), Paged(8))
    indexers = SPEC.select(kind="indexer")
    groups = [
        CacheGroup("gpu", indexers, Paged(8)),
        CacheGroup("host", SPEC.select(kind="latent"), Pool(1)),
    ]
    b = KVLayout(SPEC, Placement(RoundRobin(2, 1), ((1,), (0,))), groups)
    found = PlacementIdentity.of(a).differences(PlacementIdentity.of(b))
    latents = SPEC.select(kind="latent")
    assert found == (
        Difference("interleave", "4", "1"),
        Difference("ranks", "0|1", "1|0"),
        Difference("group", "kv", "gpu", indexers),
        Difference("group", "kv", "host", latents),
        Difference("block_size", "8", "1", latents),
        Difference("memory", "Paged", "Pool", latents),
    )
    assert str(found[4]) == "block_size of latent.0 and 3 more: source '8', target '1'"
    assert str(found[0]) == "interleave: source '4', target '1'"
    said = "memory of latent.0, latent.1, latent.2: source 'Paged', target 'Pool'"
    assert str(evolve(found[5], components=latents[:3])) == said


def test_heads_layers_and_hosts_are_placement() -> None:
    spec = KVCacheSpec.of_attention(2, num_heads=2, head_dim=4, kv_dtype="float32")
    plain = KVLayout.uniform(spec, Placement(Replicated(), ((0, 1),)), Paged(8))
    stages = [Stage(spec.names[:2], [0]), Stage(spec.names[2:], [1])]
    for name, value, text in (
        ("head_ranks", ((0,), (1,)), "((0,), (1,))"),
        ("stages", stages, str(tuple(stages))),
        ("hosts", ((1, 0),), "((1, 0),)"),
    ):
        other = evolve(plain, **{name: value})
        found = PlacementIdentity.of(plain).differences(PlacementIdentity.of(other))
        assert found == (Difference(name, "()", text),)


def test_heads_are_part_of_a_shape() -> None:
    def key_of(num_heads: int) -> str:
        spec = KVCacheSpec.of_attention(1, num_heads=num_heads, head_dim=4, kv_dtype="float32")
        return dict(ContentIdentity.of(spec).components)["key.0"]

    assert [key_of(n) for n in (1, 2)] == ["main key:float32[4]", "main key:float32[2x4]"]


def test_a_field_that_one_sharding_lacks_is_none_there() -> None:
    a = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(1)), Paged(8))
    b = KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(8))
    found = PlacementIdentity.of(a).differences(PlacementIdentity.of(b))
    assert Difference("interleave", "1", None) in found
    assert Difference("sharding", "RoundRobin", "Replicated") in found


def test_fields_named_twice_are_refused() -> None:
    with pytest.raises(LayoutError, match="twice"):
        ContentIdentity([("model", "a"), ("model", "b")], [])


def test_fields_are_texts_and_further_ones_follow_by_name() -> None:
    with pytest.raises(LayoutError, match="expected a str, got 1"):
        ContentIdentity([("model", 1)], [])  # type: ignore[list-item]
    spec = with_field(with_field(SPEC, "b_salt", "1"), "a_salt", "2")
    assert ContentIdentity.of(spec).meaning[-2:] == (("a_salt", "2"), ("b_salt", "1"))


def test_no_two_contents_share_a_fingerprint_by_their_delimiters() -> None:
    pairs = [[("a", "b"), ("c", "d")], [("a", 'b"],["c'), ("d", "")], [("a", "b,c"), ("d", "")]]
    prints = {ContentIdentity(meaning, []).fingerprint for meaning in pairs}
    prints |= {ContentIdentity([], meaning).fingerprint for meaning in pairs}
    assert len(prints) == 6


CHILD = """
from kvflow.layouts import GLM_5_3, KVCacheSpec, KVLayout, Paged, Placement, RoundRobin
from kvflow.layouts.identity import ContentIdentity, PlacementIdentity
spec = KVCacheSpec.from_config(GLM_5_3, content={"weights": "w", "model": "m"})
layout = KVLayout.uniform(spec, Placement.simple(RoundRobin(8)), Paged(1536))
print(ContentIdentity.of(spec).fingerprint, PlacementIdentity.of(layout).fingerprint)
"""


def test_fault_a16_processes_of_any_hash_seed_derive_one_fingerprint() -> None:
    said = set()
    for seed in (None, "0", "1"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        env |= {} if seed is None else {"PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", CHILD]
        done = subprocess.run(run, capture_output=True, text=True, env=env, timeout=60, check=True)
        said.add(done.stdout)
    assert len(said) == 1
    scope: dict[str, object] = {}
    exec(CHILD.replace("print(", "said = ("), scope)
    assert " ".join(scope["said"]) == said.pop().strip()  # type: ignore[arg-type]
