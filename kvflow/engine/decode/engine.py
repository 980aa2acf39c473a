"""DecodeEngine: the leader of one data-parallel decode group. Takes over prefilled requests, has
their KV pulled and continues them in one continuously formed batch.

Blocks are given out as a request grows. When none are left the youngest running request is
preempted: its blocks go, and it is computed again from its tokens when there is room. Blocks that
a failed transfer may still write stay quarantined until every rank's endpoint has quiesced.
"""

import time
from collections.abc import Sequence

from attrs import define, field

from kvflow.comm import Comm
from kvflow.comm.local import LocalComm
from kvflow.engine.blocks import BlockPool
from kvflow.engine.decode.batch import form_batch
from kvflow.engine.decode.reports import by_rank, joined_report, load_of, pool_gauges
from kvflow.engine.decode.requests import Decoding, Phase
from kvflow.engine.decode.tables import give_back, grow
from kvflow.engine.decode.turns import Crew, Turn, TurnDone
from kvflow.engine.decode.worker import DecodeWorker, Pull
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
    ToRank,
    TransferEnded,
)
from kvflow.engine.sampling import Sampled
from kvflow.errors import KvflowError, PlanError
from kvflow.layouts.wire import layout_to_wire


@define(eq=False)
class DecodeEngine:
    """Serves one mailbox until it is told to shut down. `comm` joins the ranks of the group, whose
    others run `follow`; this is rank 0. `num_drafts` tokens are tried a step where the model has an
    MTP layer."""

    worker: DecodeWorker
    mailbox: Mailbox
    eos_ids: frozenset[int]
    comm: Comm = field(factory=LocalComm)
    max_batch: int = 64
    max_num_batched_tokens: int = 2048
    num_drafts: int = 0
    pools: dict[str, BlockPool] = field(init=False)
    counters: dict[str, float] = field(init=False)
    _requests: list[Decoding] = field(init=False, factory=list)
    _crew: Crew = field(init=False)
    _forget: list[str] = field(init=False, factory=list)
    _group_gauges: dict[str, float] = field(init=False, factory=dict)
    _group_totals: dict[str, float] = field(init=False, factory=dict)
    _num_admitted: int = field(init=False, default=0)
    _stalled: bool = field(init=False, default=False)
    """Whether the last round had nothing to compute: then it listens a little before the next."""
    _stopping: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.pools = {name: BlockPool(n) for name, n in self.worker.num_blocks.items()}
        names = ("steps", "tokens", "transfers", "transfer_nbytes", "transfer_failures", "refused")
        self.counters = dict.fromkeys((*names, "preemptions", "recomputed_tokens"), 0.0)
        self.counters |= {"model_seconds": 0.0, "control_seconds": 0.0}
        self._crew = Crew(self.worker, self.comm)

    def serve(self) -> None:
        """Says it is ready, then works until `Shutdown`."""
        layout, worker = layout_to_wire(self.worker.layout), self.worker
        endpoint = worker.endpoint
        self.mailbox.send(Ready(layout, dict(worker.num_blocks), endpoint.name, endpoint.export()))
        try:
            while not self._stopping:
                self.turn()
            if self.comm.size > 1:
                self._crew.turn(Turn([], [], [], [], stop=True))
        finally:
            worker.close()

    def turn(self) -> None:
        """One round: messages, new transfers, one step of the batch on all ranks, and what came of
        them."""
        messages = self.mailbox.receive(self._patience())
        began, in_model = time.perf_counter(), self.counters["model_seconds"]
        self._round(messages)
        in_model = self.counters["model_seconds"] - in_model
        self.counters["control_seconds"] += time.perf_counter() - began - in_model

    def _round(self, messages: Sequence[ToRank]) -> None:
        for message in messages:
            self._handle(message)
        before = self._state()
        pulls = self._start_transfers()
        self._resume()
        batch = form_batch(self._in(Phase.RUNNING), self.max_num_batched_tokens, self.num_drafts)
        batch = self._with_blocks(batch)
        items = [work.item(count, drafts) for work, count, drafts in batch]
        self._stalled = not items
        turn, self._forget = Turn([], pulls, items, self._forget), []
        if not (pulls or items or turn.forget or self._unsettled()):
            return
        answers = self._crew.turn(turn)
        self._settle_transfers(answers)
        if items:
            self._settle_step(batch, answers)
        self._group_gauges = by_rank([answer.gauges for answer in answers])
        self._group_totals = by_rank([answer.totals for answer in answers])
        if items or turn.forget or self._state() != before:
            self._report()

    def _patience(self) -> float | None:
        """How long to listen: not at all while a batch runs or a request that waits could begin."""
        if self._forget:
            return 0.0
        if self._in(Phase.RUNNING, Phase.PREEMPTED):
            return 0.001 if self._stalled else 0.0
        pulling = self._in(Phase.PULLING)
        return 0.001 if pulling else 0.05 if self._in(Phase.QUARANTINED) else None

    def _in(self, *phases: Phase) -> list[Decoding]:
        """The requests in these phases, oldest first."""
        return sorted((r for r in self._requests if r.phase in phases), key=lambda r: r.order)

    def _unsettled(self) -> bool:
        return bool(self._in(Phase.PULLING, Phase.QUARANTINED))

    def _state(self) -> list[tuple[int, Phase]]:
        return [(r.order, r.phase) for r in self._requests]

    # --- messages

    def _handle(self, message: ToRank) -> None:
        match message:
            case Shutdown():
                self._stopping = True
            case Connect():
                self._settle_transfers(self._crew.turn(Turn([message], [], [], [])))
            case Admit():
                self._admit(message)
            case Abort(request_id):
                self._abort(request_id)
            case RunStep():
                raise KvflowError("a decode rank forms its own steps, it got a RunStep")
            case _:
                raise KvflowError(f"a decode rank got a {type(message).__name__}")

    def _admit(self, admit: Admit) -> None:
        try:
            plan = self.worker.derive(admit.request_id, admit.source)
            self._check_fits(admit)
        except KvflowError as error:
            self.counters["refused"] += 1
            self.mailbox.send(TransferEnded(admit.request_id, [], None, str(error)))
            self.mailbox.send(RequestFailed(admit.request_id, str(error)))
            self._report()
            return
        tokens = [*admit.prompt, admit.first_token]
        self._requests.append(Decoding(admit, plan, self._num_admitted, tokens))
        self._num_admitted += 1

    def _check_fits(self, admit: Admit) -> None:
        length = len(admit.prompt) + admit.sampling.max_tokens - 1  # the last token is not stored
        if admit.source.length != len(admit.prompt):
            raise PlanError(
                f"the source holds {admit.source.length} tokens of a prompt of {len(admit.prompt)}"
            )
        for name, need in self.worker.layout.num_blocks_for(length).items():
            if need > self.pools[name].num_blocks:
                raise PlanError(
                    f"{length} tokens need {need} blocks, the decode pool {name!r} has "
                    f"{self.pools[name].num_blocks}"
                )

    def _abort(self, request_id: str) -> None:
        """Waiting: never begun, so the source is told at once. Pulling: ends with the transfer.
        Running or preempted: freed. Unknown or ended: nothing to do."""
        for work in self._requests:
            if work.request_id != request_id or work.phase is Phase.QUARANTINED:
                continue
            work.aborted = True
            if work.phase is Phase.WAITING:
                self.mailbox.send(TransferEnded(request_id, work.src_ranks, None, None))
            if work.phase is not Phase.PULLING:
                self._leave(work)
            self._report()
            return

    def _leave(self, work: Decoding) -> None:
        self._requests.remove(work)
        give_back(work, self.pools)
        self._forget.append(work.request_id)

    # --- blocks

    def _grow(self, work: Decoding, length: int) -> bool:
        return grow(work, self.pools, self.worker.layout, length)

    def _start_transfers(self) -> list[Pull]:
        """Admits waiting requests, oldest first, while there is room for what they hold and one
        step more."""
        pulls: list[Pull] = []
        busy = len(self._in(Phase.PULLING, Phase.RUNNING, Phase.PREEMPTED))
        for work in self._in(Phase.WAITING):
            if busy >= self.max_batch or self._in(Phase.PREEMPTED):
                break
            if not self._grow(work, min(len(work.tokens) + self.num_drafts, work.max_len)):
                break
            work.phase, work.missing = Phase.PULLING, self.comm.size
            pulls.append(Pull(work.request_id, work.admit.source, work.tables))
            busy += 1
        return pulls

    def _resume(self) -> None:
        """Preempted requests come back, oldest first, when there is room for all their tokens."""
        for work in self._in(Phase.PREEMPTED):
            if not self._grow(work, min(len(work.tokens) + self.num_drafts, work.max_len)):
                return
            work.phase = Phase.RUNNING

    def _with_blocks(
        self, batch: Sequence[tuple[Decoding, int, int]]
    ) -> list[tuple[Decoding, int, int]]:
        """The batch, every request with blocks for what it computes; younger requests are preempted
        for older ones. Alone, a request always fits: that was checked when it came."""
        kept = list(batch)
        for work, count, drafts in batch:
            while work.phase is Phase.RUNNING:
                if self._grow(work, work.computed + count + drafts):
                    break
                youngest = self._in(Phase.RUNNING)[-1]
                if youngest is work and self._unsettled():
                    kept.remove((work, count, drafts))  # transfers hold the rest: it waits for them
                    break
                self._preempt(youngest)
        return [entry for entry in kept if entry[0].phase is Phase.RUNNING]

    def _preempt(self, work: Decoding) -> None:
        give_back(work, self.pools)
        self._forget.append(work.request_id)
        self.counters["preemptions"] += 1
        self.counters["recomputed_tokens"] += work.computed
        work.computed, work.phase = 0, Phase.PREEMPTED

    # --- what came of a turn

    def _settle_transfers(self, answers: Sequence[TurnDone]) -> None:
        by_id = {work.request_id: work for work in self._in(Phase.PULLING)}
        for answer in answers:
            for part in answer.ended:
                work = by_id[part.request_id]
                work.missing -= 1
                if part.report is not None:
                    work.reports.append(part.report)
                work.error = work.error or part.error
        for work in by_id.values():
            if work.missing == 0:
                self._finish_transfer(work)
        if all(answer.quiesced for answer in answers):
            self._end_quarantine()

    def _finish_transfer(self, work: Decoding) -> None:
        if work.error is not None:
            self.counters["transfer_failures"] += 1
            work.phase = Phase.QUARANTINED
            for name, ids in work.tables.items():
                self.pools[name].hold(ids, "quarantined")
            self.mailbox.send(RequestFailed(work.request_id, f"KV transfer failed: {work.error}"))
            return
        report = joined_report(work.reports)
        self.counters["transfers"] += 1
        self.counters["transfer_nbytes"] += report["nbytes"]
        self.mailbox.send(TransferEnded(work.request_id, work.src_ranks, report, None))
        work.computed, work.phase = len(work.admit.prompt), Phase.RUNNING
        if work.aborted:
            self._leave(work)

    def _end_quarantine(self) -> None:
        """Blocks of failed transfers come back, here and at the source, once nothing of them
        moves any more."""
        for work in self._in(Phase.QUARANTINED):
            self._leave(work)
            ended = TransferEnded(work.request_id, work.src_ranks, None, "transfer failed")
            self.mailbox.send(ended)

    def _settle_step(
        self, batch: Sequence[tuple[Decoding, int, int]], answers: Sequence[TurnDone]
    ) -> None:
        self.counters["steps"] += 1
        self.counters["model_seconds"] += max(answer.seconds for answer in answers)
        sampled = {k: s for answer in answers for k, s in answer.sampled.items()}
        for work, count, _ in batch:
            tokens = sampled.get(work.request_id, [])
            work.computed += count + max(len(tokens) - 1, 0)
            self._emit(work, tokens)

    def _emit(self, work: Decoding, tokens: Sequence[Sampled]) -> None:
        """Tokens go out one by one; those behind the request's last one are dropped."""
        for token in tokens:
            work.tokens.append(token.token)
            self.counters["tokens"] += 1
            sampling = work.admit.sampling
            reason = finish_reason(token.token, work.num_generated, sampling, self.eos_ids)
            self.mailbox.send(Generated(work.request_id, token, reason))
            if reason is not None:
                self._leave(work)
                return

    def _report(self) -> None:
        gauges = load_of(self._requests) | pool_gauges(self.pools) | self._group_gauges
        self.mailbox.send(Gauges(gauges, self.counters | self._group_totals))
