"""PrefillEngine: schedules prompts over a group of ranks and keeps their KV until it was read.

Lives in the front's event loop. All ranks get the same steps; every decision is taken here, once.
A request's blocks are used while it is computed, then pinned until every source rank of its
transfer plan was acknowledged by the reader; a request that nobody reads is released.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from kvflow.engine.api import InvalidRequest, Overloaded, Request
from kvflow.engine.blocks import BlockPool
from kvflow.engine.messages import RunStep, Source, StepDone, StepItem
from kvflow.engine.sampling import Sampled
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.handshake import Agreement, agree


@define(eq=False)
class _Prefill:
    """One request inside the engine. `unread` holds the source ranks not yet acknowledged."""

    request: Request
    outcome: "asyncio.Future[Sampled]"
    tables: dict[str, list[int]] = field(factory=dict)
    done: int = 0
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
    num_steps: int = field(init=False, default=0)
    model_seconds: float = field(init=False, default=0.0)
    pools: dict[str, BlockPool] = field(init=False)
    _terms: Agreement = field(init=False)
    _waiting: deque[_Prefill] = field(init=False, factory=deque)
    _running: list[_Prefill] = field(init=False, factory=list)
    _held: dict[str, _Prefill] = field(init=False, factory=dict)
    _step: list[tuple[_Prefill, int]] = field(init=False, factory=list)
    _answers: dict[int, StepDone] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.pools = {name: BlockPool(n) for name, n in self.num_blocks.items()}
        self._terms = agree(self.layout, self.target)

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
        work = _Prefill(request, asyncio.get_running_loop().create_future())
        self._held[request.request_id] = work
        self._waiting.append(work)
        self._schedule()
        return await work.outcome

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
        return Source(work.tables, length, plan.digest)

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

    # --- steps

    def _schedule(self) -> None:
        """Starts the next step if none runs and there is something to compute."""
        if self._step:
            return
        self._admit()
        self._step = self._shares()
        items = [self._item(work, count) for work, count in self._step]
        for work, _ in self._step:
            work.in_step = True
        if items:
            self.num_steps += 1
            self.send_step(RunStep(self.num_steps, items))

    def _shares(self) -> list[tuple[_Prefill, int]]:
        """Deals the token budget: half is the oldest request's, so that it always moves on; the
        rest goes to the shortest remainders, so that short prompts do not wait behind a long one;
        what they leave is the oldest's again."""
        if not self._running:
            return []
        oldest, *others = self._running
        budget = self.max_num_batched_tokens
        reserved = min(oldest.remaining, max(budget // 2, 1)) if others else oldest.remaining
        reserved = min(reserved, budget)
        free, shares = budget - reserved, []
        for work in sorted(others, key=lambda w: w.remaining):
            count = min(free, work.remaining)
            if count:
                shares.append((work, count))
                free -= count
        return [(oldest, min(oldest.remaining, reserved + free)), *shares]

    def _admit(self) -> None:
        while self._waiting:
            work = self._waiting[0]
            need = self.layout.num_blocks_for(len(work.request.prompt))
            if any(self.pools[name].num_free < n for name, n in need.items()):
                return
            work.tables = {name: self.pools[name].allocate(n) for name, n in need.items()}
            self._running.append(self._waiting.popleft())

    def _item(self, work: _Prefill, count: int) -> StepItem:
        prompt, stop = work.request.prompt, work.done + count
        last = stop == len(prompt)
        return StepItem(
            work.request.request_id,
            work.done,
            list(prompt[work.done : stop]),
            None if last else prompt[stop],
            work.tables,
            work.request.sampling if last else None,
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
        if work.aborted:
            self._free(work)
        elif work.done == len(work.request.prompt):
            self._running.remove(work)
            for name, ids in work.tables.items():
                self.pools[name].hold(ids, "pinned")
            if sampled is None:
                work.outcome.set_exception(KvflowError("no rank sampled the first token"))
            elif not work.outcome.done():
                work.outcome.set_result(sampled)

    def _free(self, work: _Prefill) -> None:
        self._held.pop(work.request.request_id, None)
        for queue in (self._waiting, self._running):
            if work in queue:
                queue.remove(work)
        for name, ids in work.tables.items():
            self.pools[name].free(ids)
        work.tables = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def audit(self) -> None:
        """Raises `KvflowError` if a block is lost, or held although the engine is idle."""
        for name, pool in self.pools.items():
            pool.audit()
            if not self._held and pool.num_free != pool.num_blocks:
                raise KvflowError(
                    f"group {name!r}: idle with {pool.num_free} of {pool.num_blocks} blocks free"
                )
