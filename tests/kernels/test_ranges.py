"""Byte ranges, copied as slices and as indexed items: every byte against a loop over ranges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import LayoutError
from kvflow.kernels import ranges
from kvflow.kernels.ranges import RangeCopy
from kvflow.transfers.lower import Descriptors

torch.set_num_threads(1)


@st.composite
def cases(draw):
    """Ranges whose targets are disjoint, whose sources may be anything, on `step`-aligned bytes."""
    step = draw(st.sampled_from([1, 2, 4, 16, 656]))
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 132, 656]), max_size=30))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    at, dst = 0, []
    for n, gap in zip(lengths, gaps, strict=True):
        at += gap * step
        dst.append(at)
        at += -(-n // step) * step
    order = draw(st.permutations(range(len(lengths))))
    src = [draw(st.integers(0, 40)) * step for _ in lengths]
    columns = np.array([[src[i], dst[i], lengths[i]] for i in order], np.int64).reshape(-1, 3).T
    return Descriptors(*columns), 40 * step + 656, at + 7


@settings(max_examples=100)
@given(cases(), st.sampled_from([1, 5, 4096]), st.sampled_from([1, 700, 1 << 18]))
def test_copies_equal_a_loop(case, long, chunk):
    described, src_size, dst_size = case
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 256, (src_size,), dtype=torch.uint8, generator=generator)
    dst = torch.randint(0, 256, (dst_size,), dtype=torch.uint8, generator=generator)
    expected, before = dst.clone(), src.clone()
    for a, b, n in zip(described.src, described.dst, described.nbytes, strict=True):
        expected[b : b + n] = before[a : a + n]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "LONG_NBYTES", long)
        patch.setattr(ranges, "CHUNK_NBYTES", chunk)
        RangeCopy.of(described).copy(src, dst)
    assert torch.equal(dst, expected)
    assert torch.equal(src, before)


def one(src: int, dst: int, nbytes: int) -> Descriptors:
    return Descriptors(*(np.array([0, x]) for x in (src, dst)), np.array([nbytes, nbytes]))


@pytest.mark.parametrize("nbytes", [8, 5000])
@pytest.mark.parametrize(("src", "dst", "side"), [(1, 0, "source"), (0, 1, "target")])
def test_a_range_that_leaves_a_memory_is_refused(nbytes, src, dst, side):
    memory, target = (torch.full((3 * nbytes,), x, dtype=torch.uint8) for x in (1, 0))
    at = [2 * nbytes + x for x in (src, dst)]
    with pytest.raises(LayoutError, match=f"{3 * nbytes + 1}.* of a {side} of {3 * nbytes}"):
        RangeCopy.of(one(*at, nbytes)).copy(memory, target)
    with pytest.raises(LayoutError, match=r"\[-1, "):
        RangeCopy.of(one(-src, -dst, nbytes)).copy(memory, target)
    assert not target.any()


@pytest.mark.parametrize("nbytes", [656, 5000])
def test_j05_j08_ranges_beyond_32_bits(tmp_path, nbytes):
    """A sparse file as the memory: ranges on and next to 2^31 and 2^32."""
    size = 2**32 + 2**15
    with open(tmp_path / "region", "wb") as f:
        f.truncate(size)
    big = torch.from_file(str(tmp_path / "region"), shared=True, size=size, dtype=torch.uint8)
    at = np.array([0, 2**31 - 7000, 2**31, 2**32 - 7000, 2**32 - 1 - 500, 2**32 + 7000])
    lengths, place = np.full(len(at), nbytes), np.arange(len(at))[::-1] * nbytes
    packed = torch.randint(0, 256, (len(at) * nbytes,), dtype=torch.uint8)
    RangeCopy.of(Descriptors(place, at, lengths)).copy(packed, big)
    for begin, there in zip(place, at, strict=True):
        assert torch.equal(big[there : there + nbytes], packed[begin : begin + nbytes])
    assert int(big[2**31 + nbytes : 2**31 + 2**20].count_nonzero()) == 0
    out = torch.zeros_like(packed)
    RangeCopy.of(Descriptors(at, place, lengths)).copy(big, out)
    assert torch.equal(out, packed)


def test_nothing_to_copy():
    empty = np.empty(0, np.int64)
    RangeCopy.of(Descriptors(empty, empty, empty)).copy(torch.zeros(0), torch.zeros(0))
