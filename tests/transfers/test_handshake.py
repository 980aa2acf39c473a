"""Two engines agree on what is moved, or part naming the field that differs."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from planning import CONFIG, bound

from kvflow.errors import ContentMismatch, PlanError
from kvflow.layouts.identity import MEANING
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.wire import layout_from_wire, layout_to_wire
from kvflow.testing import layouts, specs
from kvflow.transfers.cuts import moved_by
from kvflow.transfers.handshake import agree
from kvflow.transfers.lower import BoundPlan

STATED = {"model": "toy", "weights": "w1"}
MTP = ("indexer.2", "latent.2")


def spec_of(content: dict[str, str] = STATED, dtype="fp8", **changes) -> KVCacheSpec:
    return KVCacheSpec.from_config(CONFIG | changes, kv_dtype=dtype, content=content)


def prefill(spec: KVCacheSpec, paging=None) -> KVLayout:
    return KVLayout.uniform(spec, Placement.simple(RoundRobin(2)), paging or Paged(4))


def decode(spec: KVCacheSpec, paging=None) -> KVLayout:
    return KVLayout.uniform(spec, Placement.simple(Replicated()), paging or Paged(8))


def refused(source: KVCacheSpec, target: KVCacheSpec, **named) -> str:
    with pytest.raises(ContentMismatch) as error:
        agree(prefill(source), decode(target), **named)
    return str(error.value)


def stated(spec: KVCacheSpec, **fields: str) -> KVCacheSpec:
    known = dict.fromkeys(MEANING, "any") | dict(spec.content) | STATED | fields
    return evolve(spec, content=tuple(known.items()))


@given(st.data())
def test_equal_content_in_any_two_placements_yields_a_plan(data) -> None:
    spec = stated(data.draw(specs()))
    source = data.draw(layouts(spec, (0, 20)))
    target = data.draw(layouts(spec, (0, 20)))
    terms = agree(source, target)
    assert sorted(terms.moved) == sorted(spec.names)
    assert (terms.recomputed, terms.absent) == ((), ())
    plan = terms.plan((3, 17))
    assert plan.tokens == (3, 17)
    assert sorted(moved_by(plan)) == sorted(spec.names)
    assert set(terms.mtp) == set(spec.select(part="mtp"))


def test_both_sides_derive_the_same_terms_from_what_they_exchange() -> None:
    source, target = prefill(spec_of()), decode(spec_of())
    here, there = (layout_from_wire(layout_to_wire(side)) for side in (source, target))
    assert agree(source, there) == agree(here, target)
    back = agree(target, source)
    assert back.moved == agree(source, target).moved
    assert [(d.field, d.target, d.source) for d in back.differences if d.field == "num_shards"] == [
        ("num_shards", "2", "1")
    ]


def test_the_terms_say_what_differs_and_what_becomes_of_each_component() -> None:
    terms = agree(prefill(spec_of(num_nextn_predict_layers=0)), decode(spec_of()), recomputed=MTP)
    assert terms.mtp == {"latent.2": "recomputed", "indexer.2": "recomputed"}
    assert terms.fate("latent.0") == "moved"
    text = str(terms)
    assert "moved: indexer.0, latent.0, latent.1\n" in text
    assert "recomputed at the target: indexer.2, latent.2\nabsent: none\n" in text
    assert "num_shards: source '2', target '1'" in text
    assert "block_size of indexer.0, latent.0, latent.1: source '4', target '8'" in text
    with pytest.raises(PlanError, match=r"latent\.9"):
        terms.fate("latent.9")


# --- one field at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEANING)
def test_fault_c13_c14_one_field_of_content_is_named_with_both_values(name: str) -> None:
    one, two = stated(spec_of(), **{name: "one"}), stated(spec_of(), **{name: "two"})
    assert refused(one, two) == f"content field '{name}': source has 'one', target 'two'"
    assert refused(two, one) == f"content field '{name}': source has 'two', target 'one'"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "bfloat16"}, "'kv_dtype': source has 'fp8', target 'bfloat16'"),
        ({"rms_norm_eps": 1e-6}, "'rms_norm_eps': source has '1e-05', target '1e-06'"),
        ({"num_hidden_layers": 3, "indexer_types": ["full", "shared", "shared"]}, "indexer.2'"),
        ({"indexer_types": ["full", "full"]}, "indexer.1': source has nothing, target 'main key:"),
        ({"kv_lora_rank": 8}, "latent:float8_e4m3fn[4]"),
        ({"qk_rope_head_dim": 4}, "rope:bfloat16[2]"),
        ({"index_head_dim": 8}, "key:float8_e4m3fn[4]"),
    ],
)
def test_fault_c13_c14_a_changed_config_is_refused_by_its_field(change, says: str) -> None:
    message = refused(spec_of(), spec_of(**change))
    assert message.startswith("content field ")
    assert says in message


def test_fault_c15_the_same_geometry_with_other_weights_is_refused() -> None:
    other = spec_of(STATED | {"weights": "w2"})
    assert refused(spec_of(), other) == "content field 'weights': source has 'w1', target 'w2'"


def test_fault_c15_weights_that_neither_side_states_are_refused() -> None:
    silent = spec_of({"model": "toy"})
    assert "'weights': neither side states it" in refused(silent, silent)
    assert "'weights': source has nothing, target 'w1'" in refused(silent, spec_of())


def test_fault_c13_what_may_differ_yields_a_plan_and_is_listed() -> None:
    planar = KVCacheSpec.from_config(CONFIG, content=STATED)
    rows = KVCacheSpec.from_config(CONFIG, content=STATED, index_arrangement="row")
    terms = agree(prefill(planar), decode(rows, Pool(1)))
    assert {d.field for d in terms.differences} >= {
        "sharding",
        "ranks",
        "block_size",
        "memory",
        "arrangement",
    }
    plan = terms.plan((0, 9))
    BoundPlan(plan, bound(plan.src, 9), bound(plan.dst, 9))


# --- same bytes, another meaning ------------------------------------------------------------------


def test_fault_f07_formats_of_equal_width_are_refused() -> None:
    def as_fp16(spec: KVCacheSpec) -> KVCacheSpec:
        components = []
        for c in spec.components:
            fields = [evolve(f, dtype="float16") for f in c.record.fields]
            components.append(evolve(c, record=evolve(c.record, fields=fields)))
        return evolve(spec, components=components)

    bf16 = spec_of(dtype="bfloat16")
    fp16 = as_fp16(bf16)
    assert fp16.nbytes_per_token == bf16.nbytes_per_token
    message = refused(bf16, fp16)
    assert message.endswith("source has 'main key:bfloat16[4]', target 'main key:float16[4]'")


def test_fault_f12_rows_of_656_and_640_bytes_are_refused() -> None:
    full = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    short = {"kv_lora_rank": 512, "qk_rope_head_dim": 56}
    a, b = spec_of(**full), spec_of(**short)
    assert (a["latent.0"].record.nbytes, b["latent.0"].record.nbytes) == (656, 640)
    message = refused(a, b)
    assert "rope:bfloat16[64]" in message
    assert "rope:bfloat16[56]" in message


def test_fault_f01_page_order_is_placement_but_field_order_is_content() -> None:
    spec = spec_of()
    swapped = [
        evolve(c, record=evolve(c.record, fields=c.record.fields[::-1]))
        if c.kind == "indexer"
        else c
        for c in spec.components
    ]
    assert "component indexer.0" in refused(spec, evolve(spec, components=swapped))


def test_fault_f13_layers_match_by_absolute_id_not_by_their_place() -> None:
    types = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}
    spec = spec_of(**types)
    apart = KVLayout(
        evolve(spec, components=spec.components[::-1]),  # an index cache with numbers of its own
        Placement.simple(Replicated()),
        [CacheGroup(k, spec.select(kind=k)[::-1], Paged(8)) for k in ("indexer", "latent")],
    )
    terms = agree(prefill(spec), apart)
    assert terms.moved == (
        *("indexer.0", "latent.0", "latent.1", "latent.2", "indexer.3", "latent.3"),
        *("indexer.4", "latent.4"),
    )
    compact = [
        evolve(c, layer_id=1) if c.name == "indexer.3" else c for c in spec.components
    ]  # numbers its index caches 0, 1, ...
    message = refused(spec, evolve(spec, components=compact))
    assert "'component indexer.3'" in message
    assert message.endswith("target nothing")


# --- components that one side lacks ---------------------------------------------------------------


def test_fault_b10_a_missing_mtp_layer_is_refused_until_it_is_agreed() -> None:
    without, with_mtp = spec_of(num_nextn_predict_layers=0), spec_of()
    message = refused(without, with_mtp)
    assert message.startswith("content field 'component indexer.2': source has nothing, target")
    assert "target nothing" in refused(with_mtp, without)
    assert "latent.2" in refused(without, with_mtp, recomputed=["indexer.2"])
    for named in ({"recomputed": MTP}, {"absent": MTP}):
        terms = agree(prefill(without), decode(with_mtp), **named)
        assert set(terms.moved) == set(without.names)
        assert set(terms.mtp.values()) == set(named)
        assert terms.plan((0, 5)).absent == MTP
    assert agree(prefill(with_mtp), decode(without), absent=MTP).absent == MTP


def test_fault_b08_a_component_both_declare_can_be_given_up_only_by_name() -> None:
    terms = agree(prefill(spec_of()), decode(spec_of()), absent=MTP)
    assert terms.absent == MTP
    assert not set(MTP) & set(terms.moved)


def test_names_that_say_something_untrue_are_refused() -> None:
    both, without = spec_of(), spec_of(num_nextn_predict_layers=0)
    with pytest.raises(PlanError, match="but the source has them"):
        agree(prefill(both), decode(both), recomputed=MTP)
    with pytest.raises(PlanError, match="but the source has them"):
        agree(prefill(both), decode(without), recomputed=MTP)
    with pytest.raises(PlanError, match="at once"):
        agree(prefill(without), decode(both), recomputed=MTP, absent=MTP)
    with pytest.raises(PlanError, match=r"\['latent\.7'\] are declared by neither side"):
        agree(prefill(both), decode(both), absent=["latent.7"])


def test_an_absent_component_may_differ_in_content() -> None:
    spec = spec_of()
    changed = [evolve(c, part="main") if c.name == "latent.2" else c for c in spec.components]
    other = evolve(spec, components=changed)
    assert "component latent.2" in refused(spec, other)
    assert "latent.2" not in agree(prefill(spec), decode(other), absent=["latent.2"]).moved
