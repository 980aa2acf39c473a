"""The same kernels on a real GPU, compared bit for bit with the CPU path."""

import pytest
import torch

from kvflow.errors import LayoutError
from kvflow.kernels import codec
from kvflow.kernels.rows import PageView, gather_rows, scatter_rows
from kvflow.layouts.record import index_record, latent_record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
INDEX = index_record("fp8", index_dim=128)


def make_pages(record, gap, offset, num_blocks=65):
    stride = record.page_nbytes(64) + gap
    g = torch.Generator().manual_seed(0)
    nbytes = offset + stride * num_blocks
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=g)
    return tuple(PageView(m, record, 64, stride, offset) for m in (memory, memory.cuda()))


@pytest.mark.parametrize("record", [LATENT, INDEX], ids=["latent", "index"])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (3_460_608, 41_984), (8, 8), (3, 1)])
@pytest.mark.parametrize("n", [0, 1, 2049])
def test_rows_move_alike(record, gap, offset, n):
    here, there = make_pages(record, gap, offset)
    g = torch.Generator().manual_seed(1)
    slots = torch.randperm(here.num_slots, generator=g)[:n]
    slots[1::7] = -1
    assert torch.equal(gather_rows(there, slots.cuda()).cpu(), gather_rows(here, slots))
    packed = torch.randint(0, 256, (n, record.nbytes), dtype=torch.uint8, generator=g)
    scatter_rows(here, slots, packed)
    scatter_rows(there, slots.cuda(), packed.cuda())
    assert torch.equal(there.memory.cpu(), here.memory)


def test_bad_slots_are_refused():
    _, pages = make_pages(LATENT, 0, 0)
    packed = torch.zeros(2, 656, dtype=torch.uint8, device="cuda")
    with pytest.raises(LayoutError, match="4160"):
        gather_rows(pages, torch.tensor([0, 4160], device="cuda"))
    with pytest.raises(LayoutError, match="slot 3 is written by rows 0 and 1"):
        scatter_rows(pages, torch.tensor([3, 3], device="cuda"), packed)
    with pytest.raises(LayoutError, match="slots on cpu"):
        gather_rows(pages, torch.tensor([0]))


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**33])
def test_j05_j08_offsets_beyond_32_bits(boundary):
    memory = torch.zeros(boundary + 656 * 64 * 2, dtype=torch.uint8, device="cuda")
    pages = PageView(memory, LATENT, 64, 656 * 64)
    slots = torch.tensor([pages.num_slots - 1, 0, boundary // 656], device="cuda")
    packed = torch.randint(0, 256, (3, 656), dtype=torch.uint8, device="cuda")
    scatter_rows(pages, slots, packed)
    assert torch.equal(gather_rows(pages, slots), packed)
    assert torch.equal(memory[int(slots[2]) * 656 :][:656], packed[2])
    assert int(memory.count_nonzero()) == int(packed.count_nonzero())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("latent_rank", "rope_dim"), [(512, 64), (32, 8), (200, 6), (33, 5)])
def test_codecs_give_the_same_bytes(dtype, latent_rank, rope_dim):
    record = latent_record("fp8", latent_rank=latent_rank, rope_dim=rope_dim)
    g = torch.Generator().manual_seed(2)
    spread = torch.logspace(-12, 4, 700)[:, None]
    latent = (torch.randn(700, latent_rank, generator=g) * spread).to(dtype)
    rope = torch.randn(700, rope_dim, generator=g).to(dtype)
    latent[3, 5], latent[4, 0], rope[5, 1] = torch.nan, -torch.inf, -torch.nan
    latent[6] = 0
    packed = codec.encode_latent(record, latent, rope)
    assert torch.equal(codec.encode_latent(record, latent.cuda(), rope.cuda()).cpu(), packed)
    check_decode(codec.decode_latent, record, packed)
    keys = index_record("fp8", index_dim=latent_rank)
    packed = codec.encode_index_key(keys, latent)
    assert torch.equal(codec.encode_index_key(keys, latent.cuda()).cpu(), packed)
    check_decode(codec.decode_index_key, keys, packed)


def check_decode(decode, record, packed):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        here, there = decode(record, packed, dtype), decode(record, packed.cuda(), dtype).cpu()
        assert torch.equal(there.isnan(), here.isnan())
        assert torch.equal(there.nan_to_num(0), here.nan_to_num(0))
