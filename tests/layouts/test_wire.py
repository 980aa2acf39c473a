"""Layouts told as plain data: the same layout comes back, and what is no layout is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, Paged, Pool
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.wire import FORM, layout_from_wire, layout_to_wire
from kvflow.testing import layouts, specs, token_ranges

CONFIG = {
    "num_hidden_layers": 1, "num_nextn_predict_layers": 1, "kv_lora_rank": 4,
    "qk_rope_head_dim": 2, "index_head_dim": 4,
}  # fmt: skip
SPEC = KVCacheSpec.from_config(CONFIG, content={"model": "m"})
LAYOUT = KVLayout(
    SPEC,
    Placement(RoundRobin(2, 4), ((3, 1), (0,))),
    (
        CacheGroup("latent", SPEC.select(kind="latent"), Pool(4)),
        CacheGroup("indexer", SPEC.select(kind="indexer"), Paged(8)),
    ),
)


@given(specs(), token_ranges(), st.data())
def test_a_layout_comes_back_from_the_wire(
    spec: KVCacheSpec, tokens: tuple[int, int], data: st.DataObject
) -> None:
    layout = data.draw(layouts(spec, tokens))
    told = json.loads(json.dumps(layout_to_wire(layout)))
    assert layout_from_wire(told) == layout
    assert str(layout_from_wire(told)) == str(layout)


def test_golden_wire_form() -> None:
    told = layout_to_wire(LAYOUT)
    assert told["form"] == FORM == 2
    assert told["content"] == [list(pair) for pair in SPEC.content]
    assert ["model", "m"] in told["content"]
    assert told["components"][-1] == {
        "kind": "indexer", "layer_id": 1, "part": "mtp",
        "arrangement": "[key: t e | scale: t e]",
        "fields": [["key", "float8_e4m3fn", 4, 1], ["scale", "float32", 1, 1]],
    }  # fmt: skip
    assert told["sharding"] == {"kind": "RoundRobin", "num_shards": 2, "interleave": 4}
    assert told["ranks"] == [[3, 1], [0]]
    assert told["groups"] == [
        {"name": "latent", "components": ["latent.0", "latent.1"],
         "paging": {"kind": "Pool", "block_size": 4}},
        {"name": "indexer", "components": ["indexer.0", "indexer.1"],
         "paging": {"kind": "Paged", "block_size": 8}},
    ]  # fmt: skip
    dense = KVLayout.uniform(SPEC, LAYOUT.placement, Dense(9))
    assert layout_to_wire(dense)["groups"][0]["paging"] == {"kind": "Dense", "capacity": 9}


def told(**changes: object) -> dict[str, Any]:
    return layout_to_wire(LAYOUT) | changes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in told().items() if key != name}


@pytest.mark.parametrize("form", [None, 0, 1, "2"])
def test_another_form_is_refused_before_anything_is_read(form: object) -> None:
    with pytest.raises(LayoutError, match=rf"wire form {form!r}, this side reads 2$"):
        layout_from_wire({"form": form})


@pytest.mark.parametrize("name", ["content", "components", "sharding", "ranks", "groups"])
def test_a_missing_part_is_named(name: str) -> None:
    with pytest.raises(LayoutError, match=f"malformed layout: KeyError.'{name}'") as refused:
        layout_from_wire(without(name))
    assert isinstance(refused.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: told(sharding={"kind": "Spiral"}), r"unknown kind 'Spiral', must be one of \['Ba"),
        (lambda: told(sharding={"kind": "RoundRobin", "num_shards": 0}), "num_shards = 0"),
        (lambda: told(sharding={"kind": "RoundRobin", "turns": 1}), "malformed layout: TypeError"),
        (lambda: told(sharding={"num_shards": 2}), "malformed layout: KeyError"),
        (lambda: told(ranks=[["x"], [0]]), "rank is .x. .str., must be an integer"),
        (lambda: told(ranks=[[0], [0]]), "a rank holds one shard"),
        (lambda: told(content=[["model"]]), "malformed layout: ValueError"),
        (lambda: told(groups=3), "malformed layout: TypeError"),
        (lambda: told(groups=[]), "must place every component once"),
        (lambda: told(components=[{"fields": 0}]), "malformed layout: TypeError"),
    ],
)
def test_what_is_no_layout_is_refused(make: Callable[[], dict[str, Any]], rule: str) -> None:
    with pytest.raises(LayoutError, match=rule):
        layout_from_wire(make())


def test_reading_leaves_the_told_data_as_it_was() -> None:
    data = told()
    layout_from_wire(data)
    assert data == told()
