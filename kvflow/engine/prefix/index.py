"""PrefixIndex: which blocks of the device pools hold the rows of which chain of token blocks.

A node stands for one block of a chain. It names, group by group, the ids of the block-table
entries that are being filled while its tokens are computed. Law: an id that a node names for an
entry holds the right rows of every position of that entry up to the node's end. So for a chain of
matched nodes the last one that names an entry has the most of it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from attrs import define, field

from kvflow.engine.prefix.hashes import Chain
from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.errors import KvflowError
from kvflow.router.events import EventBuffer


class Named(NamedTuple):
    """Block ids of the entries ``[first, first + len(ids))`` of one group's table."""

    first: int
    ids: tuple[int, ...]


@define(eq=False)
class Node:
    """One block of a chain. `following`: the token that its last row was made with, None where
    rows do not depend on it. `tokens` and `label`, which hashes do not decide, prove a hit."""

    hash: bytes
    following: int | None
    tokens: bytes
    label: bytes
    parent: "Node | None"
    named: Mapping[str, Named]
    children: "set[Node]" = field(factory=set, repr=False)


@define(eq=False)
class Match:
    """The nodes of a prompt's longest known prefix and its `length` in tokens: a multiple of the
    block size, or one less if the last node's last row was made with another token."""

    nodes: list[Node]
    length: int
    block_size: int

    @property
    def num_exact(self) -> int:
        """Blocks that are reused whole."""
        return self.length // self.block_size

    @property
    def is_short(self) -> bool:
        """The last row was made with another token."""
        return self.num_exact < len(self.nodes)

    def exact(self) -> "Match":
        """The match without a last node that is not reused whole."""
        n = self.num_exact
        return Match(self.nodes[:n], n * self.block_size, self.block_size)

    def table(self, group: str, num_entries: int) -> list[int]:
        """The ids that hold the first entries of a group: of each, the one with the most rows."""
        ids: dict[int, int] = {}
        for node in self.nodes:
            first, named = node.named[group]
            ids.update(zip(range(first, first + len(named)), named, strict=True))
        return [ids[entry] for entry in range(num_entries)]


@define(eq=False)
class PrefixIndex:
    """Over the pools of one engine, by group. Takes no hold of any block: a pool that gives a
    cached id away calls `drop` first. `events` gathers what comes and goes."""

    pools: Mapping[str, SharedBlockPool]
    events: EventBuffer = field(factory=lambda: EventBuffer("device", 1))
    _nodes: dict[bytes, dict[int | None, Node]] = field(init=False, factory=dict)
    _named: dict[tuple[str, int], set[Node]] = field(init=False, factory=dict)

    def match(self, chain: Chain, most: int) -> Match:
        """The longest known prefix of at most `most` tokens. A node counts only if its tokens, its
        label and its place in the chain are the prompt's, whatever its hash says."""
        nodes: list[Node] = []
        for k in range(min(len(chain), most // chain.block_size)):
            parent = nodes[-1] if nodes else None
            here = [
                node
                for node in self._nodes.get(chain.hashes[k], {}).values()
                if node.parent is parent and _holds(node, chain, k)
            ]
            wanted = chain.following(k)
            exact = next((node for node in here if node.following == wanted), None)
            if exact is None and here:
                return Match([*nodes, here[-1]], chain.stop(k) - 1, chain.block_size)
            if exact is None:
                break
            nodes.append(exact)
        return Match(nodes, len(nodes) * chain.block_size, chain.block_size)

    def add(
        self,
        chain: Chain,
        k: int,
        following: int | None,
        parent: Node | None,
        named: Mapping[str, Named],
    ) -> Node | None:
        """Says that ids hold block k and what of the chain lies in their entries before it. A node
        that is known moves to these ids. None, and nothing is said, if the hash stands for other
        tokens already."""
        variants = self._nodes.setdefault(chain.hashes[k], {})
        node = variants.get(following)
        if node is None:
            node = Node(chain.hashes[k], following, chain.block(k), chain.labels[k], parent, named)
            variants[following] = node
            self.events.stored(node.hash, parent.hash if parent is not None else None)
            if parent is not None:
                parent.children.add(node)
        elif node.parent is not parent or not _holds(node, chain, k):
            return None
        before, node.named = self._ids(node), named
        for group, block_id in self._ids(node):
            self.pools[group].mark(block_id)
            self._named.setdefault((group, block_id), set()).add(node)
        for one in set(before) - set(self._ids(node)):
            self._unname(node, *one)
        return node

    def drop(self, group: str, block_id: int) -> None:
        """Forgets every node that names an id, and all that follows from them."""
        for node in list(self._named.get((group, block_id), ())):
            self._remove(node)

    def clear(self) -> int:
        """Forgets everything; returns how many nodes there were."""
        roots = [n for each in self._nodes.values() for n in each.values() if n.parent is None]
        before = len(self)
        for node in roots:
            self._remove(node)
        return before

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.hash, {}).get(node.following) is node

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def _remove(self, node: Node) -> None:
        doomed = [node]
        while doomed:
            one = doomed.pop()
            if one not in self:
                continue
            doomed += one.children
            one.children.clear()
            if one.parent is not None:
                one.parent.children.discard(one)
            del self._nodes[one.hash][one.following]
            if not self._nodes[one.hash]:
                del self._nodes[one.hash]
                self.events.removed(one.hash)
            for name in self._ids(one):
                self._unname(one, *name)

    def _unname(self, node: Node, group: str, block_id: int) -> None:
        speakers = self._named[group, block_id]
        speakers.discard(node)
        if not speakers:
            del self._named[group, block_id]
            self.pools[group].forget(block_id)

    @staticmethod
    def _ids(node: Node) -> list[tuple[str, int]]:
        return [(group, one) for group, named in node.named.items() for one in named.ids]

    def __iter__(self) -> Iterator[Node]:
        for variants in self._nodes.values():
            yield from variants.values()

    def audit(self) -> None:
        """Raises `KvflowError` if a node is out of reach, or pools and index disagree on what is
        indexed."""
        named = {(group, one) for node in self for group, one in self._ids(node)}
        marked = {(g, one) for g, pool in self.pools.items() for one in pool.indexed}
        if named != set(self._named) or named != marked:
            raise KvflowError(f"blocks {sorted(named ^ marked)[:4]} are indexed on one side only")
        for node in self:
            known = node.parent is None or node in node.parent.children
            if not known or (node.parent is not None and node.parent not in self):
                raise KvflowError("a node of the prefix index cannot be reached from its root")


def _holds(node: Node, chain: Chain, k: int) -> bool:
    return node.tokens == chain.block(k) and node.label == chain.labels[k]
