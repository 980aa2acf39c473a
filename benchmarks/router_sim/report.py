"""What a run of the world is worth: hits, the balance of load, and time to first token."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from .bounds import Search, one_prompt, without_caches, work_of
from .setting import Served
from .world import World

WINDOW = 60.0
NUM_MOVES = 2000


Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@frozen(eq=False)
class Report:
    """Of the requests that came behind the warm-up: tokens of their prompts, and those that no
    engine computed. `computed` and `sent` are tokens by window and prefill engine: computed in it,
    and of the requests that came in it. By window, `alone` is its largest prompt over the mean
    engine's tokens, `levelled` the ratio that a search reaches which knows all that comes,
    `uncaring` that of a rule that knows what came and heeds no cache."""

    num_requests: int
    prompt_tokens: int
    hit_tokens: int
    computed: Array
    sent: Array
    utilisation: float
    ttft: Array
    num_loans: int
    num_local: int
    alone: Array
    levelled: Array
    uncaring: Array

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def load_ratio(self) -> float:
        """The busiest engine's tokens over the mean engine's, of the whole time."""
        total = self.computed.sum(axis=0)
        return float(total.max() / total.mean())


def ratios(tokens: Array) -> Array:
    """The busiest engine's tokens over the mean engine's, window by window."""
    found: Array = tokens.max(axis=1) / np.maximum(tokens.mean(axis=1), 1e-9)
    return found


def report(world: World) -> Report:
    s, start = world.setting, world.setting.warm_up
    served = [one for one in world.served if one.request.time >= start]
    prompts = sum(one.request.turn.num_tokens for one in served)
    names = [engine.name for engine in world.prefills]
    work = computed(world.served, names, start, s.seconds)
    given, num = work_of(world.served, names), len(work)
    measured = len(names), s.prefill_rate, start, num
    search = Search(given, *measured)
    return Report(
        len(served),
        prompts,
        prompts - sum(one.uncached_tokens for one in served),
        work,
        sent(served, names, start, s.seconds),
        float(work.mean() / (s.prefill_rate * WINDOW)),
        np.array([one.first_token - one.request.time for one in served]),
        sum(one.choice.prefill_lender is not None for one in served),
        sum(one.choice.prefill is None for one in served),
        one_prompt(given, len(names), start, num),
        search.run(NUM_MOVES),
        Search(without_caches(given, len(names), s.prefill_rate), *measured).ratios,
    )


def computed(served: Sequence[Served], engines: Sequence[str], start: float, stop: float) -> Array:
    """Tokens that engines compute in every whole window of [start, stop): [window, engine]. What
    is computed over several windows counts in each by time."""
    found = np.zeros((int((stop - start) // WINDOW), len(engines)))
    for one in served:
        begin, end = one.computing
        if one.engine not in engines or end <= start:
            continue
        per_second = one.uncached_tokens / (end - begin)
        first = max(0, int((begin - start) // WINDOW))
        for w in range(first, min(len(found), int((end - start) // WINDOW) + 1)):
            low, high = start + w * WINDOW, start + (w + 1) * WINDOW
            within = min(end, high) - max(begin, low)
            found[w, engines.index(one.engine)] += per_second * max(0.0, within)
    return found


def sent(served: Sequence[Served], engines: Sequence[str], start: float, stop: float) -> Array:
    """Tokens to compute of the requests that came in every whole window: [window, engine]."""
    found = np.zeros((int((stop - start) // WINDOW), len(engines)))
    for one in served:
        w = int((one.request.time - start) // WINDOW)
        if one.engine in engines and w < len(found):
            found[w, engines.index(one.engine)] += one.uncached_tokens
    return found
