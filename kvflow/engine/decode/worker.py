"""DecodeWorker: one rank's hands in a decode group. It pulls, steps and forgets as it is told.

Transfers run on a thread of their own while steps go on.
"""

import time
from collections.abc import Mapping, Sequence

from attrs import define, field

from kvflow.engine.messages import StepItem
from kvflow.engine.moves import Mover
from kvflow.engine.runner import StepRunner
from kvflow.engine.spec.pending import StepTokens
from kvflow.engine.tiers.restore import Restorer
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.executors.base import TwoWayEndpoint


@define(eq=False)
class DecodeWorker:
    """`num_blocks` are the blocks of each group on this rank."""

    runner: StepRunner
    num_blocks: Mapping[str, int]
    endpoint: TwoWayEndpoint
    transfer_timeout: float = 60.0
    verify_transfers: bool = False
    pulls: Mover = field(init=False)
    restores: Restorer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pulls = Mover(
            self.layout,
            self.runner.memory.cache.rank,
            self.num_blocks,
            self.endpoint,
            self.transfer_timeout,
            self.verify_transfers,
        )
        self.restores = Restorer(self.layout, self.runner.memory.cache, self.num_blocks)

    @property
    def layout(self) -> KVLayout:
        return self.runner.memory.layout

    def step(self, items: Sequence[StepItem]) -> tuple[StepTokens, float]:
        """The tokens sampled on this rank, and the seconds the step took."""
        began = time.perf_counter()
        tokens = self.runner.step(items)
        return tokens, time.perf_counter() - began

    def retire(self, request_id: str) -> None:
        """The request leaves; its pages are complete, as of its last step, and stay so while
        somebody holds its blocks."""
        self.runner.memory.flush(request_id)
        self.runner.forget(request_id)

    @property
    def gauges(self) -> dict[str, float]:
        return dict(self.runner.memory.gauges)

    @property
    def totals(self) -> dict[str, float]:
        return {**self.runner.memory.totals, **self.runner.counters.values()}

    def close(self) -> None:
        """See `Mover.close`."""
        self.restores.close()
        self.pulls.close()
