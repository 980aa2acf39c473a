"""Rows at good slots: the same bytes as the checked kernels move, in every arrangement."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.kernels.pages import PageView
from kvflow.kernels.rows import gather_rows
from kvflow.kernels.slots import SlotRows
from kvflow.layouts.record import Field, Record, index_record, latent_record

RECORDS = [
    latent_record("fp8", latent_rank=512, rope_dim=64),
    latent_record("float32", latent_rank=40, rope_dim=16),
    index_record("fp8", index_dim=128, arrangement="planar"),
    index_record("fp8", index_dim=32, arrangement="row"),
    index_record("float32", index_dim=20, arrangement="planar"),
    Record((Field("k", "bfloat16", 6, 2),), "h t e t2"),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_same_bytes_as_the_checked_kernels(data) -> None:
    record = data.draw(st.sampled_from(RECORDS))
    block_size, num_blocks = data.draw(st.sampled_from([16, 64])), 3
    pitch = record.page_pitch(block_size)
    stride = pitch + data.draw(st.sampled_from([0, 0, 8, 24]))
    offset = data.draw(st.sampled_from([0, 8, 20]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    size = offset + stride * num_blocks
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    pages = PageView(memory, record, block_size, stride, offset, num_blocks)
    count = data.draw(st.one_of(st.just(1), st.integers(0, 40)))
    slots = torch.randperm(pages.num_slots, generator=generator)[:count]
    rows = SlotRows(pages).read(slots)
    assert torch.equal(rows, gather_rows(pages, slots))
    before = memory.clone()
    fresh = torch.randint(0, 256, rows.shape, dtype=torch.uint8, generator=generator)
    SlotRows(pages).write(slots, fresh)
    assert torch.equal(gather_rows(pages, slots), fresh)
    SlotRows(pages).write(slots, rows)
    assert torch.equal(memory, before)


def test_rows_that_lie_apart_or_at_odd_bytes_are_written() -> None:
    """A view of one row counts as contiguous whatever its stride."""
    nbytes = RECORDS[0].nbytes
    pages = PageView(torch.zeros(8 * nbytes, dtype=torch.uint8), RECORDS[0], 8, 8 * nbytes)
    both = torch.randint(0, 256, (2, nbytes + 133), dtype=torch.uint8)
    for slot, rows in enumerate((both[:1, :nbytes], both[1:, :nbytes], both[:1, 1 : nbytes + 1])):
        SlotRows(pages).write(torch.tensor([slot]), rows)
        assert torch.equal(gather_rows(pages, torch.tensor([slot])), rows)
    SlotRows(pages).write(torch.tensor([6, 4]), both[:, 3 : nbytes + 3])
    assert torch.equal(gather_rows(pages, torch.tensor([6, 4])), both[:, 3 : nbytes + 3])
