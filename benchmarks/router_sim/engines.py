"""Simulated engines: queues, rates and tiers."""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from attrs import define, field

from .caches import Chain, Tiers


@define(eq=False)
class Clock:
    """Things that happen, in order of their time; at equal times in the order they were planned."""

    now: float = 0.0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(factory=list)
    _count: int = 0

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._heap, (self.now + seconds, self._count, happens))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] < until:
            self.now, _, happens = heappop(self._heap)
            happens()


@define(eq=False)
class Engine:
    """Computes prompts one after the other at `rate` tokens per second."""

    name: str
    tiers: Tiers
    rate: float
    restore_rate: float
    pull_rate: float
    clock: Clock
    block_size: int
    num_running: int = 0
    _jobs: deque["Job"] = field(factory=deque)
    _current: "Job | None" = None

    def held(self, chain: Chain, num_tokens: int) -> int:
        """Tokens of a prompt that need not be computed here; the last one always is."""
        return min(sum(self.tiers.held(chain).values()) * self.block_size, num_tokens - 1)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute of all prompts that came, as the tiers are now."""
        left = 0
        if self._current is not None:
            left = int(self.rate * max(0.0, self._current.computing[1] - self.clock.now))
        return left + sum(job.num_tokens - self.known(job) for job in self._jobs)

    def known(self, job: "Job") -> int:
        """Tokens of a prompt that are not computed here: held, or lent by another."""
        lent = job.lender.held(job.chain, job.num_tokens) if job.lender else 0
        return max(lent, self.held(job.chain, job.num_tokens))

    def submit(self, job: "Job") -> None:
        """What is held of a prompt, here and by its lender, is in use from now on."""
        self.tiers.touch(job.chain)
        if job.lender is not None:
            job.lender.tiers.touch(job.chain)
        self._jobs.append(job)
        self._start()

    def _start(self) -> None:
        if self._current or not self._jobs:
            return
        self._current = job = self._jobs.popleft()
        known, restored = self.known(job), self.tiers.held(job.chain).get("host", 0)
        job.uncached = job.num_tokens - known
        moving = restored * self.block_size / self.restore_rate
        moving += (known - self.held(job.chain, job.num_tokens)) / self.pull_rate
        computing = job.uncached / self.rate
        job.computing = (self.clock.now + moving, self.clock.now + moving + computing)
        self.clock.after(moving + computing, lambda: self._done(job))

    def _done(self, job: "Job") -> None:
        self.tiers.put(job.chain)
        self._current = None
        job.then()
        self._start()


@define(eq=False)
class Job:
    """A prompt to compute, then to call `then`. What an engine finds out about it is put here."""

    chain: Sequence[bytes]
    num_tokens: int
    lender: Engine | None
    then: Callable[[], None]
    uncached: int = 0
    computing: tuple[float, float] = (0.0, 0.0)
