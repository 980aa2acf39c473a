"""Deployment: the front of prefill and decode engines, as one `EngineClient`.

Brings the engines together, hears what their ranks say, and gives each client its request's
tokens.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from attrs import define, evolve, field

from kvflow.engine.api import InvalidRequest, Metric, Request, TokenOutput, Unavailable
from kvflow.engine.front.journeys import Journeys
from kvflow.engine.front.lenders import Lenders
from kvflow.engine.front.options import FrontOptions
from kvflow.engine.front.roster import Roster
from kvflow.engine.front.routing import Routing
from kvflow.engine.front.units import TierLender
from kvflow.engine.mailbox import Hub
from kvflow.engine.messages import (
    AskLoan,
    AskPush,
    AskUnits,
    ForgetPrefixes,
    FromRank,
    Gauges,
    Generated,
    KVChanged,
    LayersDone,
    Lent,
    RankFailed,
    Ready,
    RequestFailed,
    RowsPulled,
    RowsPushed,
    Shutdown,
    StepDone,
    ToRank,
    TransferEnded,
    UnitsRead,
)
from kvflow.engine.prefill import PrefillEngine
from kvflow.engine.prefill.metrics import engine_metrics
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.tiers.manager import Tiers
from kvflow.engine.tiers.unitfile import FileMover
from kvflow.errors import KvflowError
from kvflow.router.log import KVEventLog


@define(eq=False)
class Deployment:
    """`prefill_ranks` are the ranks of each prefill engine in rank order, by engine. Call `start`
    once, `close` at the end."""

    hub: Hub
    prefill_ranks: Mapping[str, Sequence[str]]
    decode_ranks: Sequence[str]
    eos_ids: frozenset[int]
    model_name: str
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int = 2048
    prefix: PrefixConfig = field(factory=PrefixConfig)
    files: FileMover | None = None
    options: FrontOptions = field(factory=FrontOptions)
    prefills: dict[str, PrefillEngine] = field(init=False, factory=dict)
    routing: Routing = field(init=False)
    journeys: Journeys = field(init=False)
    gauges: dict[str, Mapping[str, float]] = field(init=False, factory=dict)
    counters: dict[str, Mapping[str, float]] = field(init=False, factory=dict)
    failure: str | None = field(init=False, default=None)
    num_requests: dict[str, int] = field(init=False)
    _roster: Roster = field(init=False)
    _lenders: Lenders = field(init=False)
    _tier_lender: TierLender | None = field(init=False, default=None)
    _engine_of: dict[str, str] = field(init=False)
    _ids: set[str] = field(init=False, factory=set)
    _num_begun: int = field(init=False, default=0)
    _reader: "asyncio.Task[None] | None" = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.num_requests = dict.fromkeys(("finished", "aborted", "failed"), 0)
        self._roster = Roster(self.hub, self.prefill_ranks, self.decode_ranks)
        ranks = {e: self._roster.ranks_of(e) for e in self._roster.engines}
        self._engine_of = {rank: engine for engine, names in ranks.items() for rank in names}

    @property
    def prefill(self) -> PrefillEngine:
        """The first prefill engine."""
        return next(iter(self.prefills.values()))

    # --- life

    async def start(self, timeout: float = 60.0) -> None:
        """Waits until every rank is ready and the engines are connected. Raises `KvflowError` if a
        rank fails, is late, or ranks of one engine disagree."""
        roster = self._roster
        await roster.gather(timeout)
        layouts = {engine: roster.layout(engine) for engine in roster.engines}
        target = layouts[self.decode_ranks[0]]
        for name, ranks in self.prefill_ranks.items():
            tiers = Tiers.create(self.prefix, layouts[name], self.files)
            self.prefills[name] = PrefillEngine(
                layouts[name],
                len(ranks),
                roster.num_blocks(name),
                target,
                partial(self._send_all, ranks),
                self.max_num_batched_tokens,
                prefix=self.prefix,
                tiers=tiers,
                name=name,
            )
        self._lenders = Lenders(self.hub, layouts)
        self.routing = Routing.of(self.options, self.prefills, self.decode_ranks)
        self._attach_tiers()
        self.journeys = Journeys(
            self.hub,
            self.prefills,
            self.routing,
            self._lenders,
            self.eos_ids,
            self.options.streaming,
        )
        await roster.connect(self._readers(), timeout, self._handle)
        self._reader = asyncio.create_task(self._read())

    def _attach_tiers(self) -> None:
        """Every rank of a prefill engine maps its tier, and decode engines on this host all of
        them; these hear of it through their leaders."""
        tiers = {name: e.tiers for name, e in self.prefills.items() if e.tiers is not None}
        for name, one in tiers.items():
            self._send_all(self.prefill_ranks[name], one.attachment)
            one.watch(partial(self.routing.prefill_changed, self.prefills[name]))
            self.routing.prefill_changed(self.prefills[name])  # what files hold already
        near = [name for name in self.decode_ranks if self.options.is_near(name)]
        for one in tiers.values():
            self._send_all(near, one.attachment)
        if tiers:
            self._tier_lender = TierLender(self.hub, self.prefill.kv.hasher, (*tiers.values(),))

    def _readers(self) -> list[tuple[str, str]]:
        """Which engine may ever reach which: decode engines every prefill engine, all engines every
        decode engine that lends, prefill engines those that they push to."""
        found = [(d, p) for d in self.decode_ranks for p in self.prefills]
        if self.options.loans and self.prefix.enabled:
            everyone = self._roster.engines
            found += [(e, d) for e in everyone for d in self.decode_ranks if e != d]
        elif self.options.push:
            found += [(p, d) for p in self.prefills for d in self.decode_ranks]
        return found

    async def close(self) -> None:
        """Ends what still runs with an error, tells every rank to shut down and stops listening.
        The ranks' owner joins them."""
        self.fail("the engine is closed")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for name in self._roster.ranks:
            try:
                self.hub.send(name, Shutdown())
            except KvflowError:
                continue  # it is gone already
        if self._tier_lender is not None:
            await self._tier_lender.close()
        for engine in self.prefills.values():
            await engine.close()

    def _send_all(self, ranks: Sequence[str], message: ToRank) -> None:
        for name in ranks:
            self.hub.send(name, message)

    # --- messages of the ranks

    async def _read(self) -> None:
        while True:
            try:
                name, message = await self.hub.receive()
                self._handle(name, message)
            except Exception as error:  # nobody may wait for a front that does not read
                self.fail(f"{type(error).__name__}: {error}")
                return

    def _handle(self, name: str, message: FromRank) -> None:
        match message:
            case StepDone():
                engine = self.prefills[self._engine_of[name]]
                engine.on_step_done(message)
                self.routing.prefill_changed(engine)
            case LayersDone():
                self.prefills[self._engine_of[name]].on_layers_done(message)
            case RowsPulled():
                self.prefills[self._engine_of[name]].on_rows_pulled(message)
            case TransferEnded():
                self.journeys.transfer_ended(name, message)
            case Generated(request_id):
                self.journeys.decoded_event(request_id, message)
            case RequestFailed():
                self._decode_failed(message)
            case AskLoan():
                self.journeys.lend(name, message)
            case AskUnits() if self._tier_lender is not None:
                self._tier_lender.ask(name, message)
            case UnitsRead() if self._tier_lender is not None:
                self._tier_lender.read(message)
            case AskPush():
                self.journeys.push(name, message)
            case RowsPushed():
                self.journeys.rows_pushed(message)
            case Lent():
                self._lenders.on_lent(message)
            case KVChanged(events):
                self.routing.on_events(name, events)
            case Gauges(values, counters):
                self.gauges[name], self.counters[name] = values, counters
                self.routing.decode_changed(name, values)
            case RankFailed(error):
                self.fail(f"rank {name!r} failed: {error}")
            case Ready():
                raise KvflowError(f"rank {name!r} is ready a second time")

    def _decode_failed(self, message: RequestFailed) -> None:
        if message.spoilt and self._tier_lender is not None:
            self._tier_lender.forget(message.spoilt, message.salt)
            for engine in self.prefills.values():
                self.routing.prefill_changed(engine)
        self.journeys.decoded_event(message.request_id, message)

    def fail(self, why: str) -> None:
        """A rank is lost: every request ends with an error, and the engine is unhealthy."""
        self.failure = self.failure or why
        if self._reader is not None:
            self.journeys.fail(why)

    # --- EngineClient

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """See `EngineClient.generate`."""
        if self.failure is not None:
            raise Unavailable(self.failure)
        self._check(request)
        name = request.request_id
        self._ids.add(name)
        self._num_begun += 1
        work = evolve(request, request_id=f"{name}#{self._num_begun}")
        outcome = "aborted"
        try:
            async with contextlib.aclosing(self.journeys.outputs(work, name)) as outputs:
                async for one in outputs:
                    outcome = "finished" if one.finish_reason else outcome
                    yield one
        except KvflowError:
            outcome = "failed"
            raise
        finally:
            self.num_requests[outcome] += 1
            self._ids.discard(name)
            self.journeys.end(work.request_id)

    def _check(self, request: Request) -> None:
        """Raises `InvalidRequest` for what a rank could not compute or tell apart."""
        if request.request_id in self._ids:
            raise InvalidRequest(
                "request_id", f"request_id {request.request_id!r} lives in the engine already"
            )
        length = len(request.prompt) + request.sampling.max_tokens
        if length > self.max_model_len:
            raise InvalidRequest(
                "prompt",
                f"{len(request.prompt)} prompt tokens + {request.sampling.max_tokens} max_tokens "
                f"= {length}, must be at most {self.max_model_len}",
            )
        wrong = next((t for t in request.prompt if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                "prompt", f"prompt holds token id {wrong}, must be in [0, {self.vocab_size})"
            )

    async def healthy(self) -> bool:
        """Whether all ranks are believed to work."""
        return self.failure is None

    def reset_prefix_cache(self) -> dict[str, int]:
        """See `PrefillEngine.reset_prefix_cache`; of all prefill engines together. Decode engines
        forget too, which is not counted."""
        forgotten: dict[str, int] = {}
        for engine in self.prefills.values():
            for tier, count in engine.reset_prefix_cache().items():
                forgotten[tier] = forgotten.get(tier, 0) + count
            self.routing.prefill_changed(engine)
        self.journeys.forget_prefixes()
        for name in self.decode_ranks:
            self.hub.send(name, ForgetPrefixes())
        return forgotten

    def kv_events(self) -> KVEventLog | None:
        """What the caches of all engines hold, for whoever routes to this deployment; None if they
        keep no prefixes."""
        return self.routing.log

    def metrics(self) -> Sequence[Metric]:
        """Requests by outcome, the prefill engines' numbers, and every gauge of every rank."""
        engines = list(self.prefills.values())
        return engine_metrics(self.num_requests, engines, self.gauges, self.counters)
