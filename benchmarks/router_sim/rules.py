"""Rules of routing that are compared: three that know no cache, and kvflow's router."""

from typing import TYPE_CHECKING

from attrs import define, field

from kvflow.router.config import EngineInfo, Load, RouterConfig
from kvflow.router.events import KVEvents
from kvflow.router.policy import Router

from .setting import Choice, Request, Setting

if TYPE_CHECKING:
    from .world import World


@define(eq=False)
class Blind:
    """A rule that hears nothing of caches."""

    late: bool = False

    def on_events(self, engine: str, events: KVEvents) -> None:
        pass

    def on_load(self, engine: str, load: Load) -> None:
        pass

    def prefilled(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


@define(eq=False)
class RoundRobin(Blind):
    count: int = 0

    def choose(self, request: Request, world: "World") -> Choice:
        self.count += 1
        return Choice(self.count % len(world.prefills), self.count % len(world.decoders))


@define(eq=False)
class LeastLoaded(Blind):
    """The prefill engine with the fewest uncached tokens ahead, the decode engine with the fewest
    requests, both as they are at this moment; equal ones in turn."""

    count: int = 0

    def choose(self, request: Request, world: "World") -> Choice:
        self.count += 1
        p, d = len(world.prefills), len(world.decoders)
        prefill = min(
            range(p), key=lambda i: (world.prefills[i].waiting_tokens, (i - self.count) % p)
        )
        decode = min(range(d), key=lambda i: (world.decoders[i].num_running, (i - self.count) % d))
        return Choice(prefill, decode)


@define(eq=False)
class SessionAffinity(Blind):
    """All turns of a session, sub-agents included, go where its number says."""

    def choose(self, request: Request, world: "World") -> Choice:
        return Choice(request.session % len(world.prefills), request.session % len(world.decoders))


@define(eq=False)
class Kvflow:
    """kvflow's router, told of everything late or at once."""

    late: bool
    router: Router = field()

    @classmethod
    def of(cls, setting: Setting, config: RouterConfig, *, late: bool) -> "Kvflow":
        router = Router(config)
        room = 1 << 40
        for i in range(setting.num_prefill):
            router.register(EngineInfo(f"prefill-{i}", "prefill", config.block_size, room, f"p{i}"))
        for i in range(setting.num_decode):
            router.register(EngineInfo(f"decode-{i}", "decode", config.block_size, room, f"d{i}"))
        return cls(late, router)

    def choose(self, request: Request, world: "World") -> Choice:
        route = self.router.route(request.name, request.turn.chain, request.turn.num_tokens)
        loan = route.prefill_loan
        return Choice(
            None if route.prefill is None else number(route.prefill),
            number(route.decode),
            number(loan.lender) if loan else None,
        )

    def on_events(self, engine: str, events: KVEvents) -> None:
        self.router.on_events(engine, events)

    def on_load(self, engine: str, load: Load) -> None:
        self.router.on_load(engine, load)

    def prefilled(self, request: Request) -> None:
        self.router.prefilled(request.name)

    def ended(self, request: Request) -> None:
        self.router.ended(request.name)


def number(engine: str) -> int:
    return int(engine.rpartition("-")[2])
