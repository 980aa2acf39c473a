"""Copies dealt to threads: as many as torch uses, all ended on return, the first error raised."""

import threading
import time

import pytest
import torch

from kvflow.kernels import lanes
from kvflow.kernels.lanes import in_lanes


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_lanes_copy_at_the_same_time(two_threads):
    """Each copy waits for the other, so one after the other they would never end."""
    both = threading.Barrier(2)
    in_lanes([lambda: both.wait(30) and None] * 2, lanes.MIN_NBYTES)


@pytest.mark.parametrize(("threads", "spare"), [(1, 0), (2, 1)])
def test_little_or_with_one_thread_is_copied_in_order_here(two_threads, threads, spare):
    torch.set_num_threads(threads)
    seen = []
    copies = [lambda i=i: seen.append((i, threading.current_thread())) for i in range(5)]
    in_lanes(copies, lanes.MIN_NBYTES - spare)
    assert seen == [(i, threading.current_thread()) for i in range(5)]


def test_an_error_is_raised_when_all_have_ended(two_threads):
    ended = []

    def slow():
        time.sleep(0.05)
        ended.append("slow")

    def wrong():
        raise ValueError("the second copy")

    with pytest.raises(ValueError, match="the second copy"):
        in_lanes([slow, wrong, slow], lanes.MIN_NBYTES)
    assert ended == ["slow", "slow"]
    assert not [t for t in threading.enumerate() if t.name.startswith("kvflow-copy")]


def test_nothing_to_copy(two_threads):
    in_lanes([], 0)
