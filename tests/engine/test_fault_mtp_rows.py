"""Faults of the draft layer's rows: the shift by one over chunk borders, and missing parts."""

import pytest
from rank_group import Group, blocks_for, item
from test_decode import World

from kvflow.engine.messages import TransferEnded
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint


def _mtp_rows(pcp, dcp, bounds, length=13):
    """Bytes of the MTP components of a prompt that is computed in steps up to `bounds`, by
    (component, field, token); replicas agree."""
    group = Group(pcp, dcp, kv_dtype="float64")
    table = blocks_for(group, length)
    steps = [
        [item("a", start, stop, table, last=stop == length)]
        for start, stop in zip((0, *bounds), (*bounds, length), strict=True)
    ]
    group.run(steps)
    rows = {}
    mtp = group.layout.spec.select(part="mtp")
    for cell in group.cells(table, 0, length):
        if cell.component in mtp:
            memory = group.caches[cell.rank].pages[cell.component].memory
            here = bytes(memory[group.places(cell)].numpy())
            key = cell.component, cell.field, cell.token
            assert rows.setdefault(key, here) == here
    assert {token for _, _, token in rows} == set(range(length))
    return rows


@pytest.mark.parametrize("bounds", [(), (5,), (1, 12)])
@pytest.mark.parametrize(("pcp", "dcp"), [(4, 1), (4, 4), (2, 2)])
def test_fault_b05_rows_of_the_draft_layer_cross_chunk_borders(pcp, dcp, bounds):
    """13 tokens over the chunks of 4 ranks, and over steps: row t is made with token t + 1,
    whoever computes that."""
    assert _mtp_rows(pcp, dcp, bounds) == _mtp_rows(1, 1, ())


def test_fault_b09_a_transfer_without_one_component_fails_as_a_whole():
    """A source rank cannot serve the rows of the MTP layer: nothing that came is used, the rows are
    computed, and the front is told. With all components the last prompt token is applied once."""
    world = World()
    broken = world.group.caches[1]
    mtp = world.group.layout.spec.select(part="mtp")
    pages = {name: view for name, view in broken.pages.items() if name not in mtp}
    world.sources[1].close()
    world.sources[1] = LocalEndpoint(RankCache(1, pages), world.fabric)
    try:
        world.connect()
        world.tell(world.prefill("a", 13, 3))
        world.turn(lambda: world.finished("a"))
        world.assert_right("a")
        (ended,) = world.sent(TransferEnded, "a")
        assert "transfer failed" in ended.error
        assert world.engine.counters["recomputed_prompts"] == 1
        assert world.engine.counters["reused_tokens"] == 0
        world.assert_idle()
    finally:
        world.engine.worker.close()
    whole = World()
    try:
        whole.connect()
        whole.tell(whole.prefill("b", 13, 3))
        whole.turn(lambda: whole.finished("b"))
        whole.assert_right("b")
    finally:
        whole.engine.worker.close()
