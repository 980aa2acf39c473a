"""Lanes: copies that do not touch each other's bytes, dealt to as many threads as torch uses."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

MIN_NBYTES = 8 << 20
"""Below this a thread costs about as much as it saves."""


def in_lanes(copies: Sequence[Callable[[], None]], nbytes: int) -> None:
    """Makes all copies, `nbytes` bytes in all, in any order, and returns when all have ended.

    As `torch.set_num_threads` says, so a process that keeps torch to one thread is not given a
    second one here. Raises what the first copy of the sequence that failed raised."""
    lanes = min(torch.get_num_threads(), len(copies))
    if lanes < 2 or nbytes < MIN_NBYTES:
        for copy in copies:
            copy()
        return
    with ThreadPoolExecutor(lanes, "kvflow-copy") as pool:
        started = [pool.submit(copy) for copy in copies]
    for copied in started:
        copied.result()
