"""What the benchmarks share: calls timed in turns, and the memcpy they are compared with.

On a busy machine only ratios of calls that took turns mean something, so nothing here reports a
time alone. `Memcpy` copies with numpy, that is with the C library's memcpy, which is faster for
large buffers than torch's `copy_` on one thread.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

MIB = 1 << 20
GIB = 1 << 30


class Memcpy:
    """A pair of reused buffers whose pages the kernel has already given."""

    def __init__(self, nbytes: int) -> None:
        self.source = np.ones(nbytes, np.uint8)
        self.target = np.zeros(nbytes, np.uint8)
        self.target[:] = 2

    def __call__(self) -> None:
        np.copyto(self.target, self.source)


Clock = Callable[[], float]


def in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every call in every round; one round before is not counted. With
    ``time.process_time`` a call on one thread is not charged for what runs beside it."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, other: str) -> float:
    """Median over the rounds of `name`'s time over `other`'s in the same round: what a machine
    does to both at once drops out."""
    pairs = zip(seconds[name], seconds[other], strict=True)
    return statistics.median(a / b for a, b in pairs)


def load() -> str:
    """The load of the machine, for the header of a report."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
