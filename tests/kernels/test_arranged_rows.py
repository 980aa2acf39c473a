"""Rows of head-sharded, transposed and tiled pages, against numpy's own reshaping of a page, and
rows from pool to pool."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import LayoutError, PlanError
from kvflow.kernels import host_rows
from kvflow.kernels.rows import PageView, gather_rows, repack_rows, scatter_rows
from kvflow.layouts.record import Field, Record, index_record, latent_record

torch.set_num_threads(1)
H, E, B, BLOCKS = 4, 6, 8, 5
FIELD = Field("key", "bfloat16", E, H)

# For each order: the axes of a page as numpy sees them, and the permutation to (t, h, e).
ORDERS = {
    "t h e": ((B, H, E), (0, 1, 2)),
    "h t e": ((H, B, E), (1, 0, 2)),
    "h e t": ((H, E, B), (2, 0, 1)),
    "e t h": ((E, B, H), (1, 2, 0)),
    "h e t t4 e2": ((H, E // 2, B // 4, 4, 2), (2, 3, 0, 1, 4)),
    "h t e t2": ((H, B // 2, E, 2), (1, 3, 0, 2)),
}


def pages_of(order, *, gap=0, offset=0, seed=0):
    record = Record((FIELD,), order)
    stride = record.page_pitch(B) + gap
    memory = random_bytes(offset + BLOCKS * stride, seed)
    return PageView(memory, record, B, stride, offset)


def random_bytes(n, seed=0):
    return torch.randint(
        0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def elements(pages, order):
    """A page at a time as int16 [blocks, t, h, e], views: writes go to the memory."""
    shape, to_logical = ORDERS[order]
    views = []
    for b in range(BLOCKS):
        begin = pages.offset + b * pages.block_stride
        page = pages.memory[begin : begin + B * H * E * 2].numpy().view(np.int16)
        views.append(page.reshape(shape).transpose(to_logical))
    return views


def rows_of(pages, order, slots, heads):
    """Packed rows the slow way."""
    first, stop = heads
    found = [
        elements(pages, order)[s // B].reshape(B, H, E)[s % B, first:stop]
        if s >= 0
        else np.zeros((stop - first, E), np.int16)
        for s in slots
    ]
    packed = np.array(found, np.int16).reshape(len(slots), (stop - first) * E)
    return torch.from_numpy(packed.view(np.uint8).copy())


slot_lists = st.one_of(
    st.permutations(range(B * BLOCKS)).flatmap(
        lambda p: st.integers(0, len(p)).map(lambda n: list(p)[:n])
    ),
    st.tuples(st.integers(0, B * BLOCKS - 1), st.integers(0, 20)).map(
        lambda s: list(range(s[0], min(s[0] + s[1], B * BLOCKS)))
    ),
    st.permutations(range(BLOCKS)).map(lambda p: [b * B + i for b in p for i in range(B)]),
)


@given(
    st.sampled_from(list(ORDERS)),
    slot_lists,
    st.sampled_from([(0, H), (1, 3), (0, 1), (3, 4)]),
    st.sampled_from([(0, 0), (16, 32), (2, 1)]),
    st.booleans(),
)
def test_rows_of_any_arrangement_equal_numpys(order, slots, heads, room, padded):
    gap, offset = room
    pages = pages_of(order, gap=gap, offset=offset - offset % 2)
    if padded and slots:
        slots = [*slots[:1], -1, *slots[1:]]
    index = torch.tensor(slots, dtype=torch.int64)
    given_heads = None if heads == (0, H) else heads
    assert torch.equal(
        gather_rows(pages, index, heads=given_heads), rows_of(pages, order, slots, heads)
    )
    row_nbytes = (heads[1] - heads[0]) * E * 2
    rows = random_bytes(len(slots) * row_nbytes, 7).view(len(slots), row_nbytes)
    expected = pages_of(order, gap=gap, offset=offset - offset % 2)
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            page = elements(expected, order)[slot // B]
            values = row.numpy().view(np.int16).reshape(-1, E)
            write_token(page, slot % B, heads, values)
    scatter_rows(pages, index, rows, given_heads)
    assert torch.equal(pages.memory, expected.memory)


def write_token(page, t, heads, values):
    """values [heads, E] into one token of a page; its token and element axes may be split."""
    num_axes = 1 if page.shape[0] == B else 2
    token = page[np.unravel_index(t, page.shape[:num_axes])]
    token[heads[0] : heads[1]] = values.reshape(len(values), *token.shape[1:])


# From pool to pool.

LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
PLANAR, ROWS = (index_record("fp8", index_dim=128, arrangement=a) for a in ("planar", "row"))


def pool(record, block_size, seed, gap=0):
    stride = record.page_pitch(block_size) + gap
    memory = random_bytes(-(-40 // block_size) * stride, seed)
    return PageView(memory, record, block_size, stride)


@given(
    st.sampled_from([(LATENT, LATENT), (PLANAR, ROWS), (ROWS, PLANAR), (PLANAR, PLANAR)]),
    st.sampled_from([(4, 4), (4, 16), (8, 3)]),
    st.integers(0, 40),
    st.sampled_from([0, 16, 3]),
    st.integers(1, 7),
)
def test_repacking_equals_gather_and_scatter(records, sizes, count, gap, at_a_time):
    src, dst = (
        pool(record, size, seed, gap)
        for record, size, seed in zip(records, sizes, (1, 2), strict=True)
    )
    before, twin = src.memory.clone(), pool(records[1], sizes[1], 2, gap)
    g = torch.Generator().manual_seed(count)
    src_slots, dst_slots = (torch.randperm(40, generator=g)[:count] for _ in range(2))
    src_slots[1::5], dst_slots[1::5] = -1, -1
    scatter_rows(twin, dst_slots, gather_rows(src, src_slots))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_rows, "MAX_RANGES", at_a_time)
        repack_rows(src, src_slots, dst, dst_slots)
    assert torch.equal(dst.memory, twin.memory)
    assert torch.equal(src.memory, before)


@given(st.sampled_from(list(ORDERS)), st.sampled_from(list(ORDERS)), st.integers(0, 2))
def test_heads_move_between_orders(here, there, shift):
    """The two middle heads of one pool become two neighbours of the other."""
    src, dst, twin = pages_of(here), pages_of(there, seed=1), pages_of(there, seed=1)
    src_slots = torch.arange(3, 3 + 2 * B)
    dst_slots = torch.randperm(B * BLOCKS, generator=torch.Generator().manual_seed(shift))[: 2 * B]
    heads, to = (1, 3), (shift, shift + 2)
    scatter_rows(twin, dst_slots, gather_rows(src, src_slots, heads=heads), to)
    repack_rows(src, src_slots, dst, dst_slots, heads, to)
    assert torch.equal(dst.memory, twin.memory)


def test_pairs_that_do_not_fit_are_refused():
    src, dst = pool(LATENT, 4, 1), pool(LATENT, 8, 2)
    before, some = dst.memory.clone(), torch.tensor([1, 2])
    for slots, to, match in (
        (some, torch.tensor([1]), "2 source slots .* 1 target slots"),
        (some, torch.tensor([3, 3]), "slot 3 is written by rows 0 and 1"),
        (torch.tensor([1, -1]), some, "pair 1 is slot -1 -> 2"),
        (torch.tensor([1, 40]), some, "0 <= slot < 40"),
        (some, torch.tensor([1, 40]), "0 <= slot < 40"),
    ):
        with pytest.raises(LayoutError, match=match):
            repack_rows(src, slots, dst, to)
    with pytest.raises(LayoutError, match="share bytes"):
        repack_rows(src, some, src, some)
    with pytest.raises(PlanError, match="records differ"):
        repack_rows(src, some, pool(PLANAR, 8, 2), some)
    with pytest.raises(PlanError, match="do not pair"):
        repack_rows(pages_of("t h e"), some, pages_of("t h e", seed=1), some, (0, 1), (0, 2))
    assert torch.equal(dst.memory, before)
