"""Routing: the router of a deployment, told what its engines hold and do."""

from collections.abc import Iterable, Mapping

from attrs import define
from msgspec.structs import replace

from kvflow.engine.api import Request
from kvflow.engine.front.options import FrontOptions
from kvflow.engine.prefill import PrefillEngine
from kvflow.engine.prefix.hashes import HASH_SCHEME, PrefixHasher
from kvflow.router.config import EngineInfo, Load, Role
from kvflow.router.events import KVEvents
from kvflow.router.log import ChainScheme, KVEventLog
from kvflow.router.policy import Route, Router

_NOT_RUNNING = ("waiting", "pulling", "restoring", "preempted")
"""Phases of a decode engine's requests that run next."""


@define(eq=False)
class Routing:
    """`hasher` names the blocks of prompts as every engine does; `log` tells routers elsewhere what
    the engines hold. Both are None if no prefixes are kept."""

    router: Router
    hasher: PrefixHasher | None
    log: KVEventLog | None = None

    @classmethod
    def of(
        cls, options: FrontOptions, prefills: Mapping[str, PrefillEngine], decodes: Iterable[str]
    ) -> "Routing":
        """Over the engines of one deployment, none of which holds anything."""
        router = Router(options.router)
        for name in prefills:
            router.register(_info(name, "prefill", options, options.prefill_kv_tokens))
        tiered = [name for name, engine in prefills.items() if engine.tiers is not None]
        for name in decodes:
            router.register(_info(name, "decode", options, options.decode_kv_tokens, tiered))
        kv = next(iter(prefills.values())).kv
        if not kv.config.enabled:
            return cls(router, None)
        tiers = ("device", *(kv.tiers.units() if kv.tiers is not None else ()))
        room = sum(e.max_kv_tokens for e in router.engines if e.role == "decode")
        scheme = ChainScheme(HASH_SCHEME, kv.hasher.content, options.block_size)
        return cls(router, kv.hasher, KVEventLog(scheme, tiers, room))

    def route(self, work: Request) -> Route:
        """Where a request goes."""
        hashes: tuple[bytes, ...] = ()
        if self.hasher is not None:
            hashes = self.hasher.chain(work.prompt, work.cache_salt).hashes
        return self.router.route(work.request_id, hashes, len(work.prompt))

    def prefilled(self, request_id: str) -> None:
        self.router.prefilled(request_id)

    def ended(self, request_id: str) -> None:
        self.router.ended(request_id)

    def on_events(self, engine: str, events: KVEvents) -> None:
        self.router.on_events(engine, events)
        is_prefill = self.router.account(engine).info.role == "prefill"
        if self.log is not None and (is_prefill or self.router.config.loans):
            self.log.on_events(engine, events)

    def _on_load(self, engine: str, load: Load) -> None:
        """The log's tokens are of the engines that its `max_kv_tokens` is of: those that decode."""
        self.router.on_load(engine, load)
        if self.log is not None:
            if self.router.account(engine).info.role == "prefill":
                load = replace(load, kv_tokens_used=0)
            self.log.on_load(engine, load)

    def prefill_changed(self, engine: PrefillEngine) -> None:
        """A step of a prefill engine has ended, or a reader of its rows, or a move of its tiers."""
        for events in engine.kv.changes():
            self.on_events(engine.name, events)
        self._on_load(engine.name, engine.load())

    def decode_changed(self, engine: str, gauges: Mapping[str, float]) -> None:
        """A decode engine has reported."""
        if "kv_tokens" in gauges:
            waiting = int(sum(gauges[phase] for phase in _NOT_RUNNING))
            load = Load(int(gauges["kv_tokens"]), int(gauges["running"]), waiting)
            self._on_load(engine, load)


def _info(
    name: str, role: Role, options: FrontOptions, kv_tokens: int, tiered: Iterable[str] = ()
) -> EngineInfo:
    tiers = tuple(tiered) if options.is_near(name) else ()
    host = options.host_of(name)
    return EngineInfo(name, role, options.block_size, kv_tokens, host, tiers)
