"""DecodeEngine: the leader of one data-parallel decode group. Takes over requests, has their KV
pulled, or computes it, and continues them in one continuously formed batch.

Blocks are given out as a request grows. When none are left the youngest running request is
preempted: its blocks go, and it is computed again from its tokens when there is room. Blocks that
a failed transfer may still write stay quarantined until every rank's endpoint has quiesced.
"""

import time
from collections.abc import Sequence

import msgspec
from attrs import define, field

from kvflow.comm import Comm
from kvflow.comm.local import LocalComm
from kvflow.engine.decode.batch import Share, form_batch
from kvflow.engine.decode.desk import Desk
from kvflow.engine.decode.kv import DecodeKV
from kvflow.engine.decode.requests import Decoding, Phase
from kvflow.engine.decode.restoring import Restoring
from kvflow.engine.decode.turns import Crew, Turn, TurnDone, gather_exports
from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.finish import finish_reason
from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import (
    Abort,
    Admit,
    AttachTier,
    Connect,
    Connected,
    EndLoan,
    ForgetPrefixes,
    Gauges,
    Generated,
    KVChanged,
    Lend,
    Lent,
    Loaned,
    PullRows,
    Pushed,
    Readable,
    Ready,
    RequestFailed,
    Shutdown,
    ToRank,
    Units,
)
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.engine.reports import by_rank, pool_gauges
from kvflow.engine.sampling import Sampled
from kvflow.errors import KvflowError
from kvflow.layouts.wire import layout_to_wire


@define(eq=False)
class DecodeEngine:
    """Serves one mailbox until it is told to shut down. `comm` joins the ranks of the group, whose
    others run `follow`; this is rank 0. `num_drafts` tokens are tried a step where the model has an
    MTP layer. `prefix` says whether prefixes are kept, and in blocks of what size they are
    known. With `push` prompts' rows are written by the engine that computed them."""

    worker: DecodeWorker
    mailbox: Mailbox
    eos_ids: frozenset[int]
    comm: Comm = field(factory=LocalComm)
    max_batch: int = 64
    max_num_batched_tokens: int = 2048
    num_drafts: int = 0
    prefix: PrefixConfig = field(factory=lambda: PrefixConfig(enabled=False))
    push: bool = False
    kv: DecodeKV = field(init=False)
    counters: dict[str, float] = field(init=False)
    _desk: Desk = field(init=False)
    _restoring: Restoring = field(init=False)
    _crew: Crew = field(init=False)
    _retire: list[str] = field(init=False, factory=list)
    _group_gauges: dict[str, float] = field(init=False, factory=dict)
    _group_totals: dict[str, float] = field(init=False, factory=dict)
    _stalled: bool = field(init=False, default=False)
    """Whether the last round had nothing to compute: then it listens a little before the next."""
    _stopping: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.kv = DecodeKV(self.worker.layout, self.worker.num_blocks, self.prefix)
        names = ("steps", "tokens", "transfers", "transfer_nbytes", "transfer_failures", "refused")
        self.counters = dict.fromkeys((*names, "preemptions", "recomputed_tokens"), 0.0)
        self.counters |= {"transfer_parts": 0.0, "transfer_late_nbytes": 0.0}
        self.counters |= {"reused_tokens": 0.0, "local_prefills": 0.0}
        self.counters |= {"failed_loans": 0.0, "recomputed_prompts": 0.0}
        self.counters |= {"model_seconds": 0.0, "control_seconds": 0.0}
        self._crew = Crew(self.worker, self.comm)
        self._desk = Desk(self.kv, self.worker.pulls, self.mailbox, self.counters, self.push)
        self._restoring = Restoring(self.kv, self.mailbox, self.counters)

    @property
    def pools(self) -> dict[str, SharedBlockPool]:
        return self.kv.pools

    def serve(self) -> None:
        """Says it is ready, then works until `Shutdown`."""
        layout, worker = layout_to_wire(self.worker.layout), self.worker
        try:
            exports = gather_exports(worker, self.comm)
            self.mailbox.send(Ready(layout, dict(worker.num_blocks), worker.endpoint.name, exports))
            while not self._stopping:
                self.turn()
            if self.comm.size > 1:
                self._crew.turn(Turn(stop=True))
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
        before, told = self._desk.state(), bool(messages or self._retire)
        for message in messages:
            self._handle(message)
        pulls = self._start_transfers()
        self._resume()
        running = self._desk.requests(Phase.RUNNING)
        batch = form_batch(running, self.max_num_batched_tokens, self.num_drafts)
        batch = self._with_blocks(batch)
        self._stalled = not batch
        restores = self._restoring.next(self.comm.size)
        moving = pulls or self._restoring.is_reading or self._desk.is_moving
        if moving or batch or self._retire:
            items = [work.item(count, drafts) for work, count, drafts in batch]
            answers = self._take_turn(Turn(pulls=pulls, restores=restores, items=items))
            if batch:
                self._settle_step(batch, answers)
        if batch or told or self._desk.state() != before:
            self._report()

    def _take_turn(self, turn: Turn) -> list[TurnDone]:
        """A turn of all ranks, in which those that have left are retired first."""
        retire, self._retire = self._retire, []
        answers = self._crew.turn(msgspec.structs.replace(turn, retire=retire))
        self._group_gauges = by_rank([answer.gauges for answer in answers])
        self._group_totals = by_rank([answer.totals for answer in answers])
        for work in self._desk.settle_transfers(answers):
            self._leave(work)
        for request_id in self._restoring.settle([answer.restored for answer in answers]):
            self._leave_if(self._desk.abort(request_id))
        return answers

    def _patience(self) -> float | None:
        """How long to listen: not at all while a batch runs or a request that waits could begin."""
        if self._retire or self._desk.can_pull or self._restoring.can_begin:
            return 0.0
        if self._desk.requests(Phase.RUNNING, Phase.PREEMPTED):
            return 0.001 if self._stalled else 0.0
        if self._desk.is_pulling or self._restoring.is_reading:
            return 0.001
        waiting = self._desk.requests(Phase.WAITING)  # blocks may have come back without a word
        return 0.05 if self._desk.is_moving or waiting else None

    # --- messages

    def _handle(self, message: ToRank) -> None:
        match message:
            case Shutdown():
                self._stopping = True
            case Connect():
                self._take_turn(Turn(connect=[message]))
                self.mailbox.send(Connected(message.engine))
            case AttachTier():
                self._take_turn(Turn(attach=[message]))
                self._restoring.has_tiers = self.worker.restores.has_tiers
            case Units():
                self._restoring.answered(message)
            case Admit():
                self._desk.admit(message)
            case Readable():
                self._desk.readable(message)
            case Abort(request_id):
                if not self._restoring.abort(request_id):
                    self._leave_if(self._desk.abort(request_id))
            case Pushed():
                self._leave_if(self._desk.pushed(message))
            case Loaned():
                self._desk.lent(message)
            case ForgetPrefixes():
                self._desk.forget_prefixes()
            case Lend(loan_id, prompt, salt):
                self._lend(loan_id, prompt, salt)
            case EndLoan(loan_id):
                self.kv.end_loan(loan_id)
            case _:
                raise KvflowError(
                    f"a decode rank forms its own steps, it got a {type(message).__name__}"
                )

    def _lend(self, loan_id: str, prompt: Sequence[int], salt: str | None) -> None:
        """Rows of requests that have left reach their pages before anybody reads them."""
        if self._retire:
            self._take_turn(Turn())
        self.mailbox.send(Lent(loan_id, *self.kv.lend(loan_id, prompt, salt)))

    def _leave_if(self, work: Decoding | None) -> None:
        if work is not None:
            self._leave(work)

    def _leave(self, work: Decoding) -> None:
        """What it computed stays known; its blocks are others' once the ranks have retired it."""
        self._desk.remove(work)
        self._retired(work)

    def _retired(self, work: Decoding) -> None:
        self.kv.publish(work, leaves=True)
        self.kv.give_back(work)
        self._retire.append(work.request_id)

    # --- blocks

    def _wanted(self, work: Decoding) -> int:
        """Positions for what a request holds and one step more."""
        return min(len(work.tokens) + self.num_drafts, work.max_len)

    def _start_transfers(self) -> list[PullRows]:
        """Admits waiting requests, oldest first, while there is room for what they hold and one
        step more; then the next part of every transfer that can go on."""
        inside = Phase.PULLING, Phase.RESTORING, Phase.RUNNING, Phase.PREEMPTED
        busy = len(self._desk.requests(*inside))
        for work in self._desk.requests(Phase.WAITING):
            if busy >= self.max_batch or self._desk.requests(Phase.PREEMPTED):
                break
            if not self.kv.begin(work, self._wanted(work)):
                break
            self._desk.begin(work)
            if work.phase is Phase.RUNNING:
                self._restoring.begin(work)
            busy += 1
        if self.push and self._retire:  # rows of who has left reach their pages before others'
            self._take_turn(Turn())
        return self._desk.next_pulls(self.comm.size)

    def _resume(self) -> None:
        """Preempted requests come back, oldest first, when there is room for all their tokens."""
        for work in self._desk.requests(Phase.PREEMPTED):
            if not self.kv.begin(work, self._wanted(work)):
                return
            self._restoring.begin(work)

    def _with_blocks(self, batch: Sequence[Share]) -> list[Share]:
        """The batch, every request with blocks for what it computes; younger requests are preempted
        for older ones. Alone, a request always fits: that was checked when it came."""
        kept = list(batch)
        for work, count, drafts in batch:
            while work.phase is Phase.RUNNING:
                if self.kv.grow(work, work.computed + count + drafts):
                    break
                youngest = self._desk.requests(Phase.RUNNING)[-1]
                if youngest is work and self._desk.holds_others(work):
                    kept.remove((work, count, drafts))  # it waits for what they hold
                    break
                self._preempt(youngest)
        return [entry for entry in kept if entry[0].phase is Phase.RUNNING]

    def _preempt(self, work: Decoding) -> None:
        self._retired(work)
        self.counters["preemptions"] += 1
        work.was_computed, work.computed, work.phase = work.computed, 0, Phase.PREEMPTED

    # --- what came of a step

    def _settle_step(self, batch: Sequence[Share], answers: Sequence[TurnDone]) -> None:
        self.counters["steps"] += 1
        self.counters["model_seconds"] += max(answer.seconds for answer in answers)
        sampled = {k: s for answer in answers for k, s in answer.sampled.items()}
        failed = {k: why for answer in answers for k, why in answer.failed.items()}
        for work, count, _ in batch:
            tokens = sampled.get(work.request_id, [])
            work.computed += count + max(len(tokens) - 1, 0)
            self._emit(work, tokens, failed.get(work.request_id))

    def _emit(self, work: Decoding, tokens: Sequence[Sampled], failed: str | None) -> None:
        """Tokens go out one by one; those behind the request's last one are dropped, and so is
        why none could follow. A request that has failed leaves nothing that is known."""
        for token in tokens:
            work.tokens.append(token.token)
            self.counters["tokens"] += 1
            sampling = work.admit.sampling
            reason = finish_reason(token.token, work.num_generated, sampling, self.eos_ids)
            cached = work.num_cached if work.is_local and work.num_generated == 1 else 0
            if reason is not None:  # whoever asks next finds what is left of this one
                self._leave(work)
                self._tell_changes()
            self.mailbox.send(Generated(work.request_id, token, reason, cached))
            if reason is not None:
                return
        if failed is not None:
            spoilt = work.tokens if work.has_restored or not work.num_generated else []
            salt = work.admit.salt
            self.mailbox.send(RequestFailed(work.request_id, failed, list(spoilt), salt))
            self.kv.forget(work)
            self._leave(work)

    def _tell_changes(self) -> None:
        if (changes := self.kv.changes()) is not None:
            self.mailbox.send(KVChanged(changes))

    def _report(self) -> None:
        gauges = self._desk.load() | pool_gauges(self.pools) | self._group_gauges
        self._tell_changes()
        self.mailbox.send(Gauges(gauges, self.counters | self._group_totals))
