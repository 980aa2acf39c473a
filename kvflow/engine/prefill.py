"""PrefillEngine: schedules prompts over a group of ranks and keeps their KV until it was read.

Lives in the front's event loop. All ranks get the same steps; every decision is taken here, once.
A request begins behind the prefix that is known already. Its blocks are used while it is computed,
then pinned until every source rank of its transfer plan was acknowledged by the reader; a request
that nobody reads is released. Rows that were computed stay indexed until their blocks are needed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from kvflow.engine.api import InvalidRequest, Overloaded, Request
from kvflow.engine.messages import RunStep, Source, StepDone, StepItem
from kvflow.engine.prefill_kv import PrefillKV, RequestKV
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.engine.sampling import Sampled
from kvflow.engine.shares import deal_budget
from kvflow.engine.tiers.manager import Tiers
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.handshake import Agreement, agree


@define(eq=False)
class _Prefill:
    """One request inside the engine. `unread` holds the source ranks not yet acknowledged."""

    request: Request
    kv: RequestKV
    outcome: "asyncio.Future[Sampled]"
    done: int = 0
    in_step: bool = False
    aborted: bool = False
    preempted: bool = False
    unread: set[int] = field(factory=set)

    @property
    def remaining(self) -> int:
        """Prompt tokens not computed yet."""
        return len(self.request.prompt) - self.done


@define(eq=False)
class PrefillEngine:
    """`send_step` hands a step to all ranks; their `StepDone` come back to `on_step_done`. Raises
    `ContentMismatch` at construction unless `target` can take every component of `layout`."""

    layout: KVLayout
    num_ranks: int
    num_blocks: Mapping[str, int]
    target: KVLayout
    send_step: Callable[[RunStep], None]
    max_num_batched_tokens: int = 2048
    max_waiting: int = 256
    prefix: PrefixConfig = field(factory=lambda: PrefixConfig(enabled=False))
    tiers: Tiers | None = None
    num_steps: int = field(init=False, default=0)
    model_seconds: float = field(init=False, default=0.0)
    move_seconds: float = field(init=False, default=0.0)
    schedule_seconds: float = field(init=False, default=0.0)
    kv: PrefillKV = field(init=False)
    _terms: Agreement = field(init=False)
    _waiting: deque[_Prefill] = field(init=False, factory=deque)
    _running: list[_Prefill] = field(init=False, factory=list)
    _held: dict[str, _Prefill] = field(init=False, factory=dict)
    _step: list[tuple[_Prefill, int]] = field(init=False, factory=list)
    _answers: dict[int, StepDone] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._terms = agree(self.layout, self.target)
        self.kv = PrefillKV(self.layout, self.num_blocks, self.prefix, self.tiers)

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
        if len(self._waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests wait, the limit is {self.max_waiting}")

    async def prefill(self, request: Request) -> Sampled:
        """Computes the prompt's KV and samples the first token. Afterwards the blocks are pinned:
        the caller owes `source` and acknowledgements, or `release`."""
        self.check(request)
        if request.request_id in self._held:
            raise KvflowError(f"request {request.request_id!r} is in the engine already")
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        work = _Prefill(request, self.kv.of(request), future)
        self._held[request.request_id] = work
        await self.kv.fetch(work.kv)
        if work.outcome.done():  # released or failed in the meantime
            self.kv.free(work.kv)
            return await work.outcome
        self._waiting.append(work)
        self._schedule()
        return await work.outcome

    def cached_tokens(self, request_id: str) -> int:
        """How many tokens of a prefilled request's prompt were reused, 0 for an unknown one."""
        work = self._held.get(request_id)
        return work.kv.cached_tokens if work is not None else 0

    def source(self, request_id: str) -> Source:
        """The source binding of a prefilled request, for its one reader; from now on the blocks
        wait for an acknowledgement from that reader for every source rank of the plan. Raises
        `KvflowError` for a request whose KV is not there, whole."""
        work = self._held.get(request_id)
        length = len(work.request.prompt) if work is not None else 0
        if work is None or work.done < length or work.aborted:
            raise KvflowError(f"request {request_id!r} has no prefilled KV to read")
        plan = self._terms.plan((0, length))
        work.unread = {src_rank for src_rank, _ in plan.links}
        return Source(work.kv.tables, length, plan.digest)

    def acknowledge(self, request_id: str, src_ranks: Sequence[int]) -> None:
        """The reader will read these source ranks no more. Late and repeated ones are ignored."""
        work = self._held.get(request_id)
        if work is None or not work.unread:
            return
        work.unread.difference_update(src_ranks)
        if not work.unread:
            self._free(work)
            self._schedule()

    def release(self, request_id: str) -> None:
        """Nobody reads, or nobody listens any more: frees the blocks, after the running step if
        it still writes them. Unknown and repeated ids are ignored."""
        work = self._held.get(request_id)
        if work is None:
            return
        work.aborted = True
        if not work.outcome.done():
            work.outcome.cancel()
        if not work.in_step:
            self._free(work)
            self._schedule()

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks after the step it is in, and lets it wait again; what
        it computed stays indexed. A request whose last step runs ends with it. Unknown ids and
        those of requests that do not run are ignored."""
        work = self._held.get(request_id)
        if work is None or work not in self._running:
            return
        if work.in_step:
            work.preempted = True
        else:
            self._restart(work)
            self._schedule()

    def fail(self, error: BaseException) -> None:
        """A rank is gone: every unfinished request ends with `error`."""
        for work in list(self._held.values()):
            if not work.outcome.done():
                work.outcome.set_exception(error)

    def reset_prefix_cache(self) -> dict[str, int]:
        """Forgets every prefix, in all tiers; blocks of requests inside the engine stay theirs,
        but are not indexed any more. Returns how many blocks of tokens each tier forgot."""
        for work in self._held.values():
            work.kv.trail.ended = work not in self._waiting
        return self.kv.reset()

    # --- steps

    def _schedule(self) -> None:
        """Starts the next step if none runs and there is something to compute."""
        if self._step:
            return
        began = time.perf_counter()
        self._admit()
        shares = deal_budget([w.remaining for w in self._running], self.max_num_batched_tokens)
        self._step = [(self._running[index], count) for index, count in shares]
        if self._step:
            self.num_steps += 1
            try:
                items = [self._item(work, count) for work, count in self._step]
                self.send_step(RunStep(self.num_steps, items))
            except Exception as error:  # the other requests are not to wait for ever
                self._end_unsent(error)
        self.schedule_seconds += time.perf_counter() - began

    def _end_unsent(self, error: Exception) -> None:
        """Nobody answers to a step that was not sent: its requests end, and the others go on."""
        step, self._step = self._step, []
        for work, _ in step:
            work.in_step = False
            if not work.outcome.done():
                work.outcome.set_exception(KvflowError(f"a step was not sent: {error!r}"))
            self._free(work)
        self._schedule()

    def _admit(self) -> None:
        """Gives requests their blocks, while there is room."""
        while self._waiting and (start := self.kv.begin(self._waiting[0].kv)) is not None:
            self._waiting[0].done = start
            self._running.append(self._waiting.popleft())

    def _item(self, work: _Prefill, count: int) -> StepItem:
        prompt, stop = work.request.prompt, work.done + count
        last = stop == len(prompt)
        copy, load, store = self.kv.moves(work.kv, work.done, stop)
        work.in_step = True
        return StepItem(
            work.request.request_id,
            work.done,
            list(prompt[work.done : stop]),
            None if last else prompt[stop],
            work.kv.tables,
            work.request.sampling if last else None,
            copy=copy,
            load=load,
            store=store,
        )

    def on_step_done(self, answer: StepDone) -> None:
        """Takes one rank's answer; with the last one the step ends and the next one starts."""
        if answer.step_id != self.num_steps or not self._step:
            raise KvflowError(
                f"rank {answer.rank}: answer to step {answer.step_id}, step {self.num_steps} runs"
            )
        self._answers[answer.rank] = answer
        if len(self._answers) < self.num_ranks:
            return
        answers, self._answers = self._answers, {}
        self.model_seconds += max(a.seconds for a in answers.values())
        self.move_seconds += max(a.move_seconds for a in answers.values())
        began = time.perf_counter()
        sampled = {k: s for a in answers.values() for k, s in a.sampled.items()}
        refused = {name for a in answers.values() for name in a.refused}
        step, self._step = self._step, []
        for work, count in step:
            work.done += count
            work.in_step = False
        for work, _ in step:
            name = work.request.request_id
            if name in refused:
                self._refuse(work)
            else:
                self._settle(work, sampled.get(name))
        self.schedule_seconds += time.perf_counter() - began
        self._schedule()

    def _settle(self, work: _Prefill, sampled: Sampled | None) -> None:
        """What the step computed is known from now on; then the request goes its way."""
        self.kv.end_step(work.kv, work.done, sampled.token if sampled is not None else None)
        if work.aborted:
            self._free(work)
        elif work.done == len(work.request.prompt):
            self._running.remove(work)
            self.kv.pin(work.kv)
            if sampled is None:
                work.outcome.set_exception(KvflowError("no rank sampled the first token"))
            elif not work.outcome.done():
                self.kv.count(work.kv)
                work.outcome.set_result(sampled)
        elif work.preempted:
            self._restart(work)

    def _refuse(self, work: _Prefill) -> None:
        """The request has read rows that were not its own: it begins anew."""
        self.kv.refuse_load(work.kv)
        if work.aborted:
            self._free(work)
        else:
            self._restart(work)

    def _restart(self, work: _Prefill) -> None:
        """The request gives its blocks back and waits, ahead of all others."""
        self._running.remove(work)
        self.kv.free(work.kv)
        work.done, work.preempted = 0, False
        self._waiting.appendleft(work)

    def _free(self, work: _Prefill) -> None:
        self._held.pop(work.request.request_id, None)
        for queue in (self._waiting, self._running):
            if work in queue:
                queue.remove(work)
        self.kv.free(work.kv)

    async def close(self) -> None:
        """Ends the tiers; no step may be sent any more."""
        if self.tiers is not None:
            await self.tiers.close()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def audit(self) -> None:
        """Raises `KvflowError` if a block is lost, indexed wrongly, or held although the engine is
        idle."""
        self.kv.audit(idle=not self._held)
