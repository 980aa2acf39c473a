"""Layouts and bindings: what they answer and what they refuse."""

import subprocess
import sys

import numpy as np
import pytest
from attrs import evolve
from attrs.exceptions import FrozenInstanceError

from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import Binding, CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Dense, Paged, Pool
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec

SPEC = KVCacheSpec.from_config(
    {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 2,
        "index_head_dim": 4,
        "index_topk_pattern": "FS",
    }
)
LATENT, INDEXER = SPEC.select(kind="latent"), SPEC.select(kind="indexer")
DEAL = Placement.simple(RoundRobin(2, 1))
TWO = KVLayout(
    SPEC, DEAL, (CacheGroup("latent", LATENT, Pool(4)), CacheGroup("indexer", INDEXER, Paged(8)))
)


def test_groups_place_every_component_once() -> None:
    assert TWO.group("indexer").components == INDEXER
    assert TWO.group_of("latent.2").name == "latent"
    assert TWO.num_blocks_for(17) == {"latent": 3, "indexer": 2}
    assert KVLayout.uniform(SPEC, DEAL, Paged(4)).groups[0] == CacheGroup(
        "kv", SPEC.names, Paged(4)
    )
    assert str(TWO) == "round_robin(2,i=1) latent:pool(4)[3] indexer:paged(8)[2]"
    with pytest.raises(LayoutError, match=r"no group 'kv' in \['latent', 'indexer'\]"):
        TWO.group("kv")
    with pytest.raises(LayoutError, match=r"no component 'latent\.9'"):
        TWO.group_of("latent.9")


def test_a_layout_refuses_components_left_out_placed_twice_or_unknown() -> None:
    latent, indexer = TWO.groups
    for groups, odd in [
        ((latent,), "indexer.0"),
        ((latent, indexer, CacheGroup("more", ("latent.0",), Paged(4))), "latent.0"),
        ((latent, indexer, CacheGroup("more", ("latent.9",), Paged(4))), "latent.9"),
    ]:
        with pytest.raises(LayoutError, match=f"must place every component once.*{odd}"):
            KVLayout(SPEC, DEAL, groups)
    with pytest.raises(LayoutError, match="groups named twice"):
        KVLayout(SPEC, DEAL, (latent, evolve(indexer, name="latent")))


def binding(**changes: object) -> Binding:
    values: dict[str, object] = {
        "tables": {"latent": [5, 1, 3], "indexer": [0, 2]},
        "num_blocks": {"latent": 6, "indexer": 3},
        "length": 17,
    }
    return Binding.of(TWO, **(values | changes))  # type: ignore[arg-type]


def test_a_binding_answers_slots_and_lengths() -> None:
    bound = binding(shorter={"latent.2": 16, "indexer.2": 0})
    assert bound.slots("latent", [0, 1, 8, 16], rank=0).tolist() == [20, -1, 4, 12]
    assert bound.slots("indexer", [0, 1, 15, 16], rank=1).tolist() == [-1, 0, 7, -1]
    assert bound.restricted(["latent.0", "latent.2"]) == {"latent.0": 17, "latent.2": 16}
    assert bound.lengths["indexer.2"] == 0
    assert isinstance(bound.tables["latent"], np.ndarray)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tables": {"latent": [5, 1, 6], "indexer": [0, 2]}}, r"latent: .*\[0, 6\)"),
        ({"tables": {"latent": [5, 1, -1], "indexer": [0, 2]}}, r"latent: .*\[0, 6\)"),
        ({"tables": {"latent": [5, 1, 1], "indexer": [0, 2]}}, "latent: a block id stands twice"),
        ({"tables": {"latent": [[5, 1, 3]], "indexer": [0, 2]}}, "latent: block ids"),
        ({"tables": {"latent": [5, 1], "indexer": [0, 2]}}, "17 tokens need 3 entries of 4.* 2"),
        ({"tables": {"latent": [5, 1, 3], "indexer": [0]}}, "17 tokens need 2 entries of 8.* 1"),
        ({"num_blocks": {"latent": 6, "indexer": 2}}, r"indexer: .*\[0, 2\)"),
    ],
)
def test_a_binding_refuses(changes: dict[str, object], rule: str) -> None:
    with pytest.raises(LayoutError, match=rule):
        binding(**changes)
    binding()


def test_an_empty_request_needs_no_block() -> None:
    bound = binding(length=0, tables={"latent": [], "indexer": []})
    assert bound.tables["latent"].dtype == np.int64
    assert KVLayout.uniform(SPEC, DEAL, Dense(9)).num_blocks_for(0) == {"kv": 0}


def test_layouts_are_values() -> None:
    assert KVLayout(SPEC, DEAL, TWO.groups) == TWO
    assert hash(KVLayout(SPEC, DEAL, TWO.groups)) == hash(TWO)
    with pytest.raises(FrozenInstanceError):
        TWO.placement = DEAL  # type: ignore[misc]


IDENTITY = """
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.transfers.planner import plan_transfer
mesh = Mesh((Axis("pcp", 8), Axis("dcp", 8, over=("pcp",))))
layout = KVLayout.uniform(
    KVCacheSpec.from_config(GLM_5_3), mesh.place(RoundRobin(8, 1), "dcp"), Paged(1536)
)
print(layout, plan_transfer(layout, layout, (0, 3000)).digest)
"""


def test_fault_a16_scheduler_and_worker_derive_one_identity() -> None:
    def in_process(seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", IDENTITY], env={"PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout  # fmt: skip

    first = in_process("0")
    assert first == in_process("1")
    assert "round_robin(8,i=1) kv:paged(1536)[101]" in first
    assert len(first.split()[-1]) == 64


def test_fault_f06_three_sizes_have_three_names_and_their_products_agree() -> None:
    spec = KVCacheSpec.from_config(GLM_5_3)
    block_size, num_blocks = 64, 100
    record = spec["latent.0"].record
    assert record.page_nbytes(block_size) == block_size * record.nbytes
    assert spec.block_nbytes(block_size) == block_size * spec.nbytes_per_token
    layout = KVLayout.uniform(spec, Placement.simple(RoundRobin(1)), Paged(block_size))
    assert layout.num_blocks_for(num_blocks * block_size) == {"kv": num_blocks}
    assert layout.num_blocks_for(num_blocks * block_size + 1) == {"kv": num_blocks + 1}


def test_fault_b07_tables_are_sized_by_position_not_by_what_the_draft_needs() -> None:
    layout = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(1)), Paged(16))
    needs = [layout.num_blocks_for(n)["kv"] for n in (15, 16, 17, 32)]
    assert needs == [1, 1, 2, 2]


def test_balanced_chunks_are_bound_to_an_absolute_interval() -> None:
    layout = KVLayout.uniform(SPEC, Placement.simple(BalancedChunks(2, 10, 20)), Paged(4))
    assert layout.num_blocks_for(20) == {"kv": 2}
    assert layout.num_blocks_for(10) == {"kv": 0}
    with pytest.raises(LayoutError, match=r"tokens \[10, 21\)"):
        layout.num_blocks_for(21)


def test_fault_g03_the_host_pool_alone_limits_what_it_holds() -> None:
    """Device 64 tokens, host 512: a prompt of 300 fits, 513 is refused with the limit."""
    groups = (CacheGroup("latent", LATENT, Pool(1)), CacheGroup("hot", INDEXER, Pool(1)))
    host = KVLayout(SPEC, Placement.simple(RoundRobin(1)), groups)
    pools = {"latent": 512, "hot": 64}
    few = dict.fromkeys(INDEXER, 64)

    def admitted(prompt: int) -> Binding:
        tables = {"latent": range(prompt), "hot": range(64)}
        return Binding.of(host, tables, pools, prompt, few)

    assert admitted(300).lengths["latent.0"] == 300
    assert admitted(512).slots("latent", [511], 0).tolist() == [511]
    with pytest.raises(LayoutError, match=r"group latent: block ids .* must be in \[0, 512\)"):
        admitted(513)
    tables = {"latent": range(512), "hot": range(64)}
    with pytest.raises(LayoutError, match=r"513 tokens need 513 entries of 1, the table has 512"):
        Binding.of(host, tables, pools, 513, few)
