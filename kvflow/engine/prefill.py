"""PrefillEngine: schedules prompts over a group of ranks and keeps their KV until it was read.

Lives in the front's event loop. All ranks get the same steps; every decision is taken here, once.
A request begins behind the prefix that is known already. Its blocks are used while it is computed,
then pinned until every source rank of its transfer plan was acknowledged by the reader; a request
that nobody reads is released. Rows that were computed stay indexed until their blocks are needed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from kvflow.engine.api import InvalidRequest, Overloaded, Request
from kvflow.engine.blocks import Holding
from kvflow.engine.messages import RunStep, Source, StepDone, StepItem
from kvflow.engine.prefix.cache import Lease, PrefixCache, Tables, Trail
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.hashes import Chain, PrefixHasher
from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.engine.sampling import Sampled
from kvflow.engine.shares import deal_budget
from kvflow.errors import KvflowError
from kvflow.layouts.identity import ContentIdentity
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.handshake import Agreement, agree


@define(eq=False)
class _Prefill:
    """One request inside the engine. `sources` are held until its first step has copied from them,
    `begun` says that this step was sent; `unread` holds the source ranks not yet acknowledged."""

    request: Request
    chain: Chain
    outcome: "asyncio.Future[Sampled]"
    lease: Lease = field(factory=lambda: Lease({}))
    sources: Tables = field(factory=dict)
    holding: Holding = "used"
    trail: Trail = field(factory=Trail)
    done: int = 0
    begun: bool = False
    in_step: bool = False
    aborted: bool = False
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
    num_steps: int = field(init=False, default=0)
    model_seconds: float = field(init=False, default=0.0)
    num_reused: dict[str, int] = field(init=False)
    cache: PrefixCache = field(init=False)
    _hasher: PrefixHasher = field(init=False)
    _terms: Agreement = field(init=False)
    _waiting: deque[_Prefill] = field(init=False, factory=deque)
    _running: list[_Prefill] = field(init=False, factory=list)
    _held: dict[str, _Prefill] = field(init=False, factory=dict)
    _step: list[tuple[_Prefill, int]] = field(init=False, factory=list)
    _answers: dict[int, StepDone] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._terms = agree(self.layout, self.target)
        self.cache = PrefixCache(self.layout, self.num_blocks)
        self.num_reused = {"device": 0}
        self._hasher = PrefixHasher(
            ContentIdentity.of(self.layout.spec).fingerprint,
            self.prefix.block_size or self.layout.groups[0].paging.block_size,
            shifted=bool(self.layout.spec.select(part="mtp")),
        )

    @property
    def pools(self) -> Mapping[str, SharedBlockPool]:
        """Who holds which blocks, by group."""
        return self.cache.pools

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
        known = request.prompt if self.prefix.enabled else ()
        chain = self._hasher.chain(known, request.cache_salt)
        work = _Prefill(request, chain, asyncio.get_running_loop().create_future())
        self._held[request.request_id] = work
        self._waiting.append(work)
        self._schedule()
        return await work.outcome

    def cached_tokens(self, request_id: str) -> int:
        """How many tokens of a prefilled request's prompt were reused, 0 for an unknown one."""
        work = self._held.get(request_id)
        return work.lease.length if work is not None else 0

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
        return Source(work.lease.tables, length, plan.digest)

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

    def fail(self, error: BaseException) -> None:
        """A rank is gone: every unfinished request ends with `error`."""
        for work in list(self._held.values()):
            if not work.outcome.done():
                work.outcome.set_exception(error)

    def reset_prefix_cache(self) -> dict[str, int]:
        """Forgets every prefix, in all tiers; blocks of requests inside the engine stay theirs,
        but are not indexed any more. Returns how many blocks of tokens each tier forgot."""
        for work in self._held.values():
            work.trail.ended = work not in self._waiting
        return {"device": self.cache.index.clear()}

    # --- steps

    def _schedule(self) -> None:
        """Starts the next step if none runs and there is something to compute."""
        if self._step:
            return
        self._admit()
        shares = deal_budget([w.remaining for w in self._running], self.max_num_batched_tokens)
        self._step = [(self._running[index], count) for index, count in shares]
        items = [self._item(work, count) for work, count in self._step]
        for work, _ in self._step:
            work.in_step = work.begun = True
        if items:
            self.num_steps += 1
            self.send_step(RunStep(self.num_steps, items))

    def _admit(self) -> None:
        while self._waiting:
            work = self._waiting[0]
            length = len(work.request.prompt)
            match = self.cache.index.match(work.chain, length - 1)
            lease = self.cache.lease(match, length)
            if lease is None:
                return
            work.lease, work.sources, work.done = lease, lease.sources, lease.length
            self._running.append(self._waiting.popleft())

    def _item(self, work: _Prefill, count: int) -> StepItem:
        prompt, stop = work.request.prompt, work.done + count
        last = stop == len(prompt)
        return StepItem(
            work.request.request_id,
            work.done,
            list(prompt[work.done : stop]),
            None if last else prompt[stop],
            work.lease.tables,
            work.request.sampling if last else None,
            copy=None if work.begun else work.lease.copy,
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
        sampled = {k: s for a in answers.values() for k, s in a.sampled.items()}
        step, self._step = self._step, []
        for work, count in step:
            work.done += count
            work.in_step = False
        for work, _ in step:
            self._settle(work, sampled.get(work.request.request_id))
        self._schedule()

    def _settle(self, work: _Prefill, sampled: Sampled | None) -> None:
        token = sampled.token if sampled is not None else None
        self.cache.publish(work.chain, work.trail, work.lease.tables, work.done, token)
        self._free_sources(work)
        if work.aborted:
            self._free(work)
        elif work.done == len(work.request.prompt):
            self._running.remove(work)
            self.cache.hold(work.lease.tables, "used", "pinned")
            work.holding = "pinned"
            if sampled is None:
                work.outcome.set_exception(KvflowError("no rank sampled the first token"))
            elif not work.outcome.done():
                self.num_reused["device"] += work.lease.length
                work.outcome.set_result(sampled)

    def _free_sources(self, work: _Prefill) -> None:
        """The copy that read them is done, or will never begin."""
        self.cache.free(work.sources)
        work.sources = {}

    def _free(self, work: _Prefill) -> None:
        self._held.pop(work.request.request_id, None)
        for queue in (self._waiting, self._running):
            if work in queue:
                queue.remove(work)
        self._free_sources(work)
        self.cache.free(work.lease.tables, work.holding)
        work.lease = Lease({})

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def audit(self) -> None:
        """Raises `KvflowError` if a block is lost, indexed wrongly, or held although the engine is
        idle."""
        self.cache.audit(idle=not self._held)
