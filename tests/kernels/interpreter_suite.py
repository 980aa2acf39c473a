"""The Triton kernels against the torch path, in Triton's interpreter. Not collected by name:
`test_triton_interpreted.py` runs it in a process of its own (see `interpreter`)."""

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

from kvflow.kernels import codec, rows, triton_codec, triton_rows
from kvflow.kernels.formats import row_format
from kvflow.kernels.stacks import packed
from kvflow.layouts.record import Field, Record, index_record, latent_record
from kvflow.transfers.lower import paired_pieces

torch.set_num_threads(1)

LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
RECORDS = {
    "latent": LATENT,
    "index planar": index_record("fp8", index_dim=128),
    "index rows": index_record("fp8", index_dim=128, arrangement="row"),
    "bytes": Record((Field("a", "uint8", 5), Field("b", "bfloat16", 3)), "planar"),
}


@pytest.fixture(autouse=True)
def _strict():
    assert isinstance(triton_rows.move_kernel, InterpretedFunction)
    with interpreter.exact_casts():
        yield


def make_pages(record, block_size=4, num_blocks=7, gap=0, offset=0, seed=0):
    stride = record.page_nbytes(block_size) + gap
    nbytes = offset + stride * num_blocks
    memory = torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return rows.PageView(memory, record, block_size, stride, offset)


def some_slots(pages, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages.num_slots, generator=g)[:n]
    slots[1::5] = -1
    return slots


def random_rows(n, record, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, record.nbytes), dtype=torch.uint8, generator=g)


def watched(src, dst, pairs, num_rows):
    """Run the launches of a move one at a time, each under a watch of its own."""
    count = 0
    for launch in triton_rows.launches(src, dst, pairs, num_rows, 512):
        reads = [x for x in (src.memory, src.slots, dst.slots) if x is not None]
        with interpreter.watch(reads=reads, writes=[dst.memory]):
            launch()
        count += 1
    return count


def watched_gather(pages, slots, out, heads=None):
    here, there = triton_rows.Side.of_pages(pages, slots), triton_rows.Side.of_rows(out)
    return watched(here, there, packed(pages.pieces(heads)), len(slots))


def watched_scatter(pages, slots, rows, heads=None):
    here, there = triton_rows.Side.of_rows(rows), triton_rows.Side.of_pages(pages, slots)
    pairs = [(b, a) for a, b in packed(pages.pieces(heads))]
    return watched(here, there, pairs, len(slots))


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (96, 48), (3, 1)])
@pytest.mark.parametrize("n", [1, 13])
def test_gather_and_scatter_equal_the_torch_path(name, gap, offset, n):
    pages = make_pages(RECORDS[name], gap=gap, offset=offset)
    slots = some_slots(pages, n)
    out = torch.full((n, pages.record.nbytes), 77, dtype=torch.uint8)
    watched_gather(pages, slots, out)
    assert torch.equal(out, rows.gather_rows(pages, slots))

    packed = random_rows(n, pages.record)
    expected = make_pages(RECORDS[name], gap=gap, offset=offset)
    rows.scatter_rows(expected, slots, packed)
    watched_scatter(pages, slots, packed)
    assert torch.equal(pages.memory, expected.memory)


def test_full_size_tiles_and_real_block_size():
    pages = make_pages(LATENT, block_size=64, num_blocks=3)
    slots = some_slots(pages, 40)
    out = torch.empty(40, LATENT.nbytes, dtype=torch.uint8)
    triton_rows.gather(pages, slots, out)
    assert torch.equal(out, rows.gather_rows(pages, slots))


ARRANGED = ("t h e", "h t e", "h e t", "h e t t4 e2")
KEY, VALUE = Field("key", "bfloat16", 4, 3), Field("value", "bfloat16", 4, 3)


@pytest.mark.parametrize("order", ARRANGED)
@pytest.mark.parametrize("heads", [None, (1, 3)])
def test_head_ranges_and_tiles_equal_the_torch_path(order, heads):
    record = Record((KEY,), order)
    pages, expected = (make_pages(record, block_size=8, offset=2, gap=6) for _ in range(2))
    slots = some_slots(pages, 11)
    out = torch.full((11, record.row_nbytes(heads)), 77, dtype=torch.uint8)
    watched_gather(pages, slots, out, heads)
    assert torch.equal(out, rows.gather_rows(pages, slots, heads=heads))
    packed = torch.roll(out, 1, 0)
    rows.scatter_rows(expected, slots, packed, heads)
    watched_scatter(pages, slots, packed, heads)
    assert torch.equal(pages.memory, expected.memory)


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        (RECORDS["latent"], RECORDS["latent"], 1),
        (RECORDS["index planar"], RECORDS["index planar"], 2),
        (RECORDS["index planar"], RECORDS["index rows"], 2),
        (RECORDS["index rows"], RECORDS["index planar"], 2),
        (Record((KEY,), "t h e"), Record((KEY,), "h e t"), 1),
        (Record((KEY, VALUE), "t h e"), Record((KEY, VALUE), "h t e"), 2),
        (Record((KEY,), "h e t t4 e2"), Record((KEY,), "h t e"), 3),  # one a head
    ],
)
def test_repack_moves_pages_to_pages(src, dst, kinds):
    """Another block size, another arrangement, one launch for each stack of pieces."""
    here, there = make_pages(src, block_size=4, gap=16), make_pages(dst, block_size=8, seed=5)
    twin = make_pages(dst, block_size=8, seed=5)
    src_slots, dst_slots = some_slots(here, 13), some_slots(there, 13, seed=2)
    rows.scatter_rows(twin, dst_slots, rows.gather_rows(here, src_slots))
    launched = watched(
        triton_rows.Side.of_pages(here, src_slots),
        triton_rows.Side.of_pages(there, dst_slots),
        paired_pieces(here.geometry, there.geometry),
        13,
    )
    assert torch.equal(there.memory, twin.memory)
    assert launched == kinds


def test_zero_rows_launch_nothing():
    pages, slots = make_pages(LATENT), torch.empty(0, dtype=torch.int64)
    triton_rows.gather(pages, slots, torch.empty(0, LATENT.nbytes, dtype=torch.uint8))
    triton_rows.scatter(pages, slots, torch.empty(0, LATENT.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["latent", "index planar"])
def test_j02_j03_padding_slots_reach_no_byte(name):
    """A sentinel used as an index writes slot -1: the last slot, or bytes before the buffer."""
    record = RECORDS[name]
    pages = make_pages(record, num_blocks=3, offset=record.page_nbytes(4))
    before = pages.memory.clone()
    slots = torch.tensor([0, 1, -1, -1])
    packed = random_rows(4, record)
    watched_scatter(pages, slots, packed)
    assert torch.equal(rows.gather_rows(pages, slots[:2]), packed[:2])
    rows.scatter_rows(pages, slots[:2], rows.gather_rows(make_like(pages, before), slots[:2]))
    assert torch.equal(pages.memory, before)


@pytest.mark.parametrize("name", ["latent", "index planar"])
def test_j01_j04_padding_rows_of_poison_reach_nothing(name):
    """A captured batch of 4 with 1 live row: NaN in the others, slot 0 and guards stay."""
    record = RECORDS[name]
    pages = make_pages(record, num_blocks=3, offset=record.page_nbytes(4))
    before, captured = pages.memory.clone(), torch.tensor([3, 9, 0, 6])
    rows.fill_slots(captured, torch.tensor([5]))
    poison = torch.full((4, record.nbytes), 0x7F, dtype=torch.uint8)
    poison[0] = rows.gather_rows(pages, torch.tensor([5]))[0]
    watched_scatter(pages, captured, poison)
    assert torch.equal(pages.memory, before)


def make_like(pages, memory):
    return rows.PageView(memory, pages.record, pages.block_size, pages.block_stride, pages.offset)


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**33, 2**34])  # 2**33 bytes: 2**31 words
def test_j05_j08_offsets_beyond_32_bits(tmp_path, boundary):
    file = tmp_path / "region"
    with open(file, "wb") as f:
        f.truncate(boundary + 4 * 656)
    memory = torch.from_file(str(file), shared=True, size=boundary + 4 * 656, dtype=torch.uint8)
    pages = rows.PageView(memory, LATENT, 1, 656)
    last = pages.num_slots - 1
    slots = torch.tensor([last, 0, last - 3])
    packed = random_rows(3, LATENT)
    triton_rows.scatter(pages, slots, packed)
    assert torch.equal(memory[last * 656 :][:656], packed[0])
    assert torch.equal(memory[(last - 3) * 656 :][:656], packed[2])
    assert torch.equal(memory[:656], packed[1])
    out = torch.empty_like(packed)
    triton_rows.gather(pages, slots, out)
    assert torch.equal(out, packed)


@triton.jit
def words_of(
    slots, words, out, BLOCK: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr, NUM_TILES: tl.constexpr, N: tl.constexpr,  # noqa: N803
):  # fmt: skip
    i = tl.arange(0, N)
    slot, word = tl.load(slots + i), tl.load(words + i)
    at = triton_rows.place(slot, word, BLOCK, STRIDE, STEP, TILES, NUM_TILES)
    tl.store(out + i, at)


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**33])
@pytest.mark.parametrize(
    ("nbytes", "last_good"),
    [(656, 3_273_603), (1152, 1_864_135), (51_168, 41_969), (576, 7_456_540 // 2)],
)
@pytest.mark.parametrize("block_size", [1, 64])
def test_j05_j08_word_offsets_by_arithmetic(nbytes, last_good, block_size, boundary):
    """No memory at all: where the kernel says that slots lie, either side of a boundary."""
    first_bad = -(-boundary // nbytes)
    assert boundary > 2**31 or abs(first_bad - last_good) <= 1
    slots = torch.tensor([0, first_bad - 1, first_bad, 2**40])
    words, out = torch.tensor([0, 3, 3, 5]), torch.zeros(4, dtype=torch.int64)
    words_of[(1,)](slots, words, out, block_size, block_size * nbytes, nbytes, (), 0, 4)
    assert out.tolist() == [
        s * nbytes + w for s, w in zip(slots.tolist(), [0, 3, 3, 5], strict=True)
    ]


def test_j05_tiled_offsets_beyond_32_bits():
    """Token t of a VNNI page at (t // 16, t % 16) steps; the page itself beyond 2^33."""
    slots = torch.tensor([2**33 + 37, 2**33 + 63])
    words, out = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    words_of[(1,)](slots, words, out, 64, 10_000, 1000, (16, 4), 1, 2)
    block = 2**33 // 64 * 10_000
    assert out.tolist() == [block + 2 * 1000 + 5 * 4, block + 3 * 1000 + 15 * 4]


@triton.jit
def lanes_of(out, tile, TILE: tl.constexpr):  # noqa: N803
    tl.store(out + tl.arange(0, TILE), triton_rows.lanes(tile, TILE))


def test_j05_packed_rows_beyond_32_bits():
    """The tile number alone: so many programs cannot run here."""
    out, tile = torch.zeros(64, dtype=torch.int64), 2**31 // 64 + 5
    lanes_of[(1,)](out, tile, TILE=64)
    assert torch.equal(out, tile * 64 + torch.arange(64))


# Planted faults: the checks above are seen to fail.


@pytest.mark.parametrize("bad", [28, 10**12])
def test_a_slot_past_the_end_is_seen(bad):
    pages = make_pages(LATENT)
    out = torch.empty(1, LATENT.nbytes, dtype=torch.uint8)
    with pytest.raises(InterpreterError, match="outside every tensor"):
        watched_gather(pages, torch.tensor([bad]), out)


def test_a_slot_written_twice_is_seen():
    pages = make_pages(LATENT)
    with pytest.raises(InterpreterError, match=r"race|two lanes"):
        watched_scatter(pages, torch.tensor([3, 3]), random_rows(2, LATENT))


@triton.jit
def unmasked_gather(pages, slots, out, WIDTH: tl.constexpr, TILE: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, TILE)
    slot = tl.load(slots + lane // WIDTH)
    tl.store(out + lane, tl.load(pages + slot * WIDTH + lane % WIDTH))


def test_a_kernel_that_ignores_padding_is_seen():
    pages, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    slots = torch.tensor([3, -1])
    with (
        pytest.raises(InterpreterError, match="outside every tensor"),
        interpreter.watch(reads=[pages, slots], writes=[out]),
    ):
        unmasked_gather[(1,)](pages, slots, out, WIDTH=8, TILE=16)


def test_the_stock_casts_are_wrong_and_ours_are_not():
    """Without `exact_casts` the comparison with torch below would be worthless."""
    x = torch.tensor([31.74, 500.0, 2.0**-8, 3.0], dtype=torch.float32)
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (interpreter._cast(x.numpy(), tl.float32, tl.float8e4nv, None) == expected).all()


# The fp8 codec.


def specials(n, size, dtype):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, size, generator=g) * torch.logspace(-12, 6, n)[:, None]
    x[1] = 0
    x[2, size // 2] = torch.nan
    x[3, 0] = torch.inf
    x[4, -1] = -torch.inf
    x[5] = 448.0 * 2.0 ** torch.arange(-size // 2, size - size // 2).clamp(-40, 8)
    x[6] = torch.where(torch.arange(size) % 2 == 0, 31.74, -1.0625)
    return x.to(dtype)


@pytest.mark.parametrize(("latent_rank", "rope_dim"), [(512, 64), (32, 8), (200, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_kernels_equal_the_torch_codec(latent_rank, rope_dim, dtype):
    record = latent_record("fp8", latent_rank=latent_rank, rope_dim=rope_dim)
    fmt = row_format(record, "latent", "rope", 128)
    latent, rope = specials(9, latent_rank, dtype), specials(9, rope_dim, dtype)
    expected = codec.encode_latent(record, latent, rope)
    assert triton_codec.supports(fmt, dtype)
    out = torch.zeros_like(expected)
    with interpreter.watch(reads=[latent, rope], writes=[out]):
        triton_codec.quantise(fmt, latent, rope, out, power_of_two=False)
    assert torch.equal(out, expected)
    check_dequantise(fmt, expected, codec.decode_latent(record, expected, dtype))


@pytest.mark.parametrize("index_dim", [128, 16])
def test_index_kernels_equal_the_torch_codec(index_dim):
    record = index_record("fp8", index_dim=index_dim)
    fmt = row_format(record, "key", None, None)
    key = specials(9, index_dim, torch.float32)
    expected = codec.encode_index_key(record, key)
    out = torch.zeros_like(expected)
    with interpreter.watch(reads=[key], writes=[out]):
        triton_codec.quantise(fmt, key, None, out, power_of_two=True)
    assert torch.equal(out, expected)
    check_dequantise(fmt, expected, codec.decode_index_key(record, expected))


def check_dequantise(fmt, packed, expected):
    out = torch.zeros_like(expected)
    with interpreter.watch(reads=[packed], writes=[out]):
        triton_codec.dequantise(fmt, packed, out)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0), expected.nan_to_num(0))


def test_every_code_decodes_alike():
    record = index_record("fp8", index_dim=256)
    packed = torch.zeros(1, 260, dtype=torch.uint8)
    packed[0, :256] = torch.arange(256, dtype=torch.uint8)
    packed[0, 256:] = torch.tensor([0.25]).view(torch.uint8)
    check_dequantise(
        row_format(record, "key", None, None), packed, codec.decode_index_key(record, packed)
    )
