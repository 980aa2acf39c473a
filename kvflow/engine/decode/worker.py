"""DecodeWorker: one rank's hands in a decode group. It pulls, steps and forgets as it is told.

Transfers run on a thread of their own while steps go on.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
from attrs import define, field, frozen
from msgspec import Struct

from kvflow.engine.messages import Connect, Source, StepItem
from kvflow.engine.runner import StepRunner
from kvflow.engine.sampling import Sampled
from kvflow.errors import PlanError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.wire import layout_from_wire
from kvflow.transfers.executors.base import Endpoint, TransferReport
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


class Pull(Struct, frozen=True):
    """A transfer to begin: positions [0, source.length) of a request, into these blocks."""

    request_id: str
    source: Source
    tables: dict[str, list[int]]


@frozen(eq=False)
class Prefiller:
    """The engine that requests come from: its layout, its pools, its endpoints by rank."""

    layout: KVLayout
    num_blocks: Mapping[str, int]
    peers: Mapping[int, str]


@define(eq=False)
class DecodeWorker:
    """`num_blocks` are the blocks of each group on this rank."""

    runner: StepRunner
    num_blocks: Mapping[str, int]
    endpoint: Endpoint
    transfer_timeout: float = 60.0
    verify_transfers: bool = False
    prefiller: Prefiller | None = field(init=False, default=None)
    _pulls: "dict[str, Future[TransferReport]]" = field(init=False, factory=dict)
    _puller: ThreadPoolExecutor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="kvflow-pull")

    @property
    def layout(self) -> KVLayout:
        return self.runner.memory.layout

    def connect(self, message: Connect) -> None:
        peers = {rank: self.endpoint.connect(blob) for rank, blob in message.exports.items()}
        self.prefiller = Prefiller(layout_from_wire(message.layout), message.num_blocks, peers)

    def derive(self, request_id: str, source: Source) -> Plan:
        """The transfer plan, derived on this side too and compared with the sender's. Raises
        `PlanError` if they differ or nobody is connected."""
        if self.prefiller is None:
            raise PlanError(f"request {request_id!r} comes from an engine not connected yet")
        plan = plan_transfer(self.prefiller.layout, self.layout, (0, source.length))
        if plan.digest != source.digest:
            raise PlanError(
                f"request {request_id!r}: this side derives plan {plan.digest[:16]}, "
                f"the sender {source.digest[:16]}"
            )
        return plan

    def begin(self, pull: Pull) -> None:
        """Starts a transfer; it ends in `ended`, whatever happens."""
        self._pulls[pull.request_id] = self._puller.submit(self._pull, pull)

    def _pull(self, pull: Pull) -> TransferReport:
        """On the transfer thread."""
        plan, source = self.derive(pull.request_id, pull.source), self.prefiller
        if source is None:
            raise PlanError(f"request {pull.request_id!r} comes from an engine not connected yet")
        bound = BoundPlan(
            plan,
            Binding.of(source.layout, pull.source.tables, source.num_blocks, pull.source.length),
            Binding.of(self.layout, pull.tables, self.num_blocks, 0),
        )
        return self.endpoint.pull(
            bound,
            self.runner.memory.cache.rank,
            source.peers,
            timeout=self.transfer_timeout,
            verify=self.verify_transfers,
        )

    def ended(self) -> list[tuple[str, dict[str, Any] | None, str | None]]:
        """(request, report, error) of every transfer that has ended since the last call."""
        done = [(name, pull) for name, pull in self._pulls.items() if pull.done()]
        for name, _ in done:
            del self._pulls[name]
        return [(name, *_outcome(pull)) for name, pull in done]

    def step(self, items: Sequence[StepItem]) -> tuple[dict[str, list[Sampled]], float]:
        """The tokens sampled on this rank, and the seconds the step took."""
        began = time.perf_counter()
        sampled = self.runner.run(items)
        return sampled, time.perf_counter() - began

    @property
    def gauges(self) -> dict[str, float]:
        return dict(self.runner.memory.gauges)

    @property
    def totals(self) -> dict[str, float]:
        return {**self.runner.memory.totals, **self.runner.counters.values()}

    def close(self) -> None:
        """Drops transfers that have not begun, and waits for the one under way: what it writes
        into is freed afterwards. An endpoint whose transport can recall it makes that short."""
        self._puller.shutdown(wait=True, cancel_futures=True)


def _outcome(pull: "Future[TransferReport]") -> tuple[dict[str, Any] | None, str | None]:
    error = pull.exception()
    if error is not None:
        return None, str(error)
    return attrs.asdict(pull.result()), None
