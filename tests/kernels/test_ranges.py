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


@st.composite
def pages(draw):
    """Pages of 4 bytes, some of them neighbours on both sides, some cut, in any order."""
    num = draw(st.integers(1, 24))
    dense = draw(st.booleans())
    filled = np.array(draw(st.permutations(range(num))))
    others = st.lists(st.integers(0, 40), min_size=num, max_size=num, unique=True)
    other = np.array(draw(others))
    if draw(st.booleans()):  # a hole in the filled side
        filled = filled + (filled >= draw(st.integers(0, num)))
    nbytes = np.full(num, 4)
    if draw(st.booleans()):
        nbytes[draw(st.integers(0, num - 1))] = draw(st.integers(1, 3))
    odd = draw(st.sampled_from([0, 0, 1]))  # a side whose pages are not whole pages apart
    filled, other = 4 * filled, 4 * other + odd * (other > 20)
    src, dst = (other, filled) if dense else (filled, other)
    return Descriptors(src, dst, nbytes).coalesced(), 200, 200


@settings(max_examples=200)
@given(pages(), st.sampled_from([1, 2, 8]))
def test_pages_that_fill_a_side_equal_a_loop(case, many):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "MANY", many)
        test_copies_equal_a_loop.hypothesis.inner_test(case, 1, 1 << 18)


@pytest.mark.parametrize("fills_target", [True, False])
def test_pages_of_a_full_pool_are_copied_in_one_pass(fills_target):
    """Neighbours by chance and a page that is not whole do not change that."""
    nbytes, rng = 5000, np.random.default_rng(0)
    filled, other = (nbytes * rng.permutation(n)[:90] for n in (90, 300))
    lengths = np.full(90, nbytes)
    lengths[7] -= 1
    both = (other, filled) if fills_target else (filled, other)
    copy = RangeCopy.of(Descriptors(*both, lengths).coalesced())
    assert [f.fills_target for f in copy.fillings] == [fills_target] * len(copy.fillings)
    assert sum(len(f.index) for f in copy.fillings) == 89
    assert len(copy.slices) == 1


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
