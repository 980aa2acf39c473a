"""Which real views allow 16-byte accesses: arithmetic on what a launch is given. The compiler sees
the same numbers (test_aot.py); a launch that lost them would be correct and four times slower."""

from math import gcd

import pytest
import torch

pytest.importorskip("triton")

from kvflow.kernels.pages import PageView
from kvflow.kernels.stacks import packed
from kvflow.kernels.triton_rows import Side, launches
from kvflow.layouts.record import Field, Record, index_record, latent_record

GLM_BLOCK = 3_502_592
"""Bytes behind one block id of GLM-5.3's prefill cache."""
LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
BF16 = latent_record("bfloat16", latent_rank=512, rope_dim=64)
NVFP4 = Record((Field("latent", "uint8", 320), Field("scale", "uint8", 32)))
V4 = Record(
    (Field("latent", "uint8", 576), Field("scale", "uint8", 8)), "[latent: t e | scale: t e] %576"
)
PLANAR, ROWS = (index_record("fp8", index_dim=128, arrangement=a) for a in ("planar", "row"))


def widest(record, block_size=64, gap=0, offset=0, shift=0):
    """For each launch of a gather: the widest aligned access in the pages and in the rows."""
    stride = record.page_pitch(block_size) + gap
    memory = torch.zeros(shift + offset + 2 * stride, dtype=torch.uint8)[shift:]
    pages = PageView(memory, record, block_size, stride, offset)
    rows = torch.zeros(4, record.nbytes, dtype=torch.uint8)
    slots = torch.zeros(4, dtype=torch.int64)
    found = []
    for it in launches(Side.of_pages(pages, slots), Side.of_rows(rows), packed(pages.pieces()), 4):
        word = it.args[0].element_size()
        sides = []
        for name, tensor in (("SRC", it.args[0]), ("DST", it.args[1])):
            steps = [it.constants[f"{name}_{x}"] for x in ("BLOCK_STRIDE", "STRIDE")]
            words = [*steps, it.constants["WIDTH"]]
            sides.append(gcd(16, tensor.data_ptr(), *(word * w for w in words)))
        found.append(tuple(sides))
    return found


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        (LATENT, {}, [(16, 16)]),  # 656 = 41 * 16
        (LATENT, {"block_size": 1}, [(16, 16)]),
        (LATENT, {"gap": GLM_BLOCK - 41_984, "offset": 41_984 * 5}, [(16, 16)]),  # block outermost
        (LATENT, {"gap": 8_448}, [(16, 16)]),
        (LATENT, {"offset": 8}, [(8, 16)]),  # a view 8 bytes off
        (LATENT, {"shift": 4}, [(4, 16)]),
        (LATENT, {"offset": 2}, [(2, 16)]),
        (BF16, {}, [(16, 16)]),
        (NVFP4, {}, [(16, 16)]),  # 352 = 22 * 16
        (V4, {}, [(16, 8), (8, 8)]),  # a packed row of 584 = 73 * 8
        (PLANAR, {}, [(16, 4), (4, 4)]),  # 128 values: wide in the page, 132 apart in the rows
        (PLANAR, {"gap": GLM_BLOCK - 8_448, "offset": 79 * 41_984}, [(16, 4), (4, 4)]),
        (ROWS, {}, [(4, 4)]),  # 132 = 33 * 4
    ],
)
def test_the_widest_access_of_real_views(record, options, expected):
    assert widest(record, **options) == expected
