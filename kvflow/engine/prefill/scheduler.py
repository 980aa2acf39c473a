"""StepScheduler: which requests of a prefill engine compute what in which step.

One step runs at a time on all ranks. Every decision is taken here, once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from attrs import define, field

from kvflow.engine.messages import (
    LayersDone,
    PullRows,
    PushRows,
    RowsPulled,
    RunStep,
    Source,
    StepDone,
    StepItem,
)
from kvflow.engine.prefill.kv import PrefillKV
from kvflow.engine.prefill.requests import Borrow, Prefilling
from kvflow.engine.sampling import Sampled
from kvflow.engine.shares import deal_budget
from kvflow.errors import KvflowError


@define(eq=False)
class StepScheduler:
    """`held` are all requests inside the engine by id; one that is freed leaves it."""

    kv: PrefillKV
    num_ranks: int
    send: Callable[[RunStep | PullRows | PushRows], None]
    max_num_batched_tokens: int
    held: dict[str, Prefilling]
    num_steps: int = field(init=False, default=0)
    num_failed_loans: int = field(init=False, default=0)
    model_seconds: float = field(init=False, default=0.0)
    move_seconds: float = field(init=False, default=0.0)
    schedule_seconds: float = field(init=False, default=0.0)
    waiting: deque[Prefilling] = field(init=False, factory=deque)
    running: list[Prefilling] = field(init=False, factory=list)
    _step: list[tuple[Prefilling, int]] = field(init=False, factory=list)
    _answers: dict[int, StepDone] = field(init=False, factory=dict)
    _asking: "set[asyncio.Task[None]]" = field(init=False, factory=set)
    _layers: dict[int, int] = field(init=False, factory=dict)
    _told: int = field(init=False, default=0)

    def add(self, work: Prefilling) -> None:
        """The request waits for its turn."""
        self.waiting.append(work)
        self.schedule()

    def free(self, work: Prefilling) -> None:
        """The request is gone, with all that it holds; nothing writes or reads it."""
        self.held.pop(work.request.request_id, None)
        for queue in (self.waiting, self.running):
            if work in queue:
                queue.remove(work)
        self.kv.free(work.kv)

    def preempt(self, work: Prefilling) -> None:
        """A running request gives its blocks back, after the step that it is in."""
        if work.in_step:
            work.preempted = True
        else:
            self._restart(work)
            self.schedule()

    # --- steps

    def schedule(self) -> None:
        """Starts the next step if none runs and there is something to compute."""
        if self._step:
            return
        began = time.perf_counter()
        self._admit()
        wanted = [w for w in self.running if not w.is_over]
        shares = deal_budget([w.remaining for w in wanted], self.max_num_batched_tokens)
        self._step = [(wanted[index], count) for index, count in shares]
        if self._step:
            self.num_steps += 1
            try:
                items = [self._item(work, count) for work, count in self._step]
                self.send(RunStep(self.num_steps, items))
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
            self.free(work)
        self.schedule()

    def _admit(self) -> None:
        """Gives requests their blocks, while there is room."""
        while self.waiting and (start := self.kv.begin(self.waiting[0].kv)) is not None:
            work = self.waiting.popleft()
            work.done = start
            if work.borrow is not None:
                work.is_asking = True
                asking = asyncio.get_running_loop().create_task(self._ask(work, work.borrow))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)
            else:
                self._run(work)

    async def _ask(self, work: Prefilling, borrow: Borrow) -> None:
        """The request has its blocks, and takes what another engine has of its prompt."""
        work.borrow = None
        try:
            work.loan = await borrow()
            if not work.is_over and work.loan and work.loan.source.stop > work.done:
                self._borrow(work, work.loan.source)
        except KvflowError as error:
            if not work.outcome.done():
                work.outcome.set_exception(error)
            work.is_over = True
        finally:
            work.is_asking = False
        if not work.missing:
            self._borrowed(work)

    def _borrowed(self, work: Prefilling) -> None:
        """All that could be borrowed is here: the request runs, unless nobody wants it."""
        if not work.is_over:
            self._run(work)
        else:
            work.end_loan()
            if not work.is_held:
                self.free(work)
        self.schedule()

    def _run(self, work: Prefilling) -> None:
        """From now on the request takes part in steps."""
        work.end_loan()
        self.running.append(work)
        if readable := self.kv.readable(work.kv, work.done):
            work.on_readable(readable, None)

    def _borrow(self, work: Prefilling, source: Source) -> None:
        """All ranks bring the rows behind what is known here into the request's blocks."""
        work.missing = self.num_ranks
        name, tables = work.request.request_id, work.kv.tables
        self.send(PullRows(name, source, work.done, source.stop, tables))

    def on_rows_pulled(self, answer: RowsPulled) -> None:
        """Takes one rank's answer; with the last one the request runs, behind what it borrowed or,
        if that failed, behind what was known here."""
        work = self.held[answer.request_id]
        work.rows_pulled(answer)
        if work.missing or work.loan is None:
            return
        if work.borrow_error is None:
            self.kv.borrowed(work.kv, work.loan.source.stop - work.done)
            work.done = work.loan.source.stop
        else:
            self.num_failed_loans += 1
        self._borrowed(work)

    def _item(self, work: Prefilling, count: int) -> StepItem:
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
        failed = {k: why for a in answers.values() for k, why in a.failed.items()}
        step, self._step = self._step, []
        self._layers, self._told = {}, 0
        for work, count in step:
            work.done += count
            work.in_step = False
        for work, _ in step:
            name = work.request.request_id
            if name in refused:
                self._refuse(work)
            elif name in failed:
                self._fail(work, failed[name])
            else:
                self._settle(work, sampled.get(name))
        self.schedule_seconds += time.perf_counter() - began
        self.schedule()

    def on_layers_done(self, answer: LayersDone) -> None:
        """Takes one rank's word. When all have said so much of the step that runs, readers are
        told; but not of requests that may have to begin anew."""
        if answer.step_id != self.num_steps or not self._step:
            return
        self._layers[answer.rank] = answer.num_layers
        if len(self._layers) < self.num_ranks:
            return
        num_layers = min(self._layers.values())
        if num_layers <= self._told:
            return
        self._told = num_layers
        for work, count in self._step:
            if not (work.is_over or work.preempted or work.kv.load):
                work.on_readable(work.done + count, num_layers)

    def _settle(self, work: Prefilling, sampled: Sampled | None) -> None:
        """What the step computed is known from now on; then the request goes its way."""
        self.kv.end_step(work.kv, work.done, sampled.token if sampled is not None else None)
        if work.is_over:
            self._stop(work)
        elif work.done == len(work.request.prompt):
            self.running.remove(work)
            self.kv.pin(work.kv)
            if sampled is None:
                work.outcome.set_exception(KvflowError("no rank sampled the first token"))
            elif not work.outcome.done():
                self.kv.count(work.kv)
                work.outcome.set_result(sampled)
        elif work.preempted:
            self._restart(work)
        else:
            work.on_readable(work.done, None)

    def _stop(self, work: Prefilling) -> None:
        """Nobody wants it: it computes no more, and is freed unless somebody still reads."""
        self.running.remove(work)
        if not work.is_held:
            self.free(work)

    def _fail(self, work: Prefilling, why: str) -> None:
        """There is no first token, and nobody may go by what the request has computed."""
        self.kv.forget(work.kv)
        work.is_over = True
        if not work.outcome.done():
            work.outcome.set_exception(KvflowError(why))
        self._stop(work)

    def _refuse(self, work: Prefilling) -> None:
        """The request has read rows that were not its own: it begins anew."""
        self.kv.refuse_load(work.kv)
        if work.is_over:
            self._stop(work)
        else:
            self._restart(work)

    def _restart(self, work: Prefilling) -> None:
        """The request gives its blocks back and waits, ahead of all others."""
        self.running.remove(work)
        self.kv.free(work.kv)
        work.done, work.preempted = 0, False
        self.waiting.appendleft(work)
