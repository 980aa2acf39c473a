"""How a link is carried out: three ways with the same result, and what each would cost.

direct: descriptors from source bytes to target bytes. stage: whole source pages in bulk to local
staging, rows to their places from there. pack: the owner gathers the rows, one bulk read, rows to
their places.
"""

from typing import Literal

import numpy as np
from attrs import frozen

from kvflow.layouts.paging import page_of
from kvflow.transfers.lower import PageGeometry, SlotRuns, descriptors

Strategy = Literal["direct", "stage", "pack"]
STRATEGIES: tuple[Strategy, ...] = ("direct", "stage", "pack")


@frozen
class Costs:
    """Seconds and bytes per second of a transport. The defaults were measured for UCX over shared
    memory of one host: a descriptor 0.8 us + bytes / 12.5 GB/s; a packed row or its scattering
    about 0.08 us + bytes / 8 GB/s; a request to the owner and its answer 0.6 ms."""

    descriptor: float = 0.8e-6
    wire: float = 12.5e9
    row: float = 0.08e-6
    copy: float = 8e9
    round_trip: float = 600e-6

    def wired(self, num_descriptors: int, nbytes: int) -> float:
        return num_descriptors * self.descriptor + nbytes / self.wire

    def copied(self, num_rows: int, nbytes: int) -> float:
        return num_rows * self.row + nbytes / self.copy


@frozen
class Estimate:
    """Seconds that each strategy would take for a link, and the descriptors of the direct one."""

    seconds: dict[Strategy, float]
    num_descriptors: int

    def best(self, allowed: tuple[Strategy, ...]) -> Strategy:
        return min(allowed, key=lambda s: self.seconds[s])


def estimate(
    costs: Costs, runs: SlotRuns, src: PageGeometry, dst: PageGeometry, num_components: int
) -> Estimate:
    """For components that all look like `src` here and `dst` there."""
    direct = descriptors(runs, src, dst)
    row, n = src.record.nbytes, num_components
    num_rows, payload = runs.num_tokens * n, runs.num_tokens * row * n
    pages = n * len(np.unique(page_of(runs.src, src.block_size)))
    page_bytes = pages * src.record.page_nbytes(src.block_size)
    rows = costs.copied(num_rows, payload)
    return Estimate(
        {
            "direct": costs.wired(n * len(direct), payload),
            "stage": costs.wired(pages, page_bytes) + rows,
            "pack": costs.round_trip + costs.wired(1, payload) + 2 * rows,
        },
        n * len(direct),
    )
