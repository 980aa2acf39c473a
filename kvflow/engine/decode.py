"""DecodeEngine: one data-parallel decode rank. Takes over prefilled requests, pulls their KV and
continues them in one continuously formed batch.

Transfers run on a thread of their own while the batch goes on. Blocks that a failed transfer may
still write stay quarantined until the endpoint has quiesced.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import attrs
from attrs import define, field, frozen

from kvflow.engine.blocks import BlockPool
from kvflow.engine.finish import finish_reason
from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import (
    Abort,
    Admit,
    Connect,
    Gauges,
    Generated,
    Ready,
    RequestFailed,
    RunStep,
    Shutdown,
    StepItem,
    ToRank,
    TransferEnded,
)
from kvflow.engine.runner import StepRunner
from kvflow.errors import KvflowError, PlanError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.wire import layout_from_wire, layout_to_wire
from kvflow.transfers.executors.base import Endpoint, TransferReport
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


@frozen(eq=False)
class _Prefiller:
    """The engine that requests come from: its layout, its pools, its endpoints by rank."""

    layout: KVLayout
    num_blocks: Mapping[str, int]
    peers: Mapping[int, str]


@define(eq=False)
class _Decoding:
    """One request on this rank. `tokens` are the generated ones, the first came from prefill."""

    admit: Admit
    plan: Plan
    tokens: list[int]
    tables: dict[str, list[int]] = field(factory=dict)
    transfer: "Future[TransferReport] | None" = None
    aborted: bool = False

    @property
    def src_ranks(self) -> list[int]:
        return [src for src, _ in self.plan.links]


@define(eq=False)
class DecodeEngine:
    """Serves one mailbox until it is told to shut down."""

    runner: StepRunner
    num_blocks: Mapping[str, int]
    endpoint: Endpoint
    mailbox: Mailbox
    eos_ids: frozenset[int]
    max_batch: int = 64
    transfer_timeout: float = 60.0
    verify_transfers: bool = False
    pools: dict[str, BlockPool] = field(init=False)
    counters: dict[str, float] = field(init=False)
    _source: _Prefiller | None = field(init=False, default=None)
    _waiting: deque[_Decoding] = field(init=False, factory=deque)
    _pulling: list[_Decoding] = field(init=False, factory=list)
    _running: list[_Decoding] = field(init=False, factory=list)
    _quarantine: list[_Decoding] = field(init=False, factory=list)
    _puller: ThreadPoolExecutor = field(init=False)
    _stopping: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.pools = {name: BlockPool(n) for name, n in self.num_blocks.items()}
        self.counters = dict.fromkeys(
            ("steps", "tokens", "transfers", "transfer_nbytes", "transfer_failures", "refused"), 0.0
        )
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="kvflow-pull")

    def serve(self) -> None:
        """Says it is ready, then works until `Shutdown`."""
        layout = layout_to_wire(self.runner.memory.layout)
        self.mailbox.send(
            Ready(layout, dict(self.num_blocks), self.endpoint.name, self.endpoint.export())
        )
        try:
            while not self._stopping:
                self.turn()
        finally:
            self._puller.shutdown(wait=True)

    def turn(self) -> None:
        """One round: messages, finished transfers, one step of the batch, new transfers. These
        come last, for whatever was freed before may let a waiting request begin; so a request that
        still waits waits for blocks somebody holds, and `_patience` need not look at it."""
        for message in self.mailbox.receive(self._patience()):
            self._handle(message)
        changed = self._end_quarantine()
        changed |= self._finish_transfers()
        if self._running:
            self._step()
            changed = True
        changed |= self._start_transfers()
        if changed:
            self._report()

    def _patience(self) -> float | None:
        if self._running:
            return 0.0
        return 0.001 if self._pulling else 0.05 if self._quarantine else None

    # --- messages

    def _handle(self, message: ToRank) -> None:
        match message:
            case Shutdown():
                self._stopping = True
            case Connect(layout, num_blocks, exports):
                peers = {rank: self.endpoint.connect(blob) for rank, blob in exports.items()}
                self._source = _Prefiller(layout_from_wire(layout), num_blocks, peers)
            case Admit():
                self._admit(message)
            case Abort(request_id):
                self._abort(request_id)
            case RunStep():
                raise KvflowError("a decode rank forms its own steps, it got a RunStep")

    def _admit(self, admit: Admit) -> None:
        try:
            plan = self._derive(admit)
        except KvflowError as error:
            self.counters["refused"] += 1
            self.mailbox.send(TransferEnded(admit.request_id, [], None, str(error)))
            self.mailbox.send(RequestFailed(admit.request_id, str(error)))
            self._report()
            return
        self._waiting.append(_Decoding(admit, plan, [admit.first_token]))

    def _derive(self, admit: Admit) -> Plan:
        """The transfer plan, derived on this side too and compared with the sender's."""
        if self._source is None:
            raise PlanError(f"request {admit.request_id!r} comes from an engine not connected yet")
        plan = plan_transfer(self._source.layout, self.runner.memory.layout, (0, admit.prompt_len))
        if plan.digest != admit.source.digest:
            raise PlanError(
                f"request {admit.request_id!r}: this side derives plan {plan.digest[:16]}, "
                f"the sender {admit.source.digest[:16]}"
            )
        self._check_fits(admit)
        return plan

    def _check_fits(self, admit: Admit) -> None:
        length = admit.prompt_len + admit.sampling.max_tokens
        for name, need in self.runner.memory.layout.num_blocks_for(length).items():
            if need > self.num_blocks[name]:
                raise PlanError(
                    f"{length} tokens need {need} blocks, the decode pool has "
                    f"{self.num_blocks[name]}"
                )

    def _abort(self, request_id: str) -> None:
        """Waiting: never begun, so the source is told at once. Pulling: ends with the transfer.
        Running: freed. Unknown or ended: nothing to do."""
        for work in [*self._waiting, *self._pulling, *self._running]:
            if work.admit.request_id != request_id:
                continue
            work.aborted = True
            if work in self._waiting:
                self._waiting.remove(work)
                self.mailbox.send(TransferEnded(request_id, work.src_ranks, None, None))
            elif work in self._running:
                self._running.remove(work)
                self._free(work.tables)
            self._report()

    # --- transfers

    def _start_transfers(self) -> bool:
        started = False
        while self._waiting and len(self._pulling) + len(self._running) < self.max_batch:
            work = self._waiting[0]
            length = work.admit.prompt_len + work.admit.sampling.max_tokens
            need = self.runner.memory.layout.num_blocks_for(length)
            if any(self.pools[name].num_free < n for name, n in need.items()):
                break
            self._waiting.popleft()
            work.tables = {name: self.pools[name].allocate(n) for name, n in need.items()}
            work.transfer = self._puller.submit(self._pull, work)
            self._pulling.append(work)
            started = True
        return started

    def _pull(self, work: _Decoding) -> TransferReport:
        """On the transfer thread."""
        assert self._source is not None
        source, admit = self._source, work.admit
        bound = BoundPlan(
            work.plan,
            Binding.of(source.layout, admit.source.tables, source.num_blocks, admit.source.length),
            Binding.of(self.runner.memory.layout, work.tables, self.num_blocks, 0),
        )
        return self.endpoint.pull(
            bound,
            self.runner.memory.cache.rank,
            source.peers,
            timeout=self.transfer_timeout,
            verify=self.verify_transfers,
        )

    def _finish_transfers(self) -> bool:
        ended = [w for w in self._pulling if w.transfer is not None and w.transfer.done()]
        for work in ended:
            self._pulling.remove(work)
            self._finish_transfer(work)
        return bool(ended)

    def _finish_transfer(self, work: _Decoding) -> None:
        assert work.transfer is not None
        request_id, error = work.admit.request_id, work.transfer.exception()
        if error is not None:
            self.counters["transfer_failures"] += 1
            for name, ids in work.tables.items():
                self.pools[name].hold(ids, "quarantined")
            self._quarantine.append(work)
            self.mailbox.send(RequestFailed(request_id, f"KV transfer failed: {error}"))
            return
        report = work.transfer.result()
        self.counters["transfers"] += 1
        self.counters["transfer_nbytes"] += report.nbytes
        self.mailbox.send(TransferEnded(request_id, work.src_ranks, attrs.asdict(report), None))
        if work.aborted:
            self._free(work.tables)
        else:
            self._running.append(work)

    def _end_quarantine(self) -> bool:
        """Blocks of failed transfers come back, here and at the source, once nothing of them
        moves any more."""
        if not self._quarantine or not self.endpoint.quiesced():
            return False
        for work in self._quarantine:
            self._free(work.tables)
            ended = TransferEnded(work.admit.request_id, work.src_ranks, None, "transfer failed")
            self.mailbox.send(ended)
        self._quarantine = []
        return True

    # --- the batch

    def _step(self) -> None:
        items = [
            StepItem(
                work.admit.request_id,
                work.admit.prompt_len + len(work.tokens) - 1,
                [work.tokens[-1]],
                None,
                work.tables,
                work.admit.sampling,
            )
            for work in self._running
        ]
        sampled = self.runner.run(items)
        self.counters["steps"] += 1
        for work in list(self._running):
            token = sampled[work.admit.request_id]
            work.tokens.append(token.token)
            self.counters["tokens"] += 1
            reason = finish_reason(token.token, len(work.tokens), work.admit.sampling, self.eos_ids)
            if reason is not None:
                self._running.remove(work)
                self._free(work.tables)
            self.mailbox.send(Generated(work.admit.request_id, token, reason))

    def _free(self, tables: Mapping[str, list[int]]) -> None:
        for name, ids in tables.items():
            self.pools[name].free(ids)

    def _report(self) -> None:
        blocks = {}
        for name, pool in self.pools.items():
            pool.audit()
            blocks[f"free_blocks.{name}"] = float(pool.num_free)
            blocks[f"used_blocks.{name}"] = float(pool.count("used"))
            blocks[f"quarantined_blocks.{name}"] = float(pool.count("quarantined"))
        load = {
            "waiting": float(len(self._waiting)),
            "pulling": float(len(self._pulling)),
            "running": float(len(self._running)),
        }
        self.mailbox.send(Gauges({**load, **blocks}, self.counters))
