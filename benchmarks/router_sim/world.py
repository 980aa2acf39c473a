"""The simulated world: sessions that go on, and the engines that serve their turns under a rule."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Protocol

from attrs import define, field

from kvflow.router.config import Load
from kvflow.router.events import KVEvents

from .caches import Tier, Tiers
from .engines import Clock, Engine, Job
from .setting import Choice, Request, Served, Setting
from .traces import Session, Turn


class Rule(Protocol):
    """How requests are routed. `late`: it hears of the engines after the setting's delay."""

    late: bool

    def choose(self, request: Request, world: "World") -> Choice: ...
    def on_events(self, engine: str, events: KVEvents) -> None: ...
    def on_load(self, engine: str, load: Load) -> None: ...
    def prefilled(self, request: Request) -> None: ...
    def ended(self, request: Request) -> None: ...


@define(eq=False)
class World:
    """`served` is what became of the requests whose prompts are computed, `distinct` every block
    of a prompt that came."""

    setting: Setting
    rule: Rule
    sessions: Sequence[Session]
    clock: Clock = field(factory=Clock)
    served: list[Served] = field(factory=list)
    prefills: list[Engine] = field(init=False)
    decoders: list[Engine] = field(init=False)
    distinct: set[bytes] = field(factory=set)
    _num_begun: int = 0
    _num_requests: int = 0

    def __attrs_post_init__(self) -> None:
        s = self.setting
        host = s.tier_tokens // s.block_size // s.num_prefill
        sizes = {"device": int(host * s.device_share), "host": host}
        held = {"device": s.tier_tokens // s.block_size // s.num_decode}
        self.prefills = [
            self._engine(f"prefill-{i}", sizes, s.prefill_rate) for i in range(s.num_prefill)
        ]
        self.decoders = [
            self._engine(f"decode-{i}", held, s.local_rate) for i in range(s.num_decode)
        ]

    def _engine(self, name: str, sizes: dict[str, int], rate: float) -> Engine:
        def tell(events: KVEvents) -> None:
            self._tell(partial(self.rule.on_events, name, events))

        s = self.setting
        tiers = Tiers([Tier(tier, size, tell, s.block_size) for tier, size in sizes.items()])
        return Engine(name, tiers, rate, s.restore_rate, s.pull_rate, self.clock, s.block_size)

    def _tell(self, say: Callable[[], None]) -> None:
        if self.rule.late:
            self.clock.after(self.setting.delay, say)
        else:
            say()

    def run(self) -> "World":
        draw = Random(self.setting.seed)
        for _ in range(self.setting.live):
            self._begin_session(draw)
        for engine in (*self.prefills, *self.decoders):
            self._report(engine)
        self.clock.run(self.setting.seconds)
        return self

    def _report(self, engine: Engine) -> None:
        """Every second an engine says how much it has yet to compute."""
        load = Load(0, engine.num_running, waiting_tokens=engine.waiting_tokens)
        self._tell(partial(self.rule.on_load, engine.name, load))
        self.clock.after(1.0, partial(self._report, engine))

    # --- sessions

    def _begin_session(self, draw: Random | None = None) -> None:
        """The next session, and behind its last turn the next one again. With `draw` it begins at
        a turn of its middle, and within the first minute."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        if number == len(self.sessions):
            raise ValueError(f"{number} sessions are too few for {self.setting.seconds} seconds")
        turns, k = self.sessions[number].turns, 0
        if draw is not None:
            k = draw.randrange(len(turns))
            if k:
                self._preload(number, turns[k - 1])
        begin = partial(self._go_on, number, turns, k, self._begin_session)
        self.clock.after(draw.uniform(0, 60) if draw else 0.0, begin)

    def _preload(self, session: int, turn: Turn) -> None:
        for engines in self.prefills, self.decoders:
            engines[session % len(engines)].tiers.put(turn.chain)

    def _go_on(self, session: int, turns: Sequence[Turn], k: int, then: Callable[[], None]) -> None:
        """Turn k, once its think time is over; `then` behind the last one."""
        if k == len(turns):
            then()
            return
        behind = partial(self._spawn, session, turns, k, then)
        come = partial(self._serve, session, turns[k], behind)
        self.clock.after(turns[k].think if k else 0.0, come)

    def _spawn(self, session: int, turns: Sequence[Turn], k: int, then: Callable[[], None]) -> None:
        """Behind turn k its sub-agents run side by side, and behind them comes the next turn."""
        left = len(turns[k].children)

        def child_ended() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._go_on(session, turns, k + 1, then)

        for child in turns[k].children:
            self._go_on(session, child, 0, child_ended)
        if not turns[k].children:
            child_ended()

    # --- requests

    def _serve(self, session: int, turn: Turn, then: Callable[[], None]) -> None:
        self._num_requests += 1
        self.distinct.update(turn.chain)
        request = Request(str(self._num_requests), session, turn, self.clock.now)
        choice = self.rule.choose(request, self)
        decoder = self.decoders[choice.decode]
        decoder.num_running += 1
        engine = decoder if choice.prefill is None else self.prefills[choice.prefill]
        lender = None if choice.prefill_lender is None else self.decoders[choice.prefill_lender]
        job = Job(turn.chain, turn.num_tokens, lender, lambda: None)
        job.then = partial(self._pull, request, choice, job, then)
        engine.submit(job)

    def _pull(self, request: Request, choice: Choice, job: Job, then: Callable[[], None]) -> None:
        """The decode engine takes what it lacks of a prompt that is computed."""
        decoder, turn = self.decoders[choice.decode], request.turn
        seconds = 0.0
        if choice.prefill is not None:
            missing = turn.num_tokens - decoder.held(turn.chain, turn.num_tokens)
            seconds = missing / self.setting.pull_rate
        self.clock.after(seconds, partial(self._decode, request, choice, job, then))

    def _decode(self, request: Request, choice: Choice, job: Job, then: Callable[[], None]) -> None:
        decoder, turn, s = self.decoders[choice.decode], request.turn, self.setting
        decoder.tiers.put(turn.chain)
        self._tell(partial(self.rule.prefilled, request))
        self.served.append(Served(request, choice, job.uncached, job.computing, self.clock.now))
        step = s.token_time + s.token_time_more * decoder.num_running
        self.clock.after(step * turn.out_tokens, partial(self._end, request, decoder, then))

    def _end(self, request: Request, decoder: Engine, then: Callable[[], None]) -> None:
        decoder.num_running -= 1
        self._tell(partial(self.rule.ended, request))
        then()
