"""Constructors return a lawful value or raise: integers, tuples, read-only copies."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Dense, GlobalSlot, LocalSlot, Paged, Pool
from kvflow.layouts.record import Field, Record, latent_record
from kvflow.layouts.sharding import ANY_STOP, Replicated, RoundRobin, Runs
from kvflow.layouts.spec import Component, KVCacheSpec, full_index_layers
from kvflow.layouts.wire import layout_from_wire, layout_to_wire

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "kv_lora_rank": 4,
    "qk_rope_head_dim": 2, "index_head_dim": 4,
}  # fmt: skip
SPEC = KVCacheSpec.from_config(CONFIG)
RECORD = latent_record("bfloat16", latent_rank=4, rope_dim=2)
LAYOUT = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2)), Paged(4))

MAKERS: list[Callable[[Any], object]] = [
    RoundRobin,
    lambda n: RoundRobin(2, n),
    lambda n: Replicated(n, 9),
    lambda n: Replicated(0, n),
    lambda n: BalancedChunks(n, 0, 9),
    lambda n: BalancedChunks(2, n, 9),
    lambda n: BalancedChunks(2, 0, n),
    lambda n: BalancedChunks(2, 0, 9, rotate=n),
    lambda n: Contiguous(n, 0, 9),
    lambda n: Contiguous(2, n, 9),
    lambda n: Contiguous(2, 0, n),
    lambda n: Axis("a", n),
    lambda n: Placement(Replicated(), ((n,),)),
    Paged,
    Pool,
    Dense,
    lambda n: LocalSlot(n, 1),
    lambda n: LocalSlot(1, n),
    GlobalSlot,
    lambda n: Field("a", "uint8", n),
    lambda n: Component("latent", n, RECORD),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("bad", [2.0, 1.5, True, np.True_, "2", None, [2], np.float64(2)])
def test_numbers_are_integers(make: Callable[[Any], object], bad: object) -> None:
    with pytest.raises(LayoutError, match="must be an integer"):
        make(bad)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.array])
def test_numpy_integers_are_the_same_values(
    make: Callable[[Any], object], kind: Callable[[int], Any]
) -> None:
    one, other = make(kind(3)), make(3)
    assert (one, str(one), repr(one)) == (other, str(other), repr(other))
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placement(Replicated(), ((-1,),)),
        lambda: Placement(Replicated(), ((2**62,),)),
        lambda: LocalSlot(-1, 0),
        lambda: LocalSlot(0, -1),
        lambda: GlobalSlot(-5),
        lambda: Component("latent", -1, RECORD),
    ],
)
def test_negative_places_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(LayoutError, match="must be at least 0"):
        make()


def test_zero_is_a_place() -> None:
    assert (LocalSlot(0, 0).rank, LocalSlot(0, 0).index, GlobalSlot(0).index) == (0, 0, 0)
    assert Component("latent", 0, RECORD).name == "latent.0"
    assert (Paged(1).block_size, Field("a", "uint8", 1).nbytes) == (1, 1)


def test_small_numpy_integers_do_not_overflow() -> None:
    deal = RoundRobin(np.int8(8), np.int8(64))
    assert deal.period == 512
    assert deal.local([511, 512]).tolist() == [63, 64]
    assert deal.local_len(np.int16(1000), range(8)).sum() == 1000
    for sharding in (RoundRobin(2), Replicated(), BalancedChunks(2, 0, 99)):
        for bad in (10.5, True):
            with pytest.raises(LayoutError, match="must be an integer"):
                sharding.local_len(bad, [0])  # type: ignore[arg-type]
            with pytest.raises(LayoutError, match="must be an integer"):
                sharding.runs(0, bad)  # type: ignore[arg-type]
        runs = sharding.runs(np.int8(3), np.int8(90))
        assert isinstance(runs, Runs)
        assert runs.count.sum() == 87


@given(st.integers(1, 9), st.integers(1, 70), st.data())
def test_the_last_local_index_is_the_last_position(w: int, i: int, data: st.DataObject) -> None:
    """Exact at the very end of the domain, in Python integers; one further is refused."""
    deal, shard = RoundRobin(w, i), data.draw(st.integers(0, w - 1))
    below = data.draw(st.integers(0, 5))
    rounds, rest = divmod(ANY_STOP, w * i)
    length = rounds * i + min(max(rest - shard * i, 0), i)
    local = length - 1 - below
    t = int(deal.token(shard, local))
    assert t == (local // i * w + shard) * i + local % i < ANY_STOP
    assert (int(deal.owner(t)), int(deal.local(t))) == (shard, local)
    for beyond in (length, 2**62, 2**63 - 1):
        with pytest.raises(LayoutError, match=f"local index {beyond} is a position of"):
            deal.token(shard, beyond)


def test_places_beyond_64_bits_are_refused() -> None:
    with pytest.raises(LayoutError, match="local index 1152921504606846976"):
        RoundRobin(8, 1).token(7, 2**60)
    with pytest.raises(LayoutError, match="deals rounds of more than"):
        RoundRobin(2**31, 2**32)
    with pytest.raises(LayoutError, match=r"below 2\*\*63"):
        RoundRobin(2).owner(np.uint64(2**63 + 5))
    with pytest.raises(LayoutError, match="is outside"):
        RoundRobin(2).owner(2**62)
    for make in (Paged, Pool, Dense, GlobalSlot):
        assert make(2**62) == make(2**62)
        with pytest.raises(LayoutError, match=f"= {2**62 + 1}, must be at most {2**62}"):
            make(2**62 + 1)


def test_rows_of_unequal_length_are_no_integers() -> None:
    with pytest.raises(LayoutError, match=r"expected integers, got \[1, \[2\]\]"):
        RoundRobin(2).owner([1, [2]])
    with pytest.raises(LayoutError):
        Replicated(5).token(0, 2**63 - 1)


def test_sequences_become_tuples() -> None:
    placed = Placement(RoundRobin(2), [[0], [np.int64(1)]])  # type: ignore[arg-type]
    assert placed == Placement(RoundRobin(2), ((0,), (1,)))
    assert hash(placed) == hash(Placement(RoundRobin(2), ((0,), (1,))))
    group = CacheGroup("kv", list(SPEC.names), Paged(4))
    made = KVLayout(SPEC, LAYOUT.placement, [group])
    assert made == LAYOUT
    assert hash(made) == hash(LAYOUT)
    assert hash(Mesh([Axis("a", 4), Axis("b", 2, ["a"])])) == hash(
        Mesh((Axis("a", 4), Axis("b", 2, ("a",))))
    )
    assert hash(Record(list(RECORD.fields))) == hash(RECORD)
    spec = KVCacheSpec(list(SPEC.components), [list(p) for p in SPEC.content])  # type: ignore[misc]
    assert (spec, hash(spec)) == (SPEC, hash(SPEC))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Axis("a", 2, "b"),
        lambda: Axis("a", 2, (1,)),
        lambda: Mesh("ab"),
        lambda: Mesh(None),
        lambda: Placement(RoundRobin(2), "01"),
        lambda: Placement(RoundRobin(2), None),
        lambda: CacheGroup("kv", "latent.0", Paged(4)),
        lambda: CacheGroup("kv", SPEC.names, None),
        lambda: KVLayout(SPEC, LAYOUT.placement, ("kv",)),
        lambda: Record(("a",)),
        lambda: KVCacheSpec((1,)),
        lambda: KVCacheSpec(SPEC.components, (("a", 1),)),
        lambda: KVCacheSpec(SPEC.components, (("a", "1"), ("a", "2"))),
        lambda: Component("query", 0, RECORD),
        lambda: Component("latent", 0, RECORD, "draft"),
    ],
)
def test_members_of_another_kind_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(LayoutError):
        make()


@pytest.mark.parametrize(
    "names", [("pcp", "dcp"), ("dcp", "pcp"), ("pcp", "pcp"), ("dcp", "ep"), ("all", "tp")]
)
def test_only_independent_axes_deal_together(names: tuple[str, ...]) -> None:
    mesh = Mesh((Axis("pcp", 4), Axis("tp", 2), Axis("dcp", 4, ("pcp",)), Axis("ep", 2, ("pcp",)),
                 Axis("all", 8, ("pcp", "tp"))))  # fmt: skip
    with pytest.raises(LayoutError, match="both deal the ranks of"):
        mesh.ranks_by_shard(*names)
    with pytest.raises(LayoutError, match="both deal the ranks of"):
        mesh.place(RoundRobin(16), *names)
    assert len(mesh.ranks_by_shard("tp", "dcp")) == 8
    assert all(len(ranks) == 1 for ranks in mesh.ranks_by_shard("tp", "dcp"))


def test_an_axis_folds_over_another_once() -> None:
    with pytest.raises(LayoutError, match="twice"):
        Axis("d", 4, ("a", "a"))


def binding(**changes: Any) -> Binding:
    given: dict[str, Any] = {
        "tables": {"kv": [3, 1]},
        "num_blocks": {"kv": 4},
        "lengths": dict.fromkeys(SPEC.names, 9),
    }
    return Binding(LAYOUT, **(given | changes))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tables": {}}, r"tables by group: \['kv'\] are missing"),
        ({"tables": {"kv": [0], "zz": [9]}}, r"tables by group: \['zz'\] are not of this layout"),
        ({"num_blocks": {}}, r"num_blocks by group: \['kv'\] are missing"),
        ({"num_blocks": {"kv": 4.5}}, "must be an integer"),
        ({"lengths": {}}, "lengths by component: .*'latent.0'.* are missing"),
        ({"lengths": dict.fromkeys(SPEC.names, 3.5)}, "must be an integer"),
        ({"lengths": dict.fromkeys(SPEC.names, True)}, "must be an integer"),
        ({"lengths": dict.fromkeys(SPEC.names, -3)}, r"tokens \[0, -3\)"),
    ],
)
def test_bindings_are_complete(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(LayoutError, match=rule):
        binding(**changes)
    with pytest.raises(LayoutError, match=r"\['zzz'\] are not of this layout"):
        Binding.of(LAYOUT, {"kv": [0]}, {"kv": 4}, 3, shorter={"zzz": 1})


def test_bindings_hold_read_only_copies() -> None:
    ids, blocks, lengths = np.array([3, 1]), {"kv": 4}, dict.fromkeys(SPEC.names, 9)
    made = binding(tables={"kv": ids}, num_blocks=blocks, lengths=lengths)
    ids[0], blocks["kv"], lengths["latent.0"] = 77, 1, 10**6
    assert made.tables["kv"].tolist() == [3, 1]
    assert (made.num_blocks["kv"], made.lengths["latent.0"]) == (4, 9)
    with pytest.raises(ValueError, match="read-only"):
        made.tables["kv"][0] = 1
    for mapping in (made.tables, made.num_blocks, made.lengths):
        with pytest.raises(TypeError):
            mapping["kv"] = 0  # type: ignore[index]
    again = evolve(made, num_blocks={"kv": 8})
    assert again.tables["kv"] is made.tables["kv"], "what is read-only already is shared"


def test_a_read_only_view_is_copied() -> None:
    base = np.array([3, 1])
    view = base[:]
    view.setflags(write=False)
    made = binding(tables={"kv": view})
    base[0] = 2
    assert made.tables["kv"].tolist() == [3, 1]


def wire(change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(json.dumps(layout_to_wire(LAYOUT)))
    change(data)
    layout_from_wire(data)


@pytest.mark.parametrize("bad", [2.0, 1.5, True, None, [1], "2"])
@pytest.mark.parametrize(
    "put",
    [
        lambda w, x: w["sharding"].update(num_shards=x),
        lambda w, x: w["sharding"].update(interleave=x),
        lambda w, x: w["groups"][0]["paging"].update(block_size=x),
        lambda w, x: w["components"][0].update(layer_id=x),
        lambda w, x: w["components"][0]["fields"][0].__setitem__(2, x),
        lambda w, x: w.update(ranks=[[x], [7]]),
        lambda w, x: w.update(ranks=x),
        lambda w, x: w.update(content=[["model", x if x != "2" else 2]]),
    ],
)
def test_wire_numbers_are_not_rounded(put: Callable[[Any, Any], object], bad: object) -> None:
    with pytest.raises(LayoutError):
        wire(lambda w: put(w, bad))


@pytest.mark.parametrize("data", [None, [], "x", 3, {"form": True}, {"form": 1.0}])
def test_what_is_no_dict_or_form_is_no_layout(data: Any) -> None:
    with pytest.raises(LayoutError, match=r"a layout is a dict|wire form"):
        layout_from_wire(data)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"indexer_types": ["full", "sharde"]}, r"indexer_types\[1\] is 'sharde'"),
        ({"indexer_types": ["full", ["full"]]}, r"indexer_types\[1\] is \['full'\]"),
        ({"indexer_types": []}, "describes 0 layers"),
        ({"indexer_types": 5}, "expected several"),
        ({"index_topk_pattern": "FX"}, r"index_topk_pattern\[1\] is 'X'"),
        ({"index_topk_pattern": "fs"}, r"index_topk_pattern\[0\] is 'f'"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0, must be at least 1"),
        ({"index_topk_freq": -2}, "index_topk_freq is -2"),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 1.5}, "index_skip_topk_offset is 1.5"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, must be at least 0"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"num_nextn_predict_layers": 0.5}, "num_nextn_predict_layers is 0.5"),
        ({"kv_lora_rank": -5}, "kv_lora_rank is -5, must be at least 1"),
        ({"kv_lora_rank": 6.7}, "kv_lora_rank is 6.7"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        ({"index_head_dim": True}, "index_head_dim is True"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(LayoutError, match=rule):
        KVCacheSpec.from_config(CONFIG | changes)


def test_both_alphabets_spell_the_same_layers() -> None:
    n = {"num_hidden_layers": 3}
    words, letters = ["full", "shared", "full"], "FSF"
    assert full_index_layers(n | {"indexer_types": words, "index_topk_pattern": letters}) == (
        True, False, True,
    )  # fmt: skip
