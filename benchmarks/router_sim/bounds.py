"""How level the windows of a run could have been, from what came when and nothing of who chose it.

Prompts are given as they came, with the tokens that were computed of each. Three answers: what no
choice of engines can better, what a search finds that knows all that will come, and what comes of a
rule that knows only what came and heeds no cache.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
from attrs import define, evolve, field, frozen

from .setting import Served

WINDOW = 60.0
AIM = 1.3
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@frozen
class Work:
    """`num_tokens` of a prompt that came at `time`, computed by engine number `engine` between two
    moments."""

    time: float
    num_tokens: int
    engine: int
    begin: float
    end: float

    def within(self, low: float, high: float) -> float:
        """The tokens that are computed between two moments."""
        inside = min(self.end, high) - max(self.begin, low)
        return self.num_tokens * max(0.0, inside) / (self.end - self.begin)


def work_of(served: Sequence[Served], engines: Sequence[str]) -> list[Work]:
    """What named engines computed, in order of coming."""
    found = [
        Work(one.request.time, one.uncached_tokens, engines.index(one.engine), *one.computing)
        for one in served
        if one.engine in engines
    ]
    return sorted(found, key=lambda one: one.time)


def one_prompt(work: Sequence[Work], num_engines: int, start: float, num: int) -> Array:
    """By window, the most tokens that one prompt brings over the mean engine's: with these prompts
    at these times its engine is this far above the mean, even if it computes nothing else."""
    found = np.zeros(num)
    for w in range(num):
        low = start + w * WINDOW
        parts = [one.within(low, low + WINDOW) for one in work]
        found[w] = max(parts) * num_engines / max(sum(parts), 1.0)
    return found


@define(eq=False)
class Search:
    """Puts prompts on engines that compute each at once, or behind those that came to them before,
    at `rate`; then moves one at a time, away from where a window is fullest, and keeps what does
    not make the windows above the aim worse."""

    work: Sequence[Work]
    num_engines: int
    rate: float
    start: float
    num: int
    _homes: list[int] = field(init=False)
    _tokens: Array = field(init=False)  # [engine, window]

    def __attrs_post_init__(self) -> None:
        self._homes = [one.engine for one in self.work]
        self._tokens = np.array([self._run(e) for e in range(self.num_engines)])

    def _run(self, engine: int) -> Array:
        tokens, free = np.zeros(self.num), 0.0
        for one, home in zip(self.work, self._homes, strict=True):
            if home != engine:
                continue
            begin = max(free, one.time)
            free = begin + one.num_tokens / self.rate
            for w in range(self._window(begin), min(self.num, self._window(free) + 1)):
                low = self.start + w * WINDOW
                inside = min(free, low + WINDOW) - max(begin, low)
                tokens[w] += self.rate * max(0.0, inside)
        return tokens

    def _window(self, time: float) -> int:
        return max(0, int((time - self.start) // WINDOW))

    @property
    def ratios(self) -> Array:
        """By window, the busiest engine's tokens over the mean engine's."""
        found: Array = self._tokens.max(axis=0) / np.maximum(self._tokens.mean(axis=0), 1.0)
        return found

    @property
    def _excess(self) -> float:
        return float(np.maximum(self.ratios - AIM, 0.0).sum())

    def run(self, num_moves: int, seed: int = 0) -> Array:
        """The ratios after at most so many moves, fewer once all windows meet the aim."""
        draw = Random(seed)
        for _ in range(num_moves):
            if (before := self._excess) <= 0.0:
                break
            window = int(self.ratios.argmax())
            self._move(draw, window, int(self._tokens[:, window].argmax()), before)
        return self.ratios

    def _move(self, draw: Random, window: int, engine: int, before: float) -> None:
        """Prompts that came in or shortly before the window, the long ones more often."""
        low = self.start + (window - 1) * WINDOW
        near = [
            k
            for k, one in enumerate(self.work)
            if self._homes[k] == engine and low <= one.time < low + 2 * WINDOW
        ]
        (k,) = draw.choices(near, [self.work[k].num_tokens for k in near])
        other = draw.choice([e for e in range(self.num_engines) if e != engine])
        kept = self._tokens.copy()
        self._homes[k] = other
        for e in engine, other:
            self._tokens[e] = self._run(e)
        if self._excess > before:
            self._homes[k], self._tokens = engine, kept


def without_caches(work: Sequence[Work], num_engines: int, rate: float) -> list[Work]:
    """Every prompt, when it comes, to the engine whose fullest window of those that hold that
    moment would be least full, by whole seconds; engines compute as in `Search`. The moments of
    computing are not said again."""
    last = int(work[-1].time + sum(one.num_tokens for one in work) / rate) + 3 * int(WINDOW)
    planned, free = np.zeros((num_engines, last)), np.zeros(num_engines)
    ages = np.arange(0, int(WINDOW), 5)
    found = []
    for one in work:
        now = int(one.time) + int(WINDOW)  # seconds are counted from a window before the first
        summed = planned[:, now - int(WINDOW) : now + int(WINDOW)].cumsum(axis=1)
        held = summed[:, int(WINDOW) - ages + int(WINDOW) - 1] - summed[:, int(WINDOW) - ages - 1]
        begin = np.maximum(free, one.time)
        left = one.time - ages + WINDOW - begin[:, None]
        held += np.minimum(one.num_tokens, rate * np.maximum(left, 0.0))
        home = int(held.max(axis=1).argmin())
        end = begin[home] + one.num_tokens / rate
        for second in range(int(begin[home]), int(end) + 1):
            inside = min(end, second + 1) - max(begin[home], second)
            planned[home, second + int(WINDOW)] += rate * inside
        free[home] = end
        found.append(evolve(one, engine=home))
    return found
