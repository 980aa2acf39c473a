"""Journeys: requests on their way through the engines of a deployment.

A request is routed, prefilled and handed over, which may begin while it is prefilled; its decode
engine then generates. An end from outside is told to the engines, each of which frees what nobody
writes or reads any more.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import partial

from attrs import define, field

from kvflow.engine.api import Overloaded, Request, TokenOutput, Unavailable
from kvflow.engine.finish import finish_reason
from kvflow.engine.front.lenders import Lenders, loan_id
from kvflow.engine.front.live import Live, output
from kvflow.engine.front.pushing import Pushing
from kvflow.engine.front.routing import Routing
from kvflow.engine.mailbox import Hub
from kvflow.engine.messages import (
    Abort,
    Admit,
    AskLoan,
    AskPush,
    Generated,
    Loaned,
    Readable,
    RequestFailed,
    RowsPushed,
    Source,
    TransferEnded,
)
from kvflow.engine.prefill import PrefillEngine
from kvflow.engine.sampling import Sampled
from kvflow.errors import KvflowError

_log = logging.getLogger(__name__)


@define(eq=False)
class Journeys:
    """`prefills` are the prefill engines by name. `streaming`: decode engines read a prompt's rows
    while it is computed. `failure`: why nothing goes on any more."""

    hub: Hub
    prefills: Mapping[str, PrefillEngine]
    routing: Routing
    lenders: Lenders
    eos_ids: frozenset[int]
    streaming: bool
    max_waiting: int = 256
    failure: str | None = None
    live: dict[str, Live] = field(init=False, factory=dict)
    _asking: "set[asyncio.Task[None]]" = field(init=False, factory=set)
    _pushes: dict[str, Pushing] = field(init=False, factory=dict)

    # --- what ranks say

    def transfer_ended(self, reader: str, message: TransferEnded) -> None:
        """A decode engine reads a source no more: the prompt's blocks, or a sibling's. The request
        may have gone."""
        if message.error is not None:
            ends = f"{message.request_id!r}, {message.engine} to {reader}"
            _log.warning("rows of request %s: %s", ends, message.error)
        live = self.live.get(message.request_id)
        engine = self.prefills.get(message.engine)
        if engine is None:
            self.lenders.end(loan_id(message.request_id, reader))
            return
        if live is not None and message.report is not None:
            live.report = message.report | {"engine": message.engine, "num_held": message.num_held}
            self.routing.prefilled(message.request_id)
        if message.src_ranks:
            engine.acknowledge(message.request_id, message.src_ranks)
        else:
            engine.never_read(message.request_id)
        self.routing.prefill_changed(engine)

    def decoded_event(self, request_id: str, message: Generated | RequestFailed) -> None:
        if (live := self.live.get(request_id)) is not None:
            if isinstance(message, RequestFailed):
                live.error = live.error or message.error
            elif not live.has_begun:
                live.has_begun = True
                self.routing.prefilled(request_id)
            live.events.put_nowait(message)

    def lend(self, reader: str, ask: AskLoan) -> None:
        """A decode engine has blocks for a request, and wants what another holds of its prompt."""
        asking = asyncio.get_running_loop().create_task(self._lend(reader, ask))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _lend(self, reader: str, ask: AskLoan) -> None:
        live, source = self.live.get(ask.request_id), None
        with suppress(KvflowError):  # then the deployment fails, and says why
            if live is not None:
                loan = await self.lenders.borrow(live.work, ask.lender, reader)
                source = loan.source if loan is not None else None
            self.hub.send(reader, Loaned(ask.request_id, source))

    def forget_prefixes(self) -> None:
        """What is computed for the requests under way becomes nobody else's prefix."""
        for live in self.live.values():
            live.may_keep = False

    def push(self, reader: str, ask: AskPush) -> None:
        """A decode engine wants rows written into its blocks."""
        engine = self.prefills[ask.engine]
        self._pushes[ask.request_id] = Pushing(reader, engine.num_ranks)
        engine.push(ask.request_id, ask, reader)

    def rows_pushed(self, message: RowsPushed) -> None:
        """One rank's part of a push is over; with the last one the reader is told."""
        pushing = self._pushes[message.request_id]
        if (whole := pushing.take(message)) is not None:
            del self._pushes[message.request_id]
            self.hub.send(pushing.reader, whole)

    def fail(self, why: str) -> None:
        """A rank is lost: every request ends with an error."""
        self.failure = self.failure or why
        for engine in self.prefills.values():
            engine.fail(Unavailable(why))
        self.lenders.fail(Unavailable(why))
        for request_id in self.live:
            self.decoded_event(request_id, RequestFailed(request_id, why))

    # --- one request

    async def outputs(self, work: Request, name: str) -> AsyncGenerator[TokenOutput, None]:
        """The request's tokens under its client's name. Inside the engines it bears an id that none
        had before: an end of its namesake may still be on its way."""
        live = self.live[work.request_id] = Live(work, self.routing.route(work))
        if live.route.prefill is None:
            self._check_queue(live.route.decode)
            self._admit(live, None, len(work.prompt))
        else:
            engine = self.prefills[live.route.prefill]
            first = await self._prefilled(engine, work, live)
            cached = engine.cached_tokens(work.request_id)
            reason = finish_reason(first.token, 1, work.sampling, self.eos_ids)
            if reason is None:
                self._hand_over(engine, work, live, first)
            yield output(name, first, reason, cached_tokens=cached)
            if reason is not None:
                return
        async with aclosing(self._decoded(name, live)) as outputs:
            async for one in outputs:
                yield one

    async def _prefilled(self, engine: PrefillEngine, work: Request, live: Live) -> Sampled:
        """The first token. What can be borrowed of the prompt is."""
        engine.check(work)
        borrow, loan = None, live.route.prefill_loan
        if loan is not None:
            borrow = partial(self.lenders.borrow, work, loan.lender, engine.name)
        readable = partial(self._readable, engine, work, live)
        try:
            first = await engine.prefill(work, borrow, *([readable] if self.streaming else []))
        except KvflowError as error:
            if live.error is not None and self.failure is None:
                raise KvflowError(live.error) from error
            raise
        if self.failure is not None:  # between the step's end and this line
            raise Unavailable(self.failure)
        return first

    def _readable(
        self, engine: PrefillEngine, work: Request, live: Live, stop: int, num_layers: int | None
    ) -> None:
        """Rows of a prompt that is not computed yet can be read."""
        if not live.is_admitted:
            self._admit(live, engine.source(work.request_id), 0)
        told = Readable(work.request_id, stop, num_layers=num_layers)
        self.hub.send(live.route.decode, told)

    def _hand_over(self, engine: PrefillEngine, work: Request, live: Live, first: Sampled) -> None:
        length = len(work.prompt)
        if live.is_admitted:
            self.hub.send(live.route.decode, Readable(work.request_id, length, first.token))
        else:
            source = engine.source(work.request_id)
            self._admit(live, source, length, first.token)

    def _check_queue(self, decode: str) -> None:
        """Raises `Overloaded` if too many prompts wait to be computed by a decode engine."""
        mine = [w for w in self.live.values() if w.route.decode == decode and not w.has_begun]
        waiting = sum(w.route.prefill is None for w in mine) - 1
        if waiting >= self.max_waiting:
            raise Overloaded(f"{waiting} requests wait, the limit is {self.max_waiting}")

    def _admit(
        self, live: Live, source: Source | None, readable: int, first: int | None = None
    ) -> None:
        work, loan = live.work, live.route.decode_loan
        live.is_admitted = True
        self.hub.send(
            live.route.decode,
            Admit(
                work.request_id,
                list(work.prompt),
                first,
                work.sampling,
                source,
                readable,
                work.cache_salt,
                loan.lender if loan is not None else "",
                loan.num_tokens if loan is not None else 0,
                live.may_keep,
            ),
        )

    async def _decoded(self, name: str, live: Live) -> AsyncGenerator[TokenOutput, None]:
        reason, reported = None, False
        while reason is None:
            event = await live.events.get()
            if isinstance(event, RequestFailed):
                raise (KvflowError if self.failure is None else Unavailable)(event.error)
            reason = event.finish_reason
            transfer = None if reported else live.report
            reported = reported or transfer is not None
            yield output(name, event.sampled, reason, transfer, event.cached_tokens)

    def end(self, request_id: str) -> None:
        """The request is over for its client: engines that still do something for it are told;
        those that have ended it ignore that."""
        self.routing.ended(request_id)
        live = self.live.pop(request_id, None)
        if live is None:
            return
        if live.is_admitted and self.failure is None:
            self.hub.send(live.route.decode, Abort(request_id))
        if live.route.prefill is not None:
            self.prefills[live.route.prefill].release(request_id)
