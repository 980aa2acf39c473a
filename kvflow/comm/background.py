"""Collectives in the background: issued in program order, run one after the other on a thread of
their own, over a channel of their own.

All ranks issue the same jobs in the same order, so the channel's collectives meet whatever the
threads in front do; a rank waits for a job only where it first needs the result.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from attrs import define, field, frozen

from kvflow.comm.protocol import Comm

T = TypeVar("T")
_END_S = 1.0
Job = Callable[[Comm], T]
Clock = Callable[[], float]


@frozen
class JobTimes:
    """Seconds of one clock: when a job was issued, began and ended, and from when until when its
    result was waited for."""

    issued: float
    began: float
    ended: float
    waited_from: float
    waited_until: float


@define(eq=False)
class Pending(Generic[T]):
    """The result of a job that may still run."""

    job: Job[T] | None
    clock: Clock
    issued: float
    _done: threading.Event = field(init=False, factory=threading.Event)
    _result: list[T] = field(init=False, factory=list)
    _error: BaseException | None = field(init=False, default=None)
    _began: float = field(init=False, default=0.0)
    _ended: float = field(init=False, default=0.0)

    def run(self, comm: Comm) -> None:
        """Called once, by whoever runs the job."""
        job, self.job = self.job, None
        self._began = self.clock()
        try:
            if job is not None:
                self._result.append(job(comm))
        except BaseException as error:
            self._error = error
        self._ended = self.clock()
        self._done.set()

    def wait(self) -> tuple[T, JobTimes]:
        """The result, and the job's times. Raises what the job raised."""
        begin = self.clock()
        self._done.wait()
        if self._error is not None:
            raise self._error
        times = JobTimes(self.issued, self._began, self._ended, begin, self.clock())
        return self._result[0], times


class Lane(Protocol):
    """Runs jobs in the order they are issued."""

    @property
    def clock(self) -> Clock: ...

    def issue(self, job: Job[T]) -> Pending[T]: ...


@define(eq=False)
class Inline:
    """A lane without a thread: a job runs when it is issued, over the group itself."""

    comm: Comm
    clock: Clock = time.perf_counter

    def issue(self, job: Job[T]) -> Pending[T]:
        pending = Pending(job, self.clock, self.clock())
        pending.run(self.comm)
        return pending


@define(eq=False)
class Background:
    """A lane with a daemon thread and a channel. The thread ends with the lane."""

    comm: Comm
    """A channel that nobody else uses."""
    clock: Clock = time.perf_counter
    _jobs: "queue.SimpleQueue[Pending[Any] | None]" = field(init=False, factory=queue.SimpleQueue)

    def __attrs_post_init__(self) -> None:
        thread = threading.Thread(
            target=_work, args=(self._jobs, self.comm), name="collectives", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._jobs, thread)

    def issue(self, job: Job[T]) -> Pending[T]:
        pending = Pending(job, self.clock, self.clock())
        self._jobs.put(pending)
        return pending


def _end(jobs: "queue.SimpleQueue[Pending[Any] | None]", thread: threading.Thread) -> None:
    """A daemon that still gives a channel back to torch while the interpreter ends would abort the
    process; one whose peers are gone may never end."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)


def _work(jobs: "queue.SimpleQueue[Pending[Any] | None]", comm: Comm) -> None:
    while (pending := jobs.get()) is not None:
        pending.run(comm)
        del pending
