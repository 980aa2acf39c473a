"""Rows from blocks to units and back, between any two layouts, byte by byte."""

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_ranks import toy_spec

from kvflow.engine.messages import UnitRows
from kvflow.engine.tiers.memory import UnitMemory, unit_nbytes
from kvflow.engine.tiers.rows import UnitPort
from kvflow.kernels.rows import gather_rows
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.testing import cells
from kvflow.transfers.executors.base import RankCache

SPEC = toy_spec(True, kv_dtype="fp8")
EXAMPLES = max(30, settings.default.max_examples // 2)


def prefill(pcp, dcp, interleave, block, tp=1):
    axes = (Axis("pcp", pcp), Axis("tp", tp), Axis("dcp", dcp, over=("pcp", "tp")))
    placement = Mesh(axes).place(RoundRobin(dcp, interleave), "dcp")
    return KVLayout.uniform(SPEC, placement, Paged(block))


def decode(block):
    return KVLayout.uniform(SPEC, Placement.simple(Replicated()), Paged(block))


@frozen(eq=False)
class Side:
    """The caches of all ranks of a layout, and a request of `length` tokens in blocks at random."""

    layout: KVLayout
    binding: Binding
    caches: dict

    @classmethod
    def of(cls, layout, length, seed, fill):
        need = layout.num_blocks_for(length)["kv"]
        table = np.random.default_rng(seed).permutation(need + 3)[:need]
        binding = Binding.of(layout, {"kv": table}, {"kv": need + 3}, length)
        caches = {r: RankCache.allocate(layout, r, {"kv": need + 3}, fill) for r in layout.ranks}
        return cls(layout, binding, caches)

    def write(self):
        """Every byte of every position says which it is; the test's oracle deals tokens."""
        n = self.binding.lengths[SPEC.names[0]]
        for cell in cells(self.layout, self.binding, (0, n), SPEC.names):
            view = self.caches[cell.rank].pages[cell.component]
            page = view.offset + cell.block_id * view.block_stride
            for i, at in enumerate(cell.at):
                view.memory[page + at] = hash((cell.component, cell.field, cell.token, i)) % 251

    def read(self, rank, length):
        rows = {}
        for name in SPEC.names:
            slots = self.binding.slots("kv", np.arange(length), rank)
            mine = torch.from_numpy(slots[slots >= 0])
            rows[name] = (
                np.flatnonzero(slots >= 0),
                gather_rows(self.caches[rank].pages[name], mine),
            )
        return rows

    def ports(self, units):
        blocks = self.binding.num_blocks
        return [UnitPort(self.layout, cache, blocks, units) for cache in self.caches.values()]

    @property
    def tables(self):
        return {"kv": self.binding.tables["kv"].tolist()}


def units_for(num_units, unit_size):
    nbytes = num_units * (unit_nbytes(SPEC, unit_size) + 32) + 4096
    return UnitMemory.create(SPEC, unit_size, nbytes)


def round_trip(source, target, unit, first, num_units, short, length, skipped=0):
    """Stores some units of a request and restores them elsewhere, but for some rows at both ends;
    returns what is wrong."""
    a, b = Side.of(source, length, 1, 0), Side.of(target, length, 2, 0xEE)
    a.write()
    before = {r: {n: v.memory.clone() for n, v in c.pages.items()} for r, c in b.caches.items()}
    units = units_for(num_units + 4, unit)
    ids = np.random.default_rng(3).permutation(num_units + 4)[:num_units].tolist()
    start, stop = first * unit, (first + num_units) * unit
    for port in a.ports(units):
        port.give(UnitRows(start, stop, ids), a.tables)
    for port in b.ports(units):
        port.take(UnitRows(start + skipped, stop - short, ids, [], skipped), b.tables)
    units.close()
    wanted = {}
    for rank in a.caches:
        for name, (positions, rows) in a.read(rank, length).items():
            wanted |= {(name, int(t)): row for t, row in zip(positions, rows, strict=True)}
    wrong = []
    for rank, cache in b.caches.items():
        for name, (positions, rows) in b.read(rank, length).items():
            for t, row in zip(positions.tolist(), rows, strict=True):
                inside = start + skipped <= t < stop - short
                good = torch.equal(row, wanted[name, t]) if inside else bool((row == 0xEE).all())
                wrong += [] if good else [(rank, name, t)]
            touched = sum(start + skipped <= t < stop - short for t in positions.tolist())
            changed = (cache.pages[name].memory != before[rank][name]).sum().item()
            assert changed <= touched * rows.shape[1]
    return wrong


def test_fault_h09_f11_i07_stored_by_pcp8_dcp8_restored_by_pcp4_dcp4_and_by_decode():
    """Latent rows, indexer keys and the MTP layer's, under other blocks and interleaves."""
    source = prefill(8, 8, 1, 4)
    for target in (prefill(4, 4, 16, 5), prefill(4, 2, 3, 16), decode(7)):
        assert round_trip(source, target, 8, 0, 12, 0, 100) == []


@pytest.mark.parametrize("target", [(2, 2, 16), (4, 4, 1)])
def test_fault_i07_another_interleave_or_shard_count_is_converted(target):
    """Stored under DCP 2, interleave 1; read under DCP 2, interleave 16, and under DCP 4."""
    pcp, dcp, interleave = target
    assert round_trip(prefill(2, 2, 1, 4), prefill(pcp, dcp, interleave, 4), 4, 0, 9, 0, 36) == []


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("count", range(1, 10, 2))
@pytest.mark.parametrize(("block", "unit"), [(4, 16), (16, 4)])
def test_fault_h06_loads_begin_and_end_anywhere_in_blocks(first, count, block, unit):
    """Units larger and smaller than the device's blocks, the first and the last one partial."""
    length = (first + count) * unit + 3
    assert (
        round_trip(prefill(2, 2, 1, block), prefill(1, 1, 1, block), unit, first, count, 1, length)
        == []
    )


@st.composite
def layouts(draw):
    pcp, tp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2]))
    dcp = draw(st.sampled_from([d for d in range(1, 9) if pcp * tp % d == 0]))
    return prefill(pcp, dcp, draw(st.integers(1, 9)), draw(st.integers(1, 9)), tp)


@given(
    layouts(),
    st.one_of(layouts(), st.builds(decode, st.integers(1, 9))),
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(0, 1),
    st.integers(0, 5),
    st.integers(0, 5),
)
@settings(max_examples=EXAMPLES)
def test_any_layout_restores_what_any_other_has_stored(
    source, target, unit, first, num, short, tail, skipped
):
    """Rows of the first unit that are there already are not written again."""
    short = min(short, unit * num - 1)
    skipped = min(skipped, unit - 1, unit * num - short - 1)
    length = (first + num) * unit + tail
    assert round_trip(source, target, unit, first, num, short, length, skipped) == []


def test_every_row_is_written_to_a_unit_by_one_rank_alone():
    """Replicas are stored once: the bytes that all ranks write together are those of the unit."""
    source = Side.of(prefill(8, 2, 1, 4), 32, 1, 0)
    source.write()
    written = 0
    for port in source.ports(units_for(8, 4)):
        port.units.units[:] = 0xEE
        port.give(UnitRows(0, 32, list(range(8))), source.tables)
        written += int((port.units.units != 0xEE).sum())
    assert written <= 8 * unit_nbytes(SPEC, 4)
    assert written > 7 * unit_nbytes(SPEC, 4)
