"""The servers behind the front: who is in the rotation, and what each holds.

A server enters when its `/health`, its model and its way to name blocks are right, and leaves when
its health fails or a connection to it does. Whoever leaves takes along what the router knew of it;
whoever enters holds nothing until its events have said so.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from attrs import define, evolve, field, frozen

from kvflow.engine.api import Metric, Sample
from kvflow.engine.prefix.hashes import HASH_SCHEME, PrefixHasher
from kvflow.errors import KvflowError
from kvflow.router.config import EngineInfo, RouterConfig
from kvflow.router.events import KVEvents
from kvflow.router.front.feed import FeedBroken, NoFeed, Told, open_feed
from kvflow.router.front.http import Address, ServerLost
from kvflow.router.front.metrics import FrontMetrics
from kvflow.router.front.probe import check_health, served_models
from kvflow.router.log import ChainScheme
from kvflow.router.policy import Route, Router
from kvflow.server.events import Begin, Changed, Held, LoadSaid, SnapshotEnd

_log = logging.getLogger(__name__)

_SALT_FIELD = "cache_salt"
_UNKNOWN = 2**62


class Unfit(KvflowError):  # noqa: N818
    """A server that is well but does not belong into this rotation."""


class NoServer(KvflowError):  # noqa: N818
    """No server is in the rotation."""


@frozen
class FleetConfig:
    """Times in seconds. `router`: the costs; its block size is that of the servers."""

    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    feed_retry_s: float = 0.5
    feed_silence_s: float = 30.0
    router: RouterConfig = field(factory=lambda: RouterConfig(block_size=1))


class Chained(NamedTuple):
    """The full blocks of a prompt, named by a scheme."""

    scheme: ChainScheme | None
    hashes: tuple[bytes, ...]


NO_CHAIN = Chained(None, ())


@define(eq=False)
class Member:
    """A server. `trouble` is why it is not in the rotation, None when it is; `num_entered` how
    often it came in. `scheme` None: it says no KV events."""

    address: Address
    trouble: str | None = "it was not asked yet"
    num_entered: int = 0
    max_model_len: int = 0
    max_kv_tokens: int = _UNKNOWN
    scheme: ChainScheme | None = None
    nudge: asyncio.Event = field(factory=asyncio.Event)
    feed: "asyncio.Task[None] | None" = None

    @property
    def name(self) -> str:
        return self.address.url


def _addresses(urls: Sequence[str]) -> dict[str, Member]:
    members = [Member(Address(url)) for url in urls]
    named = {member.name: member for member in members}
    if not named or len(named) != len(members):
        raise KvflowError(f"servers {list(urls)}: at least one, and no one twice")
    return named


@define(eq=False)
class Fleet:
    """Servers of one model. `router` is there as long as servers are; all that are in it name
    blocks by `scheme`, the first one's, or say no events."""

    model: str
    members: dict[str, Member] = field(converter=_addresses)
    config: FleetConfig = field(factory=FleetConfig)
    metrics: FrontMetrics = field(factory=FrontMetrics)
    router: Router = field(init=False)
    scheme: ChainScheme | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.router = Router(self.config.router)
        for name in self.members:
            self.metrics.know(name)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Servers are watched for as long as the block runs."""
        tasks = [asyncio.create_task(self._watch(member)) for member in self.members.values()]
        try:
            yield
        finally:
            feeds = [member.feed for member in self.members.values() if member.feed is not None]
            for task in (*tasks, *feeds):
                task.cancel()
            await asyncio.gather(*tasks, *feeds, return_exceptions=True)

    # --- questions

    @property
    def rotation(self) -> list[Member]:
        return [member for member in self.members.values() if member.trouble is None]

    @property
    def max_model_len(self) -> int:
        """What every server in the rotation takes. Raises `NoServer` if there is none."""
        return min(member.max_model_len for member in self._some())

    def _some(self) -> list[Member]:
        if rotation := self.rotation:
            return rotation
        reasons = "; ".join(f"{m.name}: {m.trouble}" for m in self.members.values())
        raise NoServer(f"no server is in the rotation: {reasons}")

    def chain(self, prompt: Sequence[int], salt: str | None) -> Chained:
        """The names of a prompt's full blocks; none while no server has said how it names them."""
        scheme = self.scheme
        if scheme is None:
            return NO_CHAIN
        hasher = PrefixHasher(scheme.content, scheme.block_size)
        return Chained(scheme, hasher.chain(prompt, salt).hashes)

    def route(self, request_id: str, chain: Chained, num_tokens: int) -> Route:
        """The router's choice, in flight until `router.ended`. Raises `NoServer`, and what
        `Router.route` does."""
        self._some()
        hashes = chain.hashes if chain.scheme == self.scheme else ()
        return self.router.route(request_id, hashes, num_tokens)

    # --- in and out

    async def _watch(self, member: Member) -> None:
        config = self.config
        while True:
            member.nudge.clear()
            try:
                async with asyncio.timeout(config.health_timeout_s):
                    await check_health(member.address, config.connect_timeout_s)
                    if member.trouble is not None:
                        await self._enter(member)
            except TimeoutError:
                self.leave(member.name, f"no answer within {config.health_timeout_s} s")
            except KvflowError as error:
                self.leave(member.name, str(error))
            except Exception as error:
                _log.exception("%s: internal error", member.name)
                self.leave(member.name, f"internal error: {error!r}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(member.nudge.wait(), config.health_interval_s)

    def numbers(self) -> list[Metric]:
        """Who is in the rotation, what each holds, and what of their events was of no use."""
        index = self.router.index
        inside = [
            Sample(float(one.trouble is None), {"server": name})
            for name, one in self.members.items()
        ]
        held = [
            Sample(float(index.num_blocks(one.name, tier)), {"server": one.name, "tier": tier})
            for one in self.rotation
            for tier in index.tiers
        ]
        ignored = [Sample(float(n), {"reason": why}) for why, n in sorted(index.counts.items())]
        said = (
            ("server_in_rotation", "1 for a server that gets calls, else 0.", inside),
            ("server_held_blocks", "Blocks that a server holds, as its events told.", held),
            ("ignored_events_total", "Events that say nothing about a prefix.", ignored),
        )
        return [
            Metric(
                f"kvflow_router_{name}", text, "counter" if "total" in name else "gauge", samples
            )
            for name, text, samples in said
        ]

    def lost(self, name: str, entry: int, why: str) -> None:
        """A call's connection broke: the server leaves, unless it came in anew since the call went
        to it, when `num_entered` was `entry`."""
        if self.members[name].num_entered == entry:
            self.leave(name, why)

    def leave(self, name: str, why: str) -> None:
        """A server is out of the rotation, and nothing it held is known; it is asked again soon."""
        member = self.members[name]
        if member.feed is not None:
            member.feed.cancel()
            member.feed = None
        if why != member.trouble:
            _log.warning("%s is out of the rotation: %s", name, why)
        if member.trouble is None:
            self.metrics.departures.add(1, name)
            self.router.unregister(name)
            member.nudge.set()
        member.trouble = why

    async def _enter(self, member: Member) -> None:
        """Adds a server that is well. Raises `Unfit` if it does not belong here."""
        cards = await served_models(member.address, self.config.connect_timeout_s)
        if self.model not in cards:
            raise Unfit(f"it serves {sorted(cards)}, not {self.model!r}")
        member.max_model_len = cards[self.model].max_model_len
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.feed = asyncio.create_task(self._follow(member, entered))
        await entered

    def _admit(self, member: Member, begin: Begin | None) -> None:
        member.scheme = begin.scheme if begin else None
        member.max_kv_tokens = begin.max_kv_tokens if begin else _UNKNOWN
        self._agree(member)
        self.router.register(self._info(member))
        member.trouble = None
        member.num_entered += 1
        _log.info("%s is in the rotation", member.name)

    def _info(self, member: Member) -> EngineInfo:
        size = self.router.config.block_size
        if member.scheme is not None:
            size = member.scheme.block_size
        return EngineInfo(member.name, "both", size, member.max_kv_tokens, member.address.host)

    def _agree(self, member: Member) -> None:
        """One way to name blocks for all; it is free while no server in the rotation has one."""
        scheme = member.scheme
        if scheme is None or scheme == self.scheme:
            return
        if (scheme.hashing, scheme.salt_field) != (HASH_SCHEME, _SALT_FIELD):
            raise Unfit(
                f"it names blocks by {scheme.hashing!r} salted with {scheme.salt_field!r}, this "
                f"router by {HASH_SCHEME!r} salted with {_SALT_FIELD!r}"
            )
        if any(other.scheme is not None for other in self.rotation):
            raise Unfit(f"it names blocks by {scheme}, the rotation by {self.scheme}")
        self.scheme = scheme
        self.router = Router(evolve(self.config.router, block_size=scheme.block_size))
        for other in self.rotation:
            self.router.register(self._info(other))

    # --- what they hold

    async def _follow(self, member: Member, entered: "asyncio.Future[None]") -> None:
        """Lets a server in, and reads its events for as long as it is in the rotation. A broken
        stream is begun anew; in between the server is believed to hold nothing."""
        while True:
            try:
                await self._read_feed(member, entered)
            except (FeedBroken, ServerLost) as error:
                if not entered.done():
                    entered.set_exception(error)
                    return
                _log.warning("%s: its KV events broke off: %s", member.name, error)
            except Exception as error:  # it does not belong here, or this is our own mistake
                if not isinstance(error, KvflowError):
                    _log.exception("%s: internal error", member.name)
                if not entered.done():
                    entered.set_exception(error)
                else:
                    self.leave(member.name, str(error))
                return
            if member.scheme is None:
                return
            self.metrics.feed_failures.add(1, member.name)
            for tier in self.router.index.tiers:
                self.router.on_events(member.name, KVEvents(tier, cleared=True))
            await asyncio.sleep(self.config.feed_retry_s)

    async def _read_feed(self, member: Member, entered: "asyncio.Future[None]") -> None:
        config = self.config
        opened = open_feed(
            member.address,
            connect_timeout_s=config.connect_timeout_s,
            silence_s=config.feed_silence_s,
        )
        try:
            async with opened as (begin, told):
                if not entered.done():
                    self._admit(member, begin)
                    entered.set_result(None)
                elif begin.scheme != member.scheme:
                    raise Unfit(f"it names blocks by {begin.scheme} now")
                async for one in told:
                    self._take(member, one)
            raise FeedBroken("the server ended the stream")
        except NoFeed:
            if entered.done():
                raise
            self._admit(member, None)
            entered.set_result(None)

    def _take(self, member: Member, told: Told) -> None:
        match told:
            case Held(events) | Changed(_, events):
                if events.tier in self.router.index.tiers:
                    self.router.on_events(member.name, events)
            case SnapshotEnd():
                self.metrics.snapshots.add(1, member.name)
            case LoadSaid(load):
                self.router.on_load(member.name, load)
