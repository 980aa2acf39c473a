"""PrefillEngine: schedules prompts over a group of ranks and keeps their KV until it was read.

Lives in the front's event loop. All ranks get the same steps; every decision is taken here, once.
A request begins behind the prefix that is known already, here or in an engine that lends its rows.
Its blocks are used while it is computed, then pinned until every source rank of its transfer plan
was acknowledged by the reader, who may begin to read while it is computed; a request that nobody
reads is released. Rows that were computed stay indexed until their blocks are needed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from kvflow.engine.api import InvalidRequest, Overloaded, Request
from kvflow.engine.messages import (
    AskPush,
    LayersDone,
    PullRows,
    PushRows,
    RowsPulled,
    RunStep,
    Source,
    StepDone,
)
from kvflow.engine.prefill.kv import PrefillKV
from kvflow.engine.prefill.requests import Borrow, OnReadable, Prefilling, nobody
from kvflow.engine.prefill.scheduler import StepScheduler
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.engine.sampling import Sampled
from kvflow.engine.tiers.manager import Tiers
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.router.config import Load
from kvflow.transfers.handshake import Agreement, agree


@define(eq=False)
class PrefillEngine:
    """`send` hands a step, or rows to move, to all ranks; their `StepDone` come back to
    `on_step_done`, their `RowsPulled` to `on_rows_pulled`. Raises `ContentMismatch` at construction
    unless `target` can take every component of `layout`."""

    layout: KVLayout
    num_ranks: int
    num_blocks: Mapping[str, int]
    target: KVLayout
    send: Callable[[RunStep | PullRows | PushRows], None]
    max_num_batched_tokens: int = 2048
    max_waiting: int = 256
    prefix: PrefixConfig = field(factory=lambda: PrefixConfig(enabled=False))
    tiers: Tiers | None = None
    name: str = "prefill-0"
    kv: PrefillKV = field(init=False)
    steps: StepScheduler = field(init=False)
    _terms: Agreement = field(init=False)
    _held: dict[str, Prefilling] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._terms = agree(self.layout, self.target)
        self.kv = PrefillKV(self.layout, self.num_blocks, self.prefix, self.tiers)
        self.steps = StepScheduler(
            self.kv, self.num_ranks, self.send, self.max_num_batched_tokens, self._held
        )

    @property
    def pools(self) -> Mapping[str, SharedBlockPool]:
        """Who holds which blocks, by group."""
        return self.kv.cache.pools

    # --- requests

    def check(self, request: Request) -> None:
        """Raises `InvalidRequest` if the pools could never hold the prompt, `Overloaded` if too
        many wait."""
        for name, need in self.layout.num_blocks_for(len(request.prompt)).items():
            if need > self.num_blocks[name]:
                raise InvalidRequest(
                    "prompt",
                    f"a prompt of {len(request.prompt)} tokens needs {need} blocks, the prefill "
                    f"pool has {self.num_blocks[name]}",
                )
        if len(self.steps.waiting) >= self.max_waiting:
            raise Overloaded(
                f"{len(self.steps.waiting)} requests wait, the limit is {self.max_waiting}"
            )

    async def prefill(
        self, request: Request, borrow: Borrow | None = None, on_readable: OnReadable = nobody
    ) -> Sampled:
        """Computes the prompt's KV and samples the first token. Afterwards the blocks are pinned:
        the caller owes `source` and acknowledgements, or `release`. The caller may ask for `source`
        from the first `on_readable` on. What `borrow` gives is ended here, whatever happens."""
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        work = Prefilling(request, self.kv.of(request), future, borrow, on_readable)
        try:
            self.check(request)
            if request.request_id in self._held:
                raise KvflowError(f"request {request.request_id!r} is in the engine already")
            self._held[request.request_id] = work
            await self.kv.fetch(work.kv)
            if work.outcome.done():  # released or failed in the meantime
                self.kv.free(work.kv)
                return await work.outcome
            self.steps.add(work)
            return await work.outcome
        finally:
            if not work.missing:
                work.end_loan()

    def cached_tokens(self, request_id: str) -> int:
        """How many tokens of a prefilled request's prompt were reused, 0 for an unknown one."""
        work = self._held.get(request_id)
        return work.kv.cached_tokens if work is not None else 0

    def source(self, request_id: str) -> Source:
        """The source binding of a request, for its one reader; from now on the blocks wait for an
        acknowledgement from that reader for every source rank of the plan. Raises `KvflowError`
        for a request that has no blocks, has a reader, or is over."""
        work = self._held.get(request_id)
        if work is None or not work.kv.tables or work.is_read or work.is_over:
            raise KvflowError(f"request {request_id!r} has no KV to read, or somebody reads it")
        length = len(work.request.prompt)
        plan = self._terms.plan((0, length))
        work.unread, work.is_read = {src_rank for src_rank, _ in plan.links}, True
        return Source(self.name, work.kv.tables, 0, length, plan.digest)

    def push(self, request_id: str, ask: AskPush, reader: str) -> None:
        """Every rank writes its part of what a reader asks for, which is computed already, into
        the reader's blocks. Their `RowsPushed` are the front's to gather. Raises `KvflowError` for
        a request that nobody reads."""
        work = self._held.get(request_id)
        if work is None or not work.unread:
            raise KvflowError(f"request {request_id!r} has no reader in {self.name!r} to push to")
        tables = work.kv.tables
        rows = ask.start, ask.stop, tables, ask.target, ask.components
        self.send(PushRows(request_id, reader, *rows))

    def acknowledge(self, request_id: str, src_ranks: Sequence[int]) -> None:
        """The reader will read these source ranks no more. Late and repeated ones are ignored."""
        work = self._held.get(request_id)
        if work is None or not work.unread:
            return
        work.unread.difference_update(src_ranks)
        if not work.unread:
            self._read_over(work)

    def never_read(self, request_id: str) -> None:
        """The reader has not begun, and never will."""
        if (work := self._held.get(request_id)) is not None:
            work.unread = set()
            self._read_over(work)

    def _read_over(self, work: Prefilling) -> None:
        """Whoever still waits for the prompt waits for a request whose reader is gone."""
        name = work.request.request_id
        if not work.outcome.done():
            work.outcome.set_exception(KvflowError(f"the reader of request {name!r} has gone"))
        self.release(name)

    def release(self, request_id: str) -> None:
        """Nobody listens any more: no further step computes the request, and its blocks are free
        once nothing writes them and no reader reads them. Unknown and repeated ids are ignored."""
        work = self._held.get(request_id)
        if work is None:
            return
        work.is_over = True
        if not work.outcome.done():
            work.outcome.cancel()
        if not work.is_held:
            self.steps.free(work)
            self.steps.schedule()

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks after the step it is in, and lets it wait again; what
        it computed stays indexed. A request whose last step runs ends with it. Unknown ids and
        those of requests that do not run, or are read already, are ignored."""
        work = self._held.get(request_id)
        if work is None or work not in self.steps.running or work.is_read:
            return
        self.steps.preempt(work)

    def fail(self, error: BaseException) -> None:
        """A rank is gone: every unfinished request ends with `error`."""
        for work in list(self._held.values()):
            if not work.outcome.done():
                work.outcome.set_exception(error)

    def reset_prefix_cache(self) -> dict[str, int]:
        """Forgets every prefix, in all tiers; blocks of requests inside the engine stay theirs,
        but are not indexed any more. Returns how many blocks of tokens each tier forgot."""
        for work in self._held.values():
            work.kv.trail.ended = work not in self.steps.waiting
        return self.kv.reset()

    # --- steps

    def on_step_done(self, answer: StepDone) -> None:
        """Takes one rank's answer; with the last one the step ends and the next one starts."""
        self.steps.on_step_done(answer)

    def on_layers_done(self, answer: LayersDone) -> None:
        """Takes one rank's word; when all have said it, readers are told."""
        self.steps.on_layers_done(answer)

    def on_rows_pulled(self, answer: RowsPulled) -> None:
        """Takes one rank's answer to rows that it should pull."""
        self.steps.on_rows_pulled(answer)

    async def close(self) -> None:
        """Ends the tiers; no step may be sent any more."""
        if self.tiers is not None:
            await self.tiers.close()

    def load(self) -> Load:
        """What a router is told."""
        held = sum(len(w.request.prompt) for w in self._held.values() if w.kv.tables)
        waiting = sum(w.remaining for w in (*self.steps.waiting, *self.steps.running))
        return Load(held, self.num_running, self.num_waiting, waiting)

    @property
    def num_steps(self) -> int:
        """How many steps have begun."""
        return self.steps.num_steps

    @property
    def num_waiting(self) -> int:
        return len(self.steps.waiting)

    @property
    def num_running(self) -> int:
        return len(self.steps.running)

    def audit(self) -> None:
        """Raises `KvflowError` if a block is lost, indexed wrongly, or held although the engine is
        idle."""
        self.kv.audit(idle=not self._held)
