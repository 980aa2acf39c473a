"""PrefillKV: the blocks of a prefill engine's requests, and what is known of their rows elsewhere.

Pools, index and tiers behind one door. Everything is decided in the front; a step tells ranks what
to copy and load before they compute and what to store behind, and only when all have answered is
what they wrote found, and what they read given up.
"""

from collections import Counter
from collections.abc import Mapping

from attrs import define, field

from kvflow.engine.api import Request
from kvflow.engine.messages import BlockCopy, UnitRows
from kvflow.engine.prefix.cache import Lease, PrefixCache, Tables, Trail
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.hashes import Chain, PrefixHasher
from kvflow.engine.prefix.pool import Holding
from kvflow.engine.tiers.manager import Tiers, num_in
from kvflow.layouts.identity import ContentIdentity
from kvflow.layouts.layout import KVLayout
from kvflow.router.events import KVEvents


@define(eq=False)
class RequestKV:
    """What one request holds. `sources` (blocks) and the units of `load` are held until its first
    step has read them, `stores` (units by block) until the step that writes them has ended,
    `fetched` (units, those `from_disk` among them) until it begins.
    `num_reused` counts prompt tokens by the tier that knew them when it was first admitted; what it
    finds again after a preemption is its own work (`has_computed`) and changes that no more."""

    chain: Chain
    length: int
    lease: Lease = field(factory=lambda: Lease({}))
    sources: Tables = field(factory=dict)
    load: UnitRows | None = None
    stores: dict[int, int] = field(factory=dict)
    fetched: list[int] = field(factory=list)
    from_disk: set[int] = field(factory=set)
    trail: Trail = field(factory=Trail)
    holding: Holding = "used"
    begun: bool = False
    has_computed: bool = False
    num_reused: dict[str, int] = field(factory=dict)
    is_short: bool = False
    """The last known row was made with another token behind it: it is computed anew."""

    @property
    def tables(self) -> Tables:
        return self.lease.tables

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused, from all tiers."""
        return sum(self.num_reused.values())


@define(eq=False)
class PrefillKV:
    """`num_blocks` are the pools' sizes by group. `num_reused` counts the tokens that finished
    requests were told to have been reused, by tier."""

    layout: KVLayout
    num_blocks: Mapping[str, int]
    config: PrefixConfig
    tiers: Tiers | None = None
    cache: PrefixCache = field(init=False)
    num_reused: "Counter[str]" = field(init=False)
    num_short_hits: int = field(init=False, default=0)
    num_refused_loads: int = field(init=False, default=0)
    hasher: PrefixHasher = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.cache = PrefixCache(self.layout, self.num_blocks, self.config.unit_size(self.layout))
        tiers = self.tiers.units() if self.tiers is not None else ()
        self.num_reused = Counter(dict.fromkeys(("device", *tiers, "peer"), 0))
        self.hasher = PrefixHasher(
            ContentIdentity.of(self.layout.spec).fingerprint,
            self.config.unit_size(self.layout),
            shifted=bool(self.layout.spec.select(part="mtp")),
        )

    def of(self, request: Request) -> RequestKV:
        """A request that holds nothing yet."""
        known = request.prompt if self.config.enabled else ()
        return RequestKV(self.hasher.chain(known, request.cache_salt), len(request.prompt))

    async def fetch(self, kv: RequestKV) -> None:
        """Brings what only files know of the request's prefix into the host tier."""
        if self.tiers is not None:
            match = self.cache.index.match(kv.chain, kv.length - 1)
            units, fresh = await self.tiers.fetch(kv.chain, match.num_exact, kv.length - 1)
            kv.fetched, kv.from_disk = units, fresh

    def begin(self, kv: RequestKV) -> int | None:
        """Gives a request its blocks, behind the longest prefix that the pools and then the host
        tier know. Returns the first position that it must compute; None, and nothing is held, if
        there is no room."""
        match = self.cache.index.match(kv.chain, kv.length - 1)
        load = self._units_behind(kv, match.num_exact * kv.chain.block_size)
        if load is not None and load.stop > match.length:
            match = match.exact()
        else:
            load = None
        lease = self.cache.lease(match, kv.length)
        if lease is None:
            return None
        if lease.length < match.length:  # what was to be loaded would leave a gap
            load = self._units_behind(kv, lease.length)
        kv.lease, kv.sources, kv.load = lease, lease.sources, load
        kv.trail = Trail.behind(lease.nodes)
        if not kv.has_computed:
            kv.num_reused = {"device": lease.length} | _by_tier(load, kv)
            kv.is_short = match.is_short and lease.length == match.length
            if load is not None:
                kv.is_short = load.stop - load.start < len(load.units) * kv.chain.block_size
        if self.tiers is not None and load is not None:
            self.tiers.host.pin(load.units)
        self._end_fetch(kv)
        return load.stop if load is not None else lease.length

    def _units_behind(self, kv: RequestKV, length: int) -> UnitRows | None:
        """The units that hold what follows the first `length` positions, if these end a block."""
        first, beyond = divmod(length, kv.chain.block_size)
        if self.tiers is None or beyond:
            return None
        return self.tiers.match(kv.chain, first, kv.length - 1)

    def moves(
        self, kv: RequestKV, start: int, stop: int
    ) -> tuple[BlockCopy | None, UnitRows | None, list[UnitRows]]:
        """What ranks copy, load and store around the computation of [start, stop)."""
        begins, kv.begun = not kv.begun, True
        store: list[UnitRows] = []
        if self.tiers is not None:
            first = 0 if begins else start // kv.chain.block_size
            kv.stores = self.tiers.begin_stores(kv.chain, first, stop)
            store = self.tiers.rows_of(kv.chain, kv.stores)
        return (kv.lease.copy, kv.load, store) if begins else (None, None, store)

    def end_step(self, kv: RequestKV, done: int, sampled: int | None) -> None:
        """Every rank has answered: the positions below `done` are known from now on, in the pools
        and in units."""
        kv.has_computed = True
        self.cache.publish(kv.chain, kv.trail, kv.tables, done, sampled)
        if self.tiers is not None:
            if kv.trail.ended:
                self.tiers.drop_stores(kv.stores)
            else:
                self.tiers.end_stores(kv.chain, kv.stores, sampled)
        kv.stores = {}
        self._end_reads(kv)

    def refuse_load(self, kv: RequestKV) -> None:
        """The units that the request has read were not what they were taken for: they are
        forgotten, and nothing that was computed behind them is kept."""
        self.num_refused_loads += 1
        if self.tiers is not None:
            if kv.load is not None:
                self.tiers.host.forget(kv.load.units)
            self.tiers.drop_stores(kv.stores)
        kv.stores = {}

    def forget(self, kv: RequestKV) -> None:
        """What lies in the request's blocks is known no more, in no tier, that of earlier requests
        included."""
        kv.trail.ended = True
        self.cache.forget(kv.tables)
        if self.tiers is not None:
            self.tiers.forget(kv.chain)

    def borrowed(self, kv: RequestKV, num_tokens: int) -> None:
        """So many positions behind what was known came from another engine."""
        if not kv.has_computed:
            kv.num_reused = kv.num_reused | {"peer": num_tokens}

    def readable(self, kv: RequestKV, done: int) -> int:
        """Of the first `done` positions, known before the first step, those whose rows are in the
        request's blocks already: copies come with that step, and so do loads, after which the
        request may have to begin anew."""
        if kv.load is not None:
            return 0
        if kv.lease.copy is not None:
            done = min(
                done, *(first for spans in kv.lease.copy.spans.values() for first, _ in spans)
            )
        return done

    def pin(self, kv: RequestKV) -> None:
        """The prompt is computed; its blocks wait for a reader."""
        self.cache.hold(kv.tables, "used", "pinned")
        kv.holding = "pinned"

    def count(self, kv: RequestKV) -> None:
        """Its reuse is told to whoever asked."""
        self.num_reused.update(kv.num_reused)
        self.num_short_hits += kv.is_short

    def free(self, kv: RequestKV) -> None:
        """Gives everything back; no step with the request runs. It may begin again."""
        self._end_reads(kv)
        self._end_fetch(kv)
        if self.tiers is not None:
            self.tiers.drop_stores(kv.stores)
        kv.stores = {}
        self.cache.free(kv.tables, kv.holding)
        kv.lease, kv.trail, kv.holding, kv.begun = Lease({}), Trail(), "used", False

    def _end_reads(self, kv: RequestKV) -> None:
        self.cache.free(kv.sources)
        kv.sources = {}
        if self.tiers is not None and kv.load is not None:
            self.tiers.host.unpin(kv.load.units)
        kv.load = None

    def _end_fetch(self, kv: RequestKV) -> None:
        if self.tiers is not None:
            self.tiers.host.unpin(kv.fetched)
        kv.fetched, kv.from_disk = [], set()

    def reset(self) -> dict[str, int]:
        """Forgets every prefix; returns how many blocks of tokens each tier forgot. Rows of
        requests that have begun are indexed no more only if their `trail` is ended."""
        kept = self.tiers.clear() if self.tiers is not None else {}
        return {"device": self.cache.index.clear(), **kept}

    def changes(self) -> list[KVEvents]:
        """What came to each tier and went since the last call."""
        buffers = [self.cache.index.events]
        if self.tiers is not None:
            buffers += self.tiers.buffers
        return [events for buffer in buffers if (events := buffer.drain()) is not None]

    def audit(self, *, idle: bool) -> None:
        """Raises `KvflowError` if a block or unit is lost, indexed wrongly, or held although the
        engine is `idle`."""
        self.cache.audit(idle=idle)
        if self.tiers is not None:
            self.tiers.host.audit(idle=idle and not self.tiers.num_under_way)


def _by_tier(load: UnitRows | None, kv: RequestKV) -> dict[str, int]:
    """Loaded tokens by the tier that knew them when the request came."""
    if load is None:
        return {}
    disk = num_in(load, kv.chain.block_size, kv.from_disk)
    return {"host": load.stop - load.start - disk, "disk": disk}
