"""Deployment: the front of one prefill engine and several decode ranks, as one `EngineClient`.

Follows each request through its phases: queued and prefilled, handed over, transferred, decoded.
An end from outside (the client is gone) is answered by phase: before hand-over the prefill
engine releases it; afterwards the decode rank is told, and says when it no longer reads.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field

from kvflow.engine.api import InvalidRequest, Metric, Request, TokenOutput, Unavailable
from kvflow.engine.finish import finish_reason
from kvflow.engine.mailbox import Hub
from kvflow.engine.messages import (
    Abort,
    Admit,
    Connect,
    FromRank,
    Gauges,
    Generated,
    RankFailed,
    Ready,
    RequestFailed,
    RunStep,
    Shutdown,
    StepDone,
    TransferEnded,
)
from kvflow.engine.prefill import PrefillEngine
from kvflow.engine.prefill_metrics import engine_metrics
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.sampling import Sampled
from kvflow.engine.tiers.manager import Tiers
from kvflow.engine.tiers.unitfile import FileMover
from kvflow.errors import KvflowError
from kvflow.layouts.wire import layout_from_wire


@define(eq=False)
class _Live:
    """A request handed over to a decode rank: what it sends back, in order."""

    decode_rank: str
    events: "asyncio.Queue[Generated | RequestFailed]" = field(factory=asyncio.Queue)
    report: dict[str, Any] | None = None


@define(eq=False)
class Deployment:
    """`prefill_ranks` are in rank order. Call `start` once, `close` at the end."""

    hub: Hub
    prefill_ranks: Sequence[str]
    decode_ranks: Sequence[str]
    eos_ids: frozenset[int]
    model_name: str
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int = 2048
    prefix: PrefixConfig = field(factory=PrefixConfig)
    files: FileMover | None = None
    prefill: PrefillEngine = field(init=False)
    gauges: dict[str, Mapping[str, float]] = field(init=False, factory=dict)
    counters: dict[str, Mapping[str, float]] = field(init=False, factory=dict)
    failure: str | None = field(init=False, default=None)
    num_requests: dict[str, int] = field(init=False)
    _ids: set[str] = field(init=False, factory=set)
    _num_begun: int = field(init=False, default=0)
    _live: dict[str, _Live] = field(init=False, factory=dict)
    _load: dict[str, int] = field(init=False)
    _reader: "asyncio.Task[None] | None" = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._load = dict.fromkeys(self.decode_ranks, 0)
        self.num_requests = dict.fromkeys(("finished", "aborted", "failed"), 0)

    # --- life

    async def start(self, timeout: float = 60.0) -> None:
        """Waits until every rank is ready and connects decode ranks to the prefill engine.
        Raises `KvflowError` if a rank fails, is late, or ranks of one engine disagree."""
        try:
            ready = await asyncio.wait_for(self._all_ready(), timeout)
        except TimeoutError:
            raise KvflowError(f"not every rank was ready within {timeout} s") from None
        source, target = ready[self.prefill_ranks[0]], ready[self.decode_ranks[0]]
        for group, first in ((self.prefill_ranks, source), (self.decode_ranks, target)):
            for name in group:
                if (ready[name].layout, ready[name].num_blocks) != (first.layout, first.num_blocks):
                    raise KvflowError(f"rank {name!r} and {group[0]!r} describe different caches")
        layout = layout_from_wire(source.layout)
        tiers = Tiers.create(self.prefix, layout, self.files)
        self.prefill = PrefillEngine(
            layout,
            len(self.prefill_ranks),
            source.num_blocks,
            layout_from_wire(target.layout),
            self._send_step,
            self.max_num_batched_tokens,
            prefix=self.prefix,
            tiers=tiers,
        )
        if tiers is not None:
            for name in self.prefill_ranks:
                self.hub.send(name, tiers.attachment)
        exports = {r: ready[name].export for r, name in enumerate(self.prefill_ranks)}
        for name in self.decode_ranks:
            self.hub.send(name, Connect(source.layout, source.num_blocks, exports))
        self._reader = asyncio.create_task(self._read())

    async def _all_ready(self) -> dict[str, Ready]:
        ready: dict[str, Ready] = {}
        while len(ready) < len(self.prefill_ranks) + len(self.decode_ranks):
            name, message = await self.hub.receive()
            if isinstance(message, RankFailed):
                raise KvflowError(f"rank {name!r} failed: {message.error}")
            if isinstance(message, Ready):
                ready[name] = message
        return ready

    async def close(self) -> None:
        """Ends what still runs with an error, tells every rank to shut down and stops listening.
        The ranks' owner joins them."""
        self.fail("the engine is closed")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for name in (*self.prefill_ranks, *self.decode_ranks):
            try:
                self.hub.send(name, Shutdown())
            except KvflowError:
                continue  # it is gone already
        if self._reader is not None:
            await self.prefill.close()

    def _send_step(self, step: RunStep) -> None:
        for name in self.prefill_ranks:
            self.hub.send(name, step)

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
                self.prefill.on_step_done(message)
            case TransferEnded(request_id, src_ranks, report, _):
                if report is not None and request_id in self._live:
                    self._live[request_id].report = report
                if src_ranks:
                    self.prefill.acknowledge(request_id, src_ranks)
                else:
                    self.prefill.release(request_id)
            case Generated(request_id) | RequestFailed(request_id):
                if request_id in self._live:
                    self._live[request_id].events.put_nowait(message)
            case Gauges(values, counters):
                self.gauges[name], self.counters[name] = values, counters
            case RankFailed(error):
                self.fail(f"rank {name!r} failed: {error}")
            case Ready():
                raise KvflowError(f"rank {name!r} is ready a second time")

    def fail(self, why: str) -> None:
        """A rank is lost: every request ends with an error, and the engine is unhealthy."""
        self.failure = self.failure or why
        if self._reader is not None:
            self.prefill.fail(Unavailable(why))
        for request_id, live in self._live.items():
            live.events.put_nowait(RequestFailed(request_id, why))

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
            async with contextlib.aclosing(self._outputs(work, name)) as outputs:
                async for output in outputs:
                    outcome = "finished" if output.finish_reason else outcome
                    yield output
        except KvflowError:
            outcome = "failed"
            raise
        finally:
            self.num_requests[outcome] += 1
            self._ids.discard(name)
            self._end(work.request_id, outcome)

    async def _outputs(self, work: Request, name: str) -> AsyncGenerator[TokenOutput, None]:
        """The request's tokens under its client's name. Inside the engine it bears an id that none
        had before: an end of its namesake may still be on its way."""
        first = await self.prefill.prefill(work)
        if self.failure is not None:  # between the step's end and this line
            raise Unavailable(self.failure)
        cached = self.prefill.cached_tokens(work.request_id)
        reason = finish_reason(first.token, 1, work.sampling, self.eos_ids)
        if reason is not None:
            self.prefill.release(work.request_id)  # nothing moves
            yield _output(name, first, reason, cached_tokens=cached)
            return
        live = self._hand_over(work, first)
        yield _output(name, first, None, cached_tokens=cached)
        async with contextlib.aclosing(self._decoded(name, live)) as outputs:
            async for output in outputs:
                yield output

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

    def _hand_over(self, request: Request, first: Sampled) -> _Live:
        name = min(self.decode_ranks, key=lambda n: self._load[n])
        source = self.prefill.source(request.request_id)
        live = self._live[request.request_id] = _Live(name)
        self._load[name] += 1
        prompt = list(request.prompt)
        admit = Admit(request.request_id, prompt, first.token, request.sampling, source)
        self.hub.send(name, admit)
        return live

    async def _decoded(self, name: str, live: _Live) -> AsyncGenerator[TokenOutput, None]:
        reason, reported = None, False
        while reason is None:
            event = await live.events.get()
            if isinstance(event, RequestFailed):
                raise (KvflowError if self.failure is None else Unavailable)(event.error)
            reason = event.finish_reason
            transfer = None if reported else live.report
            reported = reported or transfer is not None
            yield _output(name, event.sampled, reason, transfer)

    def _end(self, request_id: str, outcome: str) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            self.prefill.release(request_id)
            return
        self._load[live.decode_rank] -= 1
        if outcome == "aborted" and self.failure is None:
            self.hub.send(live.decode_rank, Abort(request_id))

    async def healthy(self) -> bool:
        """Whether all ranks are believed to work."""
        return self.failure is None

    def reset_prefix_cache(self) -> dict[str, int]:
        """See `PrefillEngine.reset_prefix_cache`."""
        return self.prefill.reset_prefix_cache()

    def metrics(self) -> Sequence[Metric]:
        """Requests by outcome, the prefill engine's numbers, and every gauge of every rank."""
        numbers = self.gauges, self.counters
        return engine_metrics(self.num_requests, self.prefill, *numbers)


def _output(
    request_id: str,
    sampled: Sampled,
    reason: Any,
    transfer: dict[str, Any] | None = None,
    cached_tokens: int = 0,
) -> TokenOutput:
    return TokenOutput(
        request_id,
        sampled.token,
        sampled.position,
        reason,
        sampled.logprob,
        sampled.top_logprobs,
        cached_tokens=cached_tokens,
        transfer=transfer,
    )
