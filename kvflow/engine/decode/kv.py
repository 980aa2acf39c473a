"""DecodeKV: the blocks of a decode engine's requests, and what it keeps of those that have left.

A prefix that the engine knows is shared in whole entries; what lies in entries with room for more
positions is brought anew. So nobody writes into a block that two requests hold.
"""

from collections.abc import Mapping, Sequence

from attrs import define, field

from kvflow.engine.decode.requests import Decoding
from kvflow.engine.prefix.cache import PrefixCache, Tables, Trail
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.prefix.hashes import Chain, PrefixHasher
from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.errors import KvflowError
from kvflow.layouts.identity import ContentIdentity
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.paging import num_entries
from kvflow.router.events import KVEvents


@define(eq=False)
class DecodeKV:
    """`num_blocks` are the pools' sizes by group."""

    layout: KVLayout
    num_blocks: Mapping[str, int]
    config: PrefixConfig
    cache: PrefixCache = field(init=False)
    _hasher: PrefixHasher = field(init=False)
    _loans: dict[str, Tables] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        unit_size = self.config.unit_size(self.layout)
        self.cache = PrefixCache(self.layout, self.num_blocks, unit_size)
        self._hasher = PrefixHasher(
            ContentIdentity.of(self.layout.spec).fingerprint,
            unit_size,
            shifted=bool(self.layout.spec.select(part="mtp")),
        )

    @property
    def pools(self) -> dict[str, SharedBlockPool]:
        return self.cache.pools

    def chain(self, tokens: Sequence[int], salt: str | None) -> Chain:
        """Of no blocks if the engine keeps no prefixes."""
        return self._hasher.chain(tokens if self.config.enabled else (), salt)

    def lacks_a_unit(self, work: Decoding) -> bool:
        """Whether whole blocks of a request's chain are behind what it holds, the last token
        left out."""
        size = self.config.unit_size(self.layout)
        return self.config.enabled and (len(work.tokens) - 1) // size > work.computed // size

    # --- one request's blocks

    def begin(self, work: Decoding, length: int) -> bool:
        """Blocks for `length` positions behind the longest known prefix, which `computed` tells
        afterwards; nothing and False if too few are there."""
        chain = self.chain(work.tokens, work.admit.salt)
        match = self.cache.index.match(chain, len(work.tokens) - 1)
        lease = self.cache.lease(match, length, copies=False)
        if lease is None:
            return False
        work.tables, work.computed = lease.tables, lease.length
        work.trail = Trail.behind(lease.nodes)
        return True

    def grow(self, work: Decoding, length: int) -> bool:
        """Blocks for `length` positions in every group, or nothing and False if too few are
        there."""
        need = self.layout.num_blocks_for(length)
        lacking = {name: max(n - len(work.tables.get(name, ())), 0) for name, n in need.items()}
        if any(n > self.pools[name].num_available for name, n in lacking.items()):
            return False
        for name, n in lacking.items():
            work.tables.setdefault(name, []).extend(self.pools[name].allocate(n))
        return True

    def publish(self, work: Decoding, *, leaves: bool) -> None:
        """What the request has computed is known from now on. The last row's MTP part depends on a
        token that must be known, hence at most all tokens but one; and one that goes on writes it
        once more when it drafts, so its block is nobody else's yet."""
        if not work.may_keep:
            return
        done = min(work.computed, len(work.tokens) - 1) - (not leaves)
        chain = self.chain(work.tokens, work.admit.salt)
        self.cache.publish(chain, work.trail, work.tables, done, None)

    def forget(self, work: Decoding) -> None:
        """Nobody may go by what lies in the request's blocks, that of earlier ones included."""
        work.trail.ended = True
        self.cache.forget(work.tables)

    def give_back(self, work: Decoding) -> None:
        """The request holds nothing any more."""
        self.cache.free(work.tables)
        work.tables, work.trail = {}, Trail()

    def quarantine(self, work: Decoding) -> Tables:
        """A write into the request's blocks may still arrive: they are kept from everybody until
        `end_quarantine`, and the request holds nothing any more."""
        tables = work.tables
        self.cache.hold(tables, "used", "quarantined")
        work.tables, work.trail, work.computed = {}, Trail(), 0
        return tables

    def can_hold(self, length: int) -> bool:
        """Whether the pools have blocks for `length` positions beside those in quarantine, once
        all other requests have left."""
        need = self.layout.num_blocks_for(length)
        pools = self.pools
        return all(
            n <= pools[g].num_blocks - pools[g].count("quarantined") for g, n in need.items()
        )

    def end_quarantine(self, tables: Tables) -> None:
        """No write can arrive any more: the blocks are free."""
        self.cache.free(tables, "quarantined")

    # --- what others read

    def lend(self, loan_id: str, prompt: Sequence[int], salt: str | None) -> tuple[Tables, int]:
        """What is known of a prompt, kept for a reader until `end_loan`."""
        if loan_id in self._loans:
            raise KvflowError(f"loan {loan_id!r} has begun already")
        match = self.cache.index.match(self.chain(prompt, salt), len(prompt) - 1)
        if not match.length:
            return {}, 0
        placement = self.layout.placement
        tables = {
            g.name: match.table(g.name, num_entries(placement, g.paging, match.length))
            for g in self.layout.groups
        }
        for name, ids in tables.items():
            self.pools[name].share(ids)
        self.cache.hold(tables, "used", "pinned")
        self._loans[loan_id] = tables
        return tables, match.length

    def end_loan(self, loan_id: str) -> None:
        """Unknown and ended ones are ignored."""
        self.cache.free(self._loans.pop(loan_id, {}), "pinned")

    def forget_all(self) -> None:
        """No prefix is known any more; blocks that somebody holds stay held."""
        self.cache.index.clear()

    @property
    def is_lending(self) -> bool:
        return bool(self._loans)

    def changes(self) -> KVEvents | None:
        """What came and went since the last call."""
        return self.cache.index.events.drain()

    def audit(self) -> None:
        """Raises `KvflowError` if a block is lost or indexed wrongly."""
        self.cache.audit(idle=False)
