"""Mover: what a rank brings into its cache from other engines' ranks, and into theirs from its
own, on a thread of its own."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
from attrs import define, field, frozen

from kvflow.engine.messages import Connect, PullRows, PushRows, Source
from kvflow.errors import PlanError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.wire import layout_from_wire
from kvflow.transfers.executors.base import TransferReport, TwoWayEndpoint
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

Ended = tuple[str, dict[str, Any] | None, str | None]
"""A request, and the report of its transfer or why that failed."""


@frozen(eq=False)
class PeerEngine:
    """An engine that rows come from: its layout, its pools, its endpoints by rank."""

    layout: KVLayout
    num_blocks: Mapping[str, int]
    endpoints: Mapping[int, str]


def _nobody() -> None:
    """Nobody waits for ends."""


@define(eq=False)
class Mover:
    """Serves one rank of an engine with this layout and `num_blocks` blocks of each group. One
    thread calls it; `on_end` is called on the transfer thread when a transfer has ended."""

    layout: KVLayout
    rank: int
    num_blocks: Mapping[str, int]
    endpoint: TwoWayEndpoint
    timeout: float = 60.0
    verify: bool = False
    on_end: Callable[[], None] = _nobody
    engines: dict[str, PeerEngine] = field(init=False, factory=dict)
    _pulls: "dict[str, Future[TransferReport]]" = field(init=False, factory=dict)
    _pushes: "dict[str, Future[TransferReport]]" = field(init=False, factory=dict)
    _thread: ThreadPoolExecutor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvflow-move")

    def connect(self, message: Connect) -> None:
        """Makes an engine's ranks reachable. Raises `TransferError` for exports that are none."""
        endpoints = {rank: self.endpoint.connect(blob) for rank, blob in message.exports.items()}
        layout = layout_from_wire(message.layout)
        self.engines[message.engine] = PeerEngine(layout, message.num_blocks, endpoints)

    def derive(self, request_id: str, source: Source) -> Plan:
        """The transfer plan of all that a source has, derived on this side too and compared with
        the front's. Raises `PlanError` if they differ or the engine is not connected, and
        `LayoutError` if its tables are none of the engine's."""
        peer = self._peer(request_id, source.engine)
        plan = plan_transfer(peer.layout, self.layout, (source.start, source.stop))
        if plan.digest != source.digest:
            raise PlanError(
                f"request {request_id!r}: this side derives plan {plan.digest[:16]}, "
                f"the sender {source.digest[:16]}"
            )
        Binding.of(peer.layout, source.tables, peer.num_blocks, source.stop)
        return plan

    def _peer(self, request_id: str, engine: str) -> PeerEngine:
        if engine not in self.engines:
            raise PlanError(
                f"request {request_id!r} needs engine {engine!r}, which is not connected; "
                f"connected are {sorted(self.engines)}"
            )
        return self.engines[engine]

    def begin(self, pull: PullRows) -> None:
        """Starts a transfer; it ends in `pulled`, whatever happens. A request has one at a time."""
        self._pulls[pull.request_id] = move = self._thread.submit(self._pull, pull)
        move.add_done_callback(lambda _: self.on_end())

    def _pull(self, pull: PullRows) -> TransferReport:
        """On the transfer thread."""
        source = pull.source
        peer = self._peer(pull.request_id, source.engine)
        plan = _plan(peer.layout, self.layout, (pull.start, pull.stop), pull.components)
        bound = BoundPlan(
            plan,
            Binding.of(peer.layout, source.tables, peer.num_blocks, pull.stop),
            Binding.of(self.layout, pull.tables, self.num_blocks, 0),
        )
        return self.endpoint.pull(
            bound, self.rank, peer.endpoints, timeout=self.timeout, verify=self.verify
        )

    def begin_push(self, push: PushRows) -> None:
        """As `begin`, the other way round; it ends in `pushed`."""
        self._pushes[push.request_id] = move = self._thread.submit(self._push, push)
        move.add_done_callback(lambda _: self.on_end())

    def _push(self, push: PushRows) -> TransferReport:
        """On the transfer thread."""
        peer = self._peer(push.request_id, push.reader)
        bound = BoundPlan(
            _plan(self.layout, peer.layout, (push.start, push.stop), push.components),
            Binding.of(self.layout, push.tables, self.num_blocks, push.stop),
            Binding.of(peer.layout, push.target, peer.num_blocks, 0),
        )
        return self.endpoint.push(
            bound, self.rank, peer.endpoints, timeout=self.timeout, verify=self.verify
        )

    @property
    def is_settling(self) -> bool:
        """Whether a transfer has ended and was not told: something of it may still arrive, and
        nobody says when that is over."""
        return any(move.done() for move in (*self._pulls.values(), *self._pushes.values()))

    def pulled(self, *, settled: bool = False) -> list[Ended]:
        """Every pull that has ended since the last call; with `settled` those of which nothing can
        still arrive: a failed one is told later if need be, and holds no others up."""
        return self._ended(self._pulls, settled)

    def pushed(self) -> list[Ended]:
        """Every push that has ended, and of which nothing can still arrive, since the last call."""
        return self._ended(self._pushes, settled=True)

    def _ended(self, moves: "dict[str, Future[TransferReport]]", settled: bool) -> list[Ended]:
        done = [name for name, move in moves.items() if move.done()]
        if settled and not self.endpoint.quiesced():  # asked after they ended, not before
            done = [name for name in done if moves[name].exception() is None]
        return [(name, *_outcome(moves.pop(name))) for name in done]

    def close(self) -> None:
        """Drops transfers that have not begun, and waits for the one under way: what it writes
        into is freed afterwards. An endpoint whose transport can recall it makes that short."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _plan(src: KVLayout, dst: KVLayout, tokens: tuple[int, int], components: Sequence[str]) -> Plan:
    """Of these components, or of all if none are named."""
    moved = components or dst.spec.names
    absent = set(dst.spec.names) - set(moved)
    return plan_transfer(src, dst, tokens, components=moved, absent=absent)


def _outcome(move: "Future[TransferReport]") -> tuple[dict[str, Any] | None, str | None]:
    error = move.exception()
    if error is not None:
        return None, str(error)
    return attrs.asdict(move.result()), None
