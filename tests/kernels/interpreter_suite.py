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
from kvflow.layouts.record import Field, Record, index_record, latent_record

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
    assert isinstance(triton_rows.gather_kernel, InterpretedFunction)
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


def watched(launch, pages, slots, packed, to_pages):
    """Run one piece at a time, so that each watch sees one launch."""
    read, written = (packed, pages.memory) if to_pages else (pages.memory, packed)
    pieces = pages.pieces()
    for piece in pieces:
        object.__setattr__(pages, "pieces", (piece,))
        with interpreter.watch(reads=[read, slots], writes=[written]):
            launch(pages, slots, packed, 512)
    object.__setattr__(pages, "pieces", pieces)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (96, 48), (3, 1)])
@pytest.mark.parametrize("n", [1, 13])
def test_gather_and_scatter_equal_the_torch_path(name, gap, offset, n):
    pages = make_pages(RECORDS[name], gap=gap, offset=offset)
    slots = some_slots(pages, n)
    out = torch.full((n, pages.record.nbytes), 77, dtype=torch.uint8)
    watched(triton_rows.gather, pages, slots, out, to_pages=False)
    assert torch.equal(out, rows.gather_rows(pages, slots))

    packed = random_rows(n, pages.record)
    expected = make_pages(RECORDS[name], gap=gap, offset=offset)
    rows.scatter_rows(expected, slots, packed)
    watched(triton_rows.scatter, pages, slots, packed, to_pages=True)
    assert torch.equal(pages.memory, expected.memory)


def test_full_size_tiles_and_real_block_size():
    pages = make_pages(LATENT, block_size=64, num_blocks=3)
    slots = some_slots(pages, 40)
    out = torch.empty(40, LATENT.nbytes, dtype=torch.uint8)
    triton_rows.gather(pages, slots, out)
    assert torch.equal(out, rows.gather_rows(pages, slots))


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
    watched(triton_rows.scatter, pages, slots, packed, to_pages=True)
    assert torch.equal(rows.gather_rows(pages, slots[:2]), packed[:2])
    rows.scatter_rows(pages, slots[:2], rows.gather_rows(make_like(pages, before), slots[:2]))
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
def row_words(slots, out, tile, WIDTH: tl.constexpr, TILE: tl.constexpr):  # noqa: N803
    _, row_word, _, _ = triton_rows.locate(slots, tile, 0, 4, WIDTH, WIDTH, WIDTH, WIDTH, 4, TILE)
    tl.store(out + tl.arange(0, TILE), row_word)


def test_j05_packed_rows_beyond_32_bits():
    """The tile number alone: so many programs cannot run here."""
    out, tile = torch.zeros(64, dtype=torch.int64), 2**31 // 64 + 5
    row_words[(1,)](torch.zeros(1, dtype=torch.int64), out, tile, WIDTH=164, TILE=64)
    assert torch.equal(out, tile * 64 + torch.arange(64))


# Planted faults: the checks above are seen to fail.


@pytest.mark.parametrize("bad", [28, 10**12])
def test_a_slot_past_the_end_is_seen(bad):
    pages = make_pages(LATENT)
    out = torch.empty(1, LATENT.nbytes, dtype=torch.uint8)
    with pytest.raises(InterpreterError, match="outside every tensor"):
        watched(triton_rows.gather, pages, torch.tensor([bad]), out, to_pages=False)


def test_a_slot_written_twice_is_seen():
    pages = make_pages(LATENT)
    with pytest.raises(InterpreterError, match=r"race|two lanes"):
        watched(
            triton_rows.scatter, pages, torch.tensor([3, 3]), random_rows(2, LATENT), to_pages=True
        )


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
    fmt = codec.row_format(record, "latent", "rope", 128)
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
    fmt = codec.row_format(record, "key", None, None)
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
        codec.row_format(record, "key", None, None), packed, codec.decode_index_key(record, packed)
    )
