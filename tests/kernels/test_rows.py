"""Row movement on a CPU, byte by byte against a slow oracle that walks fields, not pieces."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.kernels import rows as rows_module
from kvflow.kernels.rows import PageView, fill_slots, gather_rows, scatter_rows
from kvflow.layouts.record import Field, Record, index_record, latent_record

torch.set_num_threads(1)
LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
INDEX = index_record("fp8", index_dim=128)


def make_pages(record=LATENT, block_size=4, num_blocks=3, gap=0, offset=0, tail=0, shift=0):
    stride = record.page_nbytes(block_size) + gap
    nbytes = offset + stride * num_blocks - gap + tail
    g = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (shift + nbytes,), dtype=torch.uint8, generator=g)
    return PageView(memory[shift:], record, block_size, stride, offset)


def random_rows(n, record, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, record.nbytes), dtype=torch.uint8, generator=g)


def addresses_of(pages, slot):
    """Every byte of a slot's record in packed order, the obvious way."""
    page = pages.offset + slot // pages.block_size * pages.block_stride
    i, found, plane = slot % pages.block_size, [], 0
    for f in pages.record.fields:
        if len(pages.pieces()) > 1:
            start = page + plane * pages.block_size + i * f.nbytes
        else:
            start = page + i * sum(g.nbytes for g in pages.record.fields) + plane
        found += range(start, start + f.nbytes)
        plane += f.nbytes
    return found


records = st.builds(
    lambda sizes, arrangement: Record(
        tuple(Field(str(i), "uint8", n) for i, n in enumerate(sizes)), arrangement
    ),
    st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 32]), min_size=1, max_size=4),
    st.sampled_from(["row", "planar"]),
)


@st.composite
def cases(draw):
    pages = make_pages(
        draw(records),
        block_size=draw(st.integers(1, 9)),
        num_blocks=draw(st.integers(1, 6)),
        gap=draw(st.sampled_from([0, 0, 1, 2, 8, 24, 61])),
        offset=draw(st.sampled_from([0, 0, 1, 4, 8, 13])),
        tail=draw(st.sampled_from([0, 1, 7])),
        shift=draw(st.sampled_from([0, 0, 1, 4])),
    )
    if draw(st.booleans()):
        start = draw(st.integers(0, pages.num_slots - 1))
        slots = list(range(start, draw(st.integers(start, pages.num_slots))))
    else:
        slots = draw(st.lists(st.integers(0, pages.num_slots - 1), unique=True, max_size=20))
        for i in draw(st.lists(st.integers(0, 20), max_size=4)):
            slots.insert(i, -1)
    return pages, slots


@settings(max_examples=150, deadline=None)
@given(cases())
def test_gather_then_scatter_equal_the_oracle(case):
    pages, slots = case
    expected = torch.zeros(len(slots), pages.record.nbytes, dtype=torch.uint8)
    packed = random_rows(len(slots), pages.record)
    memory = pages.memory.clone()
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[i] = pages.memory[addresses_of(pages, slot)]
            memory[addresses_of(pages, slot)] = packed[i]
    index = torch.tensor(slots, dtype=torch.int64)
    assert torch.equal(gather_rows(pages, index), expected)
    before = pages.memory.clone()
    out = torch.full_like(expected, 99)
    assert gather_rows(pages, index, out) is out
    assert torch.equal(out, expected)
    assert torch.equal(pages.memory, before)
    scatter_rows(pages, index, packed)
    assert torch.equal(pages.memory, memory)


@pytest.mark.parametrize("record", [LATENT, INDEX])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (48, 16), (5, 3)])
@pytest.mark.parametrize(("start", "count"), [(0, 12), (1, 2), (3, 6), (2, 10), (11, 1)])
def test_the_run_path_equals_the_indexed_path(monkeypatch, record, gap, offset, start, count):
    pages, twin = (make_pages(record, gap=gap, offset=offset) for _ in range(2))
    slots, packed = torch.arange(start, start + count), random_rows(count, record)
    indexed = torch.empty_like(packed)
    rows_module.gather_indexed(pages, slots, indexed)
    rows_module.scatter_indexed(twin, slots, packed)
    monkeypatch.delattr(rows_module, "gather_indexed")
    monkeypatch.delattr(rows_module, "scatter_indexed")
    assert torch.equal(gather_rows(pages, slots), indexed)
    scatter_rows(pages, slots, packed)
    assert torch.equal(pages.memory, twin.memory)


def test_repeated_slots_gather():
    pages = make_pages()
    assert torch.equal(
        gather_rows(pages, torch.tensor([5, 5, 2])), gather_rows(pages, torch.arange(12))[[5, 5, 2]]
    )


def test_rows_that_are_a_view():
    pages, wide = make_pages(), random_rows(6, LATENT)
    scatter_rows(pages, torch.tensor([7, 1, 4]), wide[::2])
    assert torch.equal(gather_rows(pages, torch.tensor([7, 1, 4])), wide[::2])
    scatter_rows(pages, torch.tensor([4, 5, 6]), wide[1::2])
    assert torch.equal(gather_rows(pages, torch.tensor([4, 5, 6])), wide[1::2])


# Named faults.


def test_j01_padding_rows_do_not_reach_slot_0():
    pages = make_pages()
    before = pages.memory.clone()
    poison = torch.full((3, LATENT.nbytes), 0x7F, dtype=torch.uint8)
    scatter_rows(pages, torch.full((3,), -1), poison)
    assert torch.equal(pages.memory, before)


def test_j02_padding_is_no_python_index():
    pages = make_pages(block_size=4, num_blocks=3)
    last = pages.memory[11 * 656 :].clone()
    packed = random_rows(4, LATENT)
    scatter_rows(pages, torch.tensor([0, 1, -1, -1]), packed)
    assert torch.equal(pages.memory[11 * 656 :], last)
    assert torch.equal(pages.memory[: 2 * 656].view(2, 656), packed[:2])


@pytest.mark.parametrize("record", [LATENT, INDEX])
def test_j03_guards_around_the_region_stay(record):
    """-1 divided by a block size is block -1: bytes before the buffer, in a planar page."""
    guard = 4 * record.nbytes
    pages = make_pages(record, offset=guard, tail=guard)
    before = pages.memory.clone()
    scatter_rows(pages, torch.tensor([3, -1, 0, -1]), random_rows(4, record))
    assert torch.equal(pages.memory[:guard], before[:guard])
    assert torch.equal(pages.memory[-guard:], before[-guard:])
    packed = gather_rows(pages, torch.tensor([3, -1, 0, -1]))
    assert not packed[1].any()
    assert not packed[3].any()


@pytest.mark.parametrize("record", [LATENT, INDEX])
def test_j04_a_smaller_batch_leaves_no_stale_slot(record):
    """Batch 4, then batch 2 in the same captured slots: rows 2 and 3 reach no live slot."""
    pages = make_pages(record)
    captured, packed = torch.empty(4, dtype=torch.int64), random_rows(4, record)
    fill_slots(captured, torch.tensor([3, 9, 0, 6]))
    scatter_rows(pages, captured, packed)
    first = pages.memory.clone()
    fill_slots(captured, torch.tensor([1, 10]))
    assert captured.tolist() == [1, 10, -1, -1]
    scatter_rows(pages, captured, torch.full_like(packed, 0x7F))
    assert torch.equal(gather_rows(pages, torch.tensor([3, 9, 0, 6])), packed)
    changed = (pages.memory != first).nonzero().view(-1).tolist()
    assert set(changed) <= {*addresses_of(pages, 1), *addresses_of(pages, 10)}
    with pytest.raises(LayoutError, match=r"int64 \[5\].*int64 \[4\]"):
        fill_slots(captured, torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize(
    ("nbytes", "slot", "boundary"),
    [
        (656, 3_273_604, 2**31),
        (1152, 1_864_136, 2**31),
        (51_168, 41_970, 2**31),
        (576, 7_456_541, 2**32),
    ],
)
@pytest.mark.parametrize("block_size", [1, 64])
def test_j05_j08_byte_offsets_are_exact_in_64_bits(nbytes, slot, boundary, block_size):
    """No memory is touched: the region is a meta tensor of 16 GiB."""
    record = Record((Field("x", "uint8", nbytes),))
    memory = torch.empty(2**34, dtype=torch.uint8, device="meta")
    pages = PageView(memory, record, block_size, nbytes * block_size)
    slots = torch.tensor([slot - 1, slot])
    offsets = pages.byte_offsets(slots, pages.pieces()[0])
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [(slot - 1) * nbytes, slot * nbytes]
    assert offsets[0] < boundary <= offsets[1]


def test_j05_planar_offsets_beyond_32_bits():
    memory = torch.empty(2**40, dtype=torch.uint8, device="meta")
    pages = PageView(memory, INDEX, 64, 3_502_592, 41_984)
    slots = torch.tensor([64 * 300_000 + 63])
    values, scales = pages.pieces()
    page = 41_984 + 300_000 * 3_502_592
    assert pages.byte_offsets(slots, values).tolist() == [page + 63 * 128]
    assert pages.byte_offsets(slots, scales).tolist() == [page + 8192 + 63 * 4]


@pytest.mark.parametrize("boundary", [2**31, 2**32])
def test_j07_pools_on_either_side_of_32_bits(tmp_path, boundary):
    """A sparse file as the region, so that the bytes are real and cost nothing."""
    nbytes = boundary + 3 * 656
    with open(tmp_path / "region", "wb") as f:
        f.truncate(nbytes)
    memory = torch.from_file(str(tmp_path / "region"), shared=True, size=nbytes, dtype=torch.uint8)
    for size in (boundary - 1, boundary, nbytes):
        pages = PageView(memory[:size], LATENT, 1, 656)
        last = pages.num_slots - 1
        assert pages.num_slots == size // 656
        for slots in ([last, 0, last - 2], [last - 1, last]):
            packed = random_rows(len(slots), LATENT, seed=size % 97)
            scatter_rows(pages, torch.tensor(slots), packed)
            assert torch.equal(gather_rows(pages, torch.tensor(slots)), packed)
            assert torch.equal(memory[last * 656 :][:656], packed[slots.index(last)])
        with pytest.raises(LayoutError, match=str(pages.num_slots)):
            gather_rows(pages, torch.tensor([pages.num_slots]))


# Refusals: nothing has moved when they are raised.


@pytest.mark.parametrize(
    ("slots", "match"),
    [
        (torch.tensor([0, 12]), r"0 to 12.*< 12"),
        (torch.tensor([0, -2]), r"-2 to 0.*-1 \(padding\)"),
        (torch.tensor([2**40, 1]), str(2**40)),
        (torch.tensor([0, 1], dtype=torch.int32), "int32"),
        (torch.tensor([[0, 1]]), r"\[1, 2\]"),
    ],
)
def test_bad_slots_are_refused(slots, match):
    pages = make_pages()
    before, out = pages.memory.clone(), torch.zeros(2, 656, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=match):
        gather_rows(pages, slots, out)
    with pytest.raises(LayoutError, match=match):
        scatter_rows(pages, slots, random_rows(2, LATENT))
    assert torch.equal(pages.memory, before)
    assert not out.any()


def test_a_slot_written_twice_is_refused():
    pages = make_pages()
    before = pages.memory.clone()
    slots = torch.tensor([4, -1, 9, 4, -1])
    with pytest.raises(LayoutError, match="slot 4 is written by rows 0 and 3"):
        scatter_rows(pages, slots, random_rows(5, LATENT))
    assert torch.equal(pages.memory, before)
    scatter_rows(pages, slots, random_rows(5, LATENT), check_unique=False)
    assert not torch.equal(pages.memory, before)


@pytest.mark.parametrize(
    ("packed", "match"),
    [
        (torch.zeros(2, 655, dtype=torch.uint8), r"\[2, 655\].*\[2, 656\]"),
        (torch.zeros(3, 656, dtype=torch.uint8), r"\[3, 656\].*\[2, 656\]"),
        (torch.zeros(2, 656), "float32"),
        (torch.zeros(2, 656, dtype=torch.uint8, device="meta"), "meta"),
    ],
)
def test_bad_rows_are_refused(packed, match):
    pages, slots = make_pages(), torch.tensor([1, 2])
    with pytest.raises(LayoutError, match=match):
        scatter_rows(pages, slots, packed)
    with pytest.raises(LayoutError, match=match):
        gather_rows(pages, slots, packed)


def test_rows_inside_the_region_are_refused():
    pages, slots = make_pages(), torch.tensor([1, 2])
    inside = pages.memory[: 2 * 656].view(2, 656)
    with pytest.raises(LayoutError, match="share bytes"):
        gather_rows(pages, slots, inside)
    with pytest.raises(LayoutError, match="share bytes"):
        scatter_rows(pages, slots, inside)


def test_an_out_with_gaps_is_refused():
    out = torch.zeros(2, 700, dtype=torch.uint8)[:, :656]
    with pytest.raises(LayoutError, match="contiguous"):
        gather_rows(make_pages(), torch.tensor([1, 2]), out)


@pytest.mark.parametrize(
    ("memory", "geometry", "match"),
    [
        (torch.zeros(656 * 4), (4, 2624), "float32"),
        (torch.zeros(4, 656, dtype=torch.uint8), (4, 2624), r"\[4, 656\]"),
        (torch.zeros(656 * 8, dtype=torch.uint8)[::2], (4, 2624), "stride 2"),
        (torch.zeros(656 * 4, dtype=torch.uint8), (4, 2623), "2623.*2624"),
        (torch.zeros(656 * 4, dtype=torch.uint8), (4, 2624, 1), "2625.*2624"),
        (torch.zeros(656 * 4, dtype=torch.uint8), (0, 2624), "block_size 0"),
        (torch.zeros(656 * 4, dtype=torch.uint8), (4, 2624, -1), "offset -1"),
    ],
)
def test_pages_that_do_not_fit_are_refused(memory, geometry, match):
    with pytest.raises(LayoutError, match=match):
        PageView(memory, LATENT, *geometry)


def test_a_cpu_user_needs_no_triton():
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "from kvflow.kernels import codec, rows\n"
        "from kvflow.layouts.record import latent_record\n"
        "r = latent_record('fp8', latent_rank=32, rope_dim=8)\n"
        "x = codec.encode_latent(r, torch.ones(4, 32), torch.ones(4, 8))\n"
        "p = rows.PageView(torch.zeros(8 * r.nbytes, dtype=torch.uint8), r, 4, 4 * r.nbytes)\n"
        "rows.scatter_rows(p, torch.tensor([5, 0, 7, -1]), x)\n"
        "y = codec.decode_latent(r, rows.gather_rows(p, torch.tensor([5, 0, 7])))\n"
        "assert (y == 1).all(), y\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
