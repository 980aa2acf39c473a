"""Memory of regions: where it lies, and that it is filled and apart."""

import mmap

import pytest
import torch

from kvflow.errors import CapacityError
from kvflow.kernels import region
from kvflow.kernels.region import HUGE_PAGE_NBYTES, PAGE_NBYTES, region_memories, region_memory


@pytest.mark.parametrize("nbytes", [1, 4097, HUGE_PAGE_NBYTES - 1, HUGE_PAGE_NBYTES, 5_000_001])
@pytest.mark.parametrize("fill", [0, 7])
def test_a_region_has_its_size_and_its_byte(nbytes, fill):
    memory = region_memory(nbytes, fill)
    assert memory.dtype == torch.uint8
    assert memory.shape == (nbytes,)
    assert bool((memory == fill).all())
    memory.fill_(9)  # it may be written


def test_a_large_region_begins_on_a_huge_page():
    """Of systems that align mappings of whole huge pages, as Linux does since 6.7."""
    begins = [region_memory(HUGE_PAGE_NBYTES + 1).data_ptr() for _ in range(3)]
    assert all(begin % PAGE_NBYTES == 0 for begin in begins)
    release = tuple(int(part) for part in _release().split(".")[:2])
    if release >= (6, 7):
        assert all(begin % HUGE_PAGE_NBYTES == 0 for begin in begins)


def _release():
    with open("/proc/sys/kernel/osrelease") as file:
        return file.read()


@pytest.mark.parametrize("sizes", [[1, 2, 3], [5, HUGE_PAGE_NBYTES, 0, 4097], [], [3 << 20] * 3])
def test_regions_are_apart_and_begin_on_pages(sizes):
    memories = region_memories(sizes, 3)
    assert [len(memory) for memory in memories] == sizes
    for n, memory in enumerate(memories):
        memory.fill_(n)
    for n, memory in enumerate(memories):
        assert bool((memory == n).all())
    if sum(sizes) >= HUGE_PAGE_NBYTES:
        assert all(memory.data_ptr() % PAGE_NBYTES == 0 for memory in memories)


def test_without_huge_pages_memory_is_ordinary(monkeypatch):
    monkeypatch.delattr(region.mmap, "MADV_HUGEPAGE")
    assert bool((region_memory(HUGE_PAGE_NBYTES, 4) == 4).all())


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 63])
def test_more_than_there_is_is_refused_with_its_number(nbytes):
    with pytest.raises(CapacityError, match=f"does not give {nbytes} bytes"):
        region_memory(nbytes)


def test_ordinary_memory_is_refused_alike(monkeypatch):
    monkeypatch.delattr(region.mmap, "MADV_HUGEPAGE")
    with pytest.raises(CapacityError, match=f"does not give {1 << 60} bytes"):
        region_memory(1 << 60)


@pytest.mark.parametrize("sizes", [[-1], [4 << 20, -1, 10]])
def test_less_than_nothing_is_refused(sizes):
    with pytest.raises(CapacityError, match="a region of -1 bytes, must be at least 0"):
        region_memories(sizes)
    with pytest.raises(CapacityError, match="a region of -1 bytes, must be at least 0"):
        region_memory(-1)


def test_a_system_that_refuses_the_advice_keeps_small_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "invalid argument")

    monkeypatch.setattr(region.mmap, "mmap", Refusing)
    assert bool((region_memory(HUGE_PAGE_NBYTES, 4) == 4).all())


def test_memory_that_is_not_filled_is_taken_as_it_is_written():
    """A staging area of which little is used must cost little, a cache must not fail later."""
    nbytes = 1 << 30
    before = _resident()
    untouched = region_memory(nbytes, fill=None)
    assert _resident() - before < nbytes // 4
    untouched[:4096] = 1
    cache = region_memory(nbytes // 8)
    assert _resident() - before >= nbytes // 8
    assert not cache.any()


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_NBYTES
