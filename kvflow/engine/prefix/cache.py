"""PrefixCache: the device pools of a prefill engine, and the index of what lies in them."""

from collections.abc import Mapping, Sequence
from functools import partial

from attrs import define, field, frozen

from kvflow.engine.messages import BlockCopy
from kvflow.engine.prefix.hashes import Chain
from kvflow.engine.prefix.index import Match, Named, Node, PrefixIndex
from kvflow.engine.prefix.pool import Holding, SharedBlockPool
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.paging import num_entries, num_full_entries, open_spans
from kvflow.router.events import EventBuffer

Tables = dict[str, list[int]]


@frozen(eq=False)
class Lease:
    """The blocks of one request. Its first `length` positions lie in the pools already: in entries
    that are shared, and in rows that `copy` brings into entries of its own. `sources` are held for
    that copy alone. `nodes` are those of the match whose entries are all shared."""

    tables: Tables
    length: int = 0
    copy: BlockCopy | None = None
    sources: Tables = field(factory=dict)
    nodes: Sequence[Node] = ()


@define(eq=False)
class Trail:
    """How far the blocks of a request are indexed: the node of its last indexed block, and how
    many there are. `ended`: the rest of its chain cannot be indexed."""

    node: Node | None = None
    num_blocks: int = 0
    ended: bool = False

    @classmethod
    def behind(cls, nodes: Sequence[Node]) -> "Trail":
        """Behind nodes whose blocks the request shares."""
        return cls(nodes[-1], len(nodes)) if nodes else cls()


@define(eq=False)
class PrefixCache:
    """Every block of the pools, by group; `num_blocks` is how many there are, `unit_size` the
    tokens of a block of chains."""

    layout: KVLayout
    num_blocks: Mapping[str, int]
    unit_size: int = 1
    pools: dict[str, SharedBlockPool] = field(init=False)
    index: PrefixIndex = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pools = {name: SharedBlockPool(n) for name, n in self.num_blocks.items()}
        self.index = PrefixIndex(self.pools, EventBuffer("device", self.unit_size))
        for name, pool in self.pools.items():
            pool.on_evict = partial(self.index.drop, name)

    # --- blocks of requests

    def lease(self, match: Match, length: int, *, copies: bool = True) -> Lease | None:
        """Blocks for a request of `length` tokens that begins with a match. Without `copies`, or
        if there is no room for the sources of a copy beside its own blocks, it is given whole
        shared entries only. None, and nothing is held, if there is no room for it at all."""
        found = self._lease(match, length, copies=True) if copies else None
        return found or self._lease(match, length, copies=False)

    def _lease(self, match: Match, length: int, *, copies: bool) -> Lease | None:
        reused = match.length if copies else self._closed(match.length)
        spans = self.spans(reused)
        shared: Tables = {}
        sources: Tables = {}
        for group in self.layout.groups:
            entries = num_entries(self.layout.placement, group.paging, reused)
            full = num_full_entries(self.layout.placement, group.paging, reused)
            known = match.table(group.name, entries)
            shared[group.name], sources[group.name] = known[:full], known[full:]
        held = {name: [*shared[name], *sources[name]] for name in shared}
        for name, ids in held.items():
            self.pools[name].share(ids)
        need = {
            name: n - len(shared[name]) for name, n in self.layout.num_blocks_for(length).items()
        }
        if any(self.pools[name].num_available < n for name, n in need.items()):
            self.free(held)
            return None
        tables = {name: [*shared[name], *self.pools[name].allocate(n)] for name, n in need.items()}
        copy = BlockCopy(spans, held) if spans else None
        return Lease(tables, reused, copy, sources, _shared(match, shared))

    def _closed(self, length: int) -> int:
        """The most positions, at most `length`, whose entries have slots for no other."""
        while spans := self.spans(length):
            length = min(first for (first, _), *_ in spans.values())
        return length

    def spans(self, length: int) -> dict[str, list[tuple[int, int]]]:
        """The positions below `length` in entries that also have others, by group; groups
        without any are left out."""
        found = {
            g.name: open_spans(self.layout.placement, g.paging, length) for g in self.layout.groups
        }
        return {name: spans for name, spans in found.items() if spans}

    def hold(self, tables: Tables, before: Holding, after: Holding) -> None:
        for name, ids in tables.items():
            self.pools[name].hold(ids, before, after)

    def free(self, tables: Tables, holding: Holding = "used") -> None:
        for name, ids in tables.items():
            self.pools[name].free(ids, holding)

    # --- what lies in them

    def publish(
        self, chain: Chain, trail: Trail, tables: Tables, done: int, sampled: int | None
    ) -> None:
        """Indexes the blocks of a request whose first `done` positions are computed. The last
        one's rows may depend on a token that nobody has sampled: then it is left out."""
        if trail.node is not None and trail.node not in self.index:
            trail.node, trail.num_blocks = None, 0  # it was forgotten in the meantime
        while not trail.ended and trail.num_blocks < len(chain):
            k = trail.num_blocks
            if chain.stop(k) > done:
                return
            try:
                following = chain.following(k, sampled)
            except LookupError:
                return
            named = {g.name: self._named(g.name, chain, k, tables) for g in self.layout.groups}
            node = self.index.add(chain, k, following, trail.node, named)
            if node is None:
                trail.ended = True
                return
            trail.node, trail.num_blocks = node, k + 1

    def forget(self, tables: Tables) -> None:
        """Nothing is known of what lies in these blocks; whoever holds them keeps them."""
        for group, ids in tables.items():
            for block_id in ids:
                self.index.drop(group, block_id)

    def _named(self, group: str, chain: Chain, k: int, tables: Tables) -> Named:
        """The entries of a group that are filled while block k is computed."""
        paging, placement = self.layout.group(group).paging, self.layout.placement
        first = num_full_entries(placement, paging, chain.stop(k) - chain.block_size)
        stop = num_entries(placement, paging, chain.stop(k))
        return Named(first, tuple(tables[group][first:stop]))

    @property
    def num_evicted(self) -> int:
        """Cached blocks that were given away again."""
        return sum(pool.num_evicted for pool in self.pools.values())

    def audit(self, *, idle: bool) -> None:
        """Raises `KvflowError` if a block is lost, held although nobody is there (`idle`), or
        indexed wrongly."""
        for name, pool in self.pools.items():
            pool.audit()
            if idle and pool.num_available != pool.num_blocks:
                raise KvflowError(
                    f"group {name!r}: idle with {pool.num_free} free and {pool.count('cached')} "
                    f"cached of {pool.num_blocks} blocks"
                )
        self.index.audit()


def _shared(match: Match, shared: Tables) -> Sequence[Node]:
    """The first nodes of a match, as far as whole entries hold them."""
    n = match.num_exact
    while n and any(
        named.first + len(named.ids) > len(shared[group])
        for group, named in match.nodes[n - 1].named.items()
    ):
        n -= 1
    return match.nodes[:n]
