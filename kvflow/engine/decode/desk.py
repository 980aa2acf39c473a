"""Desk: the requests of a decode engine, and how the rows of their prompts come in.

Takes what the front says of a request before it runs, decides which parts of its transfers begin,
and tells the front when a source is read no more.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field
from msgspec.structs import replace

from kvflow.engine.decode.incoming import Incoming
from kvflow.engine.decode.kv import DecodeKV
from kvflow.engine.decode.quarantine import Quarantine
from kvflow.engine.decode.requests import Decoding, Phase
from kvflow.engine.decode.turns import TurnDone
from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import (
    Admit,
    AskLoan,
    AskPush,
    Loaned,
    PullRows,
    Pushed,
    Readable,
    RequestFailed,
    Source,
    TransferEnded,
)
from kvflow.engine.moves import Mover
from kvflow.engine.prefill.telling import components_of
from kvflow.errors import KvflowError, PlanError


@define(eq=False)
class Desk:
    """`pulls` derives plans as every rank of the group does; `counters` are the engine's. With
    `asks_push` the engine that computed a prompt writes its rows, on request."""

    kv: DecodeKV
    pulls: Mover
    mailbox: Mailbox
    counters: dict[str, float]
    asks_push: bool = False
    _requests: list[Decoding] = field(init=False, factory=list)
    _quarantine: Quarantine = field(init=False)
    _without: list[tuple[Decoding, str, str]] = field(init=False, factory=list)
    _num_admitted: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._quarantine = Quarantine(self.kv)

    def requests(self, *phases: Phase) -> list[Decoding]:
        """Those in these phases, oldest first."""
        return sorted((r for r in self._requests if r.phase in phases), key=lambda r: r.order)

    def state(self) -> tuple[list[tuple[int, Phase, int]], int]:
        """What a report is worth being sent for."""
        requests = [(r.order, r.phase, r.incoming.arrived) for r in self._requests]
        return requests, len(self._quarantine)

    def load(self) -> dict[str, float]:
        """Requests by phase, and the positions that they hold."""
        phases = {p.value: float(sum(r.phase is p for r in self._requests)) for p in Phase}
        return phases | {"kv_tokens": float(sum(r.computed for r in self._requests))}

    @property
    def is_pulling(self) -> bool:
        """Whether a part of a transfer is under way."""
        return any(r.incoming.missing for r in self._requests)

    @property
    def can_pull(self) -> bool:
        """Whether a part of a transfer can begin."""
        return any(r.incoming.can_go_on for r in self.requests(Phase.PULLING))

    @property
    def is_moving(self) -> bool:
        """Whether anything may still arrive."""
        return self.is_pulling or len(self._quarantine) > 0

    def holds_others(self, work: Decoding) -> bool:
        """Whether somebody holds blocks that come back without being taken, or a loan does."""
        held = any(other.tables for other in self.requests(Phase.PULLING, Phase.RESTORING))
        return held or len(self._quarantine) > 0 or self.kv.is_lending

    def remove(self, work: Decoding) -> None:
        self._requests.remove(work)

    # --- what the front says

    def admit(self, admit: Admit) -> None:
        """Takes a request in, or tells the front why not."""
        sources = [admit.source] if admit.source is not None else []
        try:
            plans = [self.pulls.derive(admit.request_id, source) for source in sources]
            self._check_fits(admit)
        except KvflowError as error:
            self.counters["refused"] += 1
            self.mailbox.send(RequestFailed(admit.request_id, str(error)))  # why, before that
            for source in sources:
                self._not_read(admit.request_id, source.engine, str(error))
            return
        first = [] if admit.first_token is None else [admit.first_token]
        names = self.kv.layout.spec.names
        incoming = Incoming(sources, plans, admit.readable, tuple(names))
        work = Decoding(admit, incoming, self._num_admitted, [*admit.prompt, *first])
        work.may_keep = admit.may_keep
        self._requests.append(work)
        self._num_admitted += 1

    def _check_fits(self, admit: Admit) -> None:
        length = len(admit.prompt) + admit.sampling.max_tokens - 1  # the last token is not stored
        if admit.source is not None and admit.source.stop != len(admit.prompt):
            raise PlanError(
                f"the source holds {admit.source.stop} tokens of a prompt of {len(admit.prompt)}"
            )
        for name, need in self.kv.layout.num_blocks_for(length).items():
            if need > self.kv.num_blocks[name]:
                raise PlanError(
                    f"{length} tokens need {need} blocks, the decode pool {name!r} has "
                    f"{self.kv.num_blocks[name]}"
                )

    def readable(self, message: Readable) -> None:
        """More of a prompt is computed. Requests that have left already are no error."""
        for work in self._requests:
            if work.request_id == message.request_id:
                if message.num_layers is not None:
                    names = components_of(self.kv.layout.spec, message.num_layers)
                    work.incoming.may_begin(message.stop, names)
                    return
                work.incoming.readable = message.stop
                if message.first_token is not None:
                    work.tokens.append(message.first_token)
                    self._run_if_whole(work)

    def lent(self, message: Loaned) -> None:
        """What a lender has of a request's prompt, if anything; a request that has left gives it
        back at once."""
        source = message.source
        for work in self._requests:
            if work.request_id == message.request_id and work.phase is Phase.PULLING:
                work.incoming.is_asking = False
                if source is not None:
                    self._lent(work, source)
                return
        if source is not None:
            self._not_read(message.request_id, source.engine, None)

    def _lent(self, work: Decoding, source: Source) -> None:
        """A loan that cannot be read, or has no more than what is here, is given back: the other
        source has all."""
        if source.stop <= work.computed:
            self._not_read(work.request_id, source.engine, None)
            return
        try:
            plan = self.pulls.derive(work.request_id, source)
        except KvflowError as error:
            self._not_read(work.request_id, source.engine, str(error))
        else:
            work.incoming.lent(source, plan)

    def forget_prefixes(self) -> None:
        """What is here, or on its way here, may be used by its own requests only."""
        for work in self._requests:
            work.may_keep = False
        self.kv.forget_all()

    def abort(self, request_id: str) -> Decoding | None:
        """Nobody listens. A part under way is waited for, since it cannot be recalled. Otherwise
        every source is told at once, and the request is returned: it is to leave."""
        for work in self._requests:
            if work.request_id != request_id:
                continue
            work.aborted = True
            if not work.num_generated:  # perhaps because its rows are worth nothing
                work.may_keep = False
            if not work.incoming.missing:
                self._end_unread(work, None)
                return work
        return None

    # --- transfers

    def begin(self, work: Decoding) -> None:
        """The request has its blocks, and its first `computed` positions lie in them."""
        work.incoming.begin(work.computed)
        self.counters["reused_tokens"] += max(work.computed - work.num_cached, 0)
        work.num_cached = work.computed
        work.phase = Phase.PULLING
        if work.is_local:
            self.counters["local_prefills"] += 1
            work.phase = Phase.RUNNING
        elif work.admit.lender_tokens > work.computed:
            work.incoming.is_asking = True
            self.mailbox.send(AskLoan(work.request_id, work.admit.lender))

    def next_pulls(self, num_ranks: int) -> list[PullRows]:
        """The parts of transfers that can begin now, but for those that an engine pushes: it is
        asked to."""
        pulls = []
        for work in self.requests(Phase.PULLING):
            pushed = self.asks_push and work.incoming.at_last_source
            part = work.incoming.next_part(1 if pushed else num_ranks)
            if part is None:
                continue
            rows = part.start, part.stop, work.tables, list(part.components)
            if pushed:
                self.mailbox.send(AskPush(work.request_id, part.source.engine, *rows))
            else:
                pulls.append(PullRows(work.request_id, part.source, *rows))
        return pulls

    def pushed(self, message: Pushed) -> Decoding | None:
        """A part that was pushed is here, or failed. The request is returned if it is to leave."""
        work = next(w for w in self._requests if w.request_id == message.request_id)
        work.incoming.part_ended(message.report, message.error)
        return work if self._settle(work) else None

    def settle_transfers(self, answers: Sequence[TurnDone]) -> list[Decoding]:
        """What of transfers has ended on the ranks. Returns requests that are to leave."""
        moving = {w.request_id: w for w in self._requests if w.incoming.missing}
        for answer in answers:
            for part in answer.ended:
                moving[part.request_id].incoming.part_ended(part.report, part.error)
        leaving = [w for w in moving.values() if not w.incoming.missing and self._settle(w)]
        if all(answer.quiesced for answer in answers):
            for ended in self._quarantine.quiesced():
                self.mailbox.send(ended)
        return leaving + self._given_up()

    def _settle(self, work: Decoding) -> bool:
        """A part is over on every rank. Whether the request is to leave."""
        incoming = work.incoming
        if incoming.error is not None:
            return self._go_without(work, incoming.error)
        self.counters["transfer_parts"] += 1
        ended = incoming.settle()
        if ended is not None:
            place, report = ended
            self.counters["transfers"] += 1
            self.counters["transfer_nbytes"] += report["nbytes"]
            self.counters["transfer_late_nbytes"] += report["late_nbytes"]
            self._source_ended(work, place, report, None)
        work.computed = incoming.arrived
        if work.aborted:
            self._end_unread(work, None)
        else:
            self._run_if_whole(work)
        return work.aborted

    def _run_if_whole(self, work: Decoding) -> None:
        """The request runs once all its rows and its first token are here. If its rows will not
        come, it is computed from its tokens, as after a preemption."""
        if work.phase is Phase.PULLING and work.incoming.is_whole and work.num_generated:
            if work.tables:
                work.computed, work.phase = len(work.admit.prompt), Phase.RUNNING
                self.kv.publish(work, leaves=False)
            else:
                work.was_computed, work.phase = len(work.admit.prompt), Phase.PREEMPTED

    def _go_without(self, work: Decoding, error: str) -> bool:
        """A part has failed, and may still write: the request goes on in other blocks, without the
        source. Behind a loan all comes from the engine that computes the prompt; if that cannot be
        read, the rows are computed here. Whether the request is to leave."""
        self.counters["transfer_failures"] += 1
        is_loan = not work.incoming.at_last_source
        if work.num_generated:  # else what came before it may be worth nothing
            self.kv.publish(work, leaves=True)
        place = work.incoming.unread()[0]
        ended = self._end_of(work, place, None, f"transfer failed: {error}")
        self._quarantine.take(work, ended, is_loan=is_loan)
        work.incoming = work.incoming.rest()
        work.admit = replace(work.admit, lender_tokens=0)
        if work.aborted:
            self._end_unread(work, None)
            return True
        way = "failed_loans" if is_loan else "recomputed_prompts"
        self._without.append((work, way, f"KV transfer failed: {error}"))
        if is_loan:
            work.phase = Phase.WAITING
        self._run_if_whole(work)
        return False

    def _given_up(self) -> list[Decoding]:
        """Counts those that have just lost their blocks, if they are still here. Who could not be
        held beside what may still be written, nobody knows how long, is to leave."""
        leaving, self._without, without = [], [], self._without
        for work, way, error in (entry for entry in without if not entry[0].aborted):
            if self.kv.can_hold(work.max_len):
                self.counters[way] += 1
                continue
            work.aborted = True
            self.mailbox.send(RequestFailed(work.request_id, error))
            self._end_unread(work, None)
            leaving.append(work)
        return leaving

    def _end_unread(self, work: Decoding, error: str | None) -> None:
        for place in work.incoming.unread():
            self._source_ended(work, place, None, error)

    def _source_ended(
        self, work: Decoding, place: int, report: Mapping[str, Any] | None, error: str | None
    ) -> None:
        self.mailbox.send(self._end_of(work, place, report, error))

    def _end_of(
        self, work: Decoding, place: int, report: Mapping[str, Any] | None, error: str | None
    ) -> TransferEnded:
        source, ranks = work.incoming.sources[place], work.incoming.src_ranks(place)
        told = dict(report) if report is not None else None
        held = work.incoming.num_held
        return TransferEnded(work.request_id, source.engine, ranks, told, error, held)

    def _not_read(self, request_id: str, engine: str, error: str | None) -> None:
        """A source of which nothing was read, and nothing will be."""
        self.mailbox.send(TransferEnded(request_id, engine, [], None, error))
