"""The oracle: where every byte of a request lies, found the slow and obvious way.

It shares no arithmetic with what it judges. Tokens are dealt one at a time into the hand of each
shard, as cards are; pages are filled byte by byte from the field descriptions. It reads only the
parameters of layout values, never their methods.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache, singledispatch

from attrs import define, frozen

from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.record import Record
from kvflow.layouts.sharding import Replicated, RoundRobin

_ELEMENT_NBYTES = {
    "uint8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}

Hands = list[list[int]]
"""For each shard, the positions it holds, in the order of its local indices."""


@singledispatch
def deal(sharding: object, stop: int) -> Hands:
    """The hands of all shards after the positions below `stop` are dealt.

    Register your own sharding with ``@deal.register``. Raises `TypeError` for one that nobody
    registered.
    """
    raise TypeError(f"the oracle cannot deal {sharding!r}: use @deal.register for its type")


@deal.register
def _(sharding: RoundRobin, stop: int) -> Hands:
    hands: Hands = [[] for _ in range(sharding.num_shards)]
    turn, dealt = 0, 0
    for position in range(stop):
        hands[turn].append(position)
        dealt += 1
        if dealt == sharding.interleave:
            turn, dealt = turn + 1, 0
        if turn == sharding.num_shards:
            turn = 0
    return hands


@deal.register
def _(sharding: Replicated, stop: int) -> Hands:
    return [list(range(sharding.start, stop))]


@deal.register
def _(sharding: Contiguous, stop: int) -> Hands:
    share = [0] * sharding.num_shards
    for card in range(sharding.stop - sharding.start):
        share[card % sharding.num_shards] += 1
    return _deal_chunks(share, list(range(sharding.num_shards)), sharding.start, stop)


@deal.register
def _(sharding: BalancedChunks, stop: int) -> Hands:
    ranks = list(range(sharding.num_shards))
    owners = ranks + ranks[::-1]
    q = sharding.stop - sharding.start
    if sharding.form == "ceil":
        size = 0
        while size * len(owners) < q:
            size += 1
        sizes = [size] * len(owners)  # the walk ends at q, so the last chunks stay short
    else:
        sizes = _even_sizes(q, sharding.num_shards, sharding.rotate)
    return _deal_chunks(sizes, owners, sharding.start, stop)


def _even_sizes(q: int, num_ranks: int, rotate: int) -> list[int]:
    """Whole rounds give every chunk one token; what is left goes to one rank after the other,
    first into its late chunk, the second time around into its early one."""
    sizes = [0] * (2 * num_ranks)
    while q >= len(sizes):
        sizes = [size + 1 for size in sizes]
        q -= len(sizes)
    rank, early = rotate % num_ranks, False
    for n in range(q):
        early = early or n == num_ranks
        sizes[rank if early else 2 * num_ranks - 1 - rank] += 1
        rank = rank + 1 if rank + 1 < num_ranks else 0
    return sizes


def _deal_chunks(sizes: list[int], owners: list[int], start: int, stop: int) -> Hands:
    hands: Hands = [[] for _ in range(max(owners) + 1)]
    position = start
    for size, owner in zip(sizes, owners, strict=True):
        for _ in range(size):
            if position < stop:
                hands[owner].append(position)
                position += 1
    return hands


@frozen
class Cell:
    """The bytes of one field of one head of one token on one rank: byte i lies at ``at[i]``,
    counted from the first byte of page `block_id`."""

    rank: int
    component: str
    field: str
    head: int
    token: int
    block_id: int
    at: tuple[int, ...]


Place = tuple[int, str, int]
"""(token in page, field, head as the page counts it)."""


def page_cells(
    record: Record, block_size: int, num_heads: int | None = None
) -> dict[Place, tuple[int, ...]]:
    """For every place of a page of `num_heads` heads (default: the record's own) where its bytes
    lie in the page, found by walking through the page from its first byte to its last."""
    axes = {"t": block_size, "h": num_heads or record.num_heads}
    sizes = {f.name: (f.num_elements, _ELEMENT_NBYTES[f.dtype]) for f in record.fields}
    found: dict[tuple[int, str, int, int], int] = {}
    cursor = 0
    for plane in record.arrangement.planes:
        walk = _Walk(list(plane.order), list(plane.fields), axes, sizes, found, cursor)
        walk.through(0, {"t": 0, "h": 0, "e": 0}, plane.fields[0])
        cursor = walk.cursor
    cells: dict[Place, list[int]] = {}
    for token, name, head, element in sorted(found):
        at = found[token, name, head, element]
        cells.setdefault((token, name, head), []).extend(range(at, at + sizes[name][1]))
    return {place: tuple(at) for place, at in cells.items()}


@define
class _Walk:
    """Takes the digits of a plane as nested loops; the innermost step is one item."""

    order: list[str]
    fields: list[str]
    axes: dict[str, int]
    sizes: dict[str, tuple[int, int]]
    found: dict[tuple[int, str, int, int], int]
    cursor: int

    def through(self, depth: int, at: dict[str, int], name: str) -> None:
        if depth == len(self.order):
            self.found[at["t"], name, at["h"], at["e"]] = self.cursor
            self.cursor += self.sizes[name][1]
            return
        word = self.order[depth]
        if word == "f":
            for each in self.fields:
                self.through(depth + 1, at, each)
        elif word[0] == "_":
            begin = self.cursor
            self.through(depth + 1, at, name)
            taken = self.cursor - begin
            for _ in range(int(word[1:]) - 1):
                self.cursor += taken
        else:
            size = self.size(word, name)
            for step in range(size):
                self.through(depth + 1, {**at, word[0]: at[word[0]] * size + step}, name)

    def size(self, word: str, name: str) -> int:
        if word[1:]:
            return int(word[1:])
        left = self.sizes[name][0] if word == "e" else self.axes[word]
        for other in self.order:
            if other[0] == word and other != word:
                left //= int(other[1:])
        return left


def heads_on(layout: KVLayout, num_heads: int, rank: int) -> list[int]:
    """The heads that a rank stores: dealt like cards in hands of equal size, first hands larger,
    or one head to several coordinates in a row."""
    if not layout.head_ranks:
        return list(range(num_heads))
    at = next(c for c, ranks in enumerate(layout.head_ranks) if rank in ranks)
    hands: list[list[int]] = [[] for _ in layout.head_ranks]
    if len(hands) > num_heads:
        copies = [head for head in range(num_heads) for _ in range(len(hands) // num_heads)]
        return [copies[at]]
    share = [0] * len(hands)
    for card in range(num_heads):
        share[card % len(hands)] += 1
    heads = iter(range(num_heads))
    return [[next(heads) for _ in range(n)] for n in share][at]


def cells(
    layout: KVLayout, binding: Binding, tokens: tuple[int, int], components: tuple[str, ...]
) -> Iterator[Cell]:
    """Every cell of the tokens ``[start, stop)`` in the named components, on every replica."""
    start, stop = tokens
    hands = deal(layout.placement.sharding, stop)
    for group in layout.groups:
        size = group.paging.block_size
        for component in group.components:
            if component not in components:
                continue
            record = layout.spec[component].record
            holders = [s.ranks for s in layout.stages if component in s.components]
            for hand, ranks in zip(hands, layout.placement.ranks, strict=True):
                for rank in ranks:
                    if holders and rank not in holders[0]:
                        continue
                    heads = heads_on(layout, record.num_heads, rank)
                    page = _cells_by_token(record, size, len(heads))
                    table = binding.tables[group.name].tolist()
                    for token, block_id, (_, name, head), at in _hand_places(
                        hand, page, table, start
                    ):
                        yield Cell(rank, component, name, heads[head], token, block_id, at)


TokenCells = list[tuple[Place, tuple[int, ...]]]
"""The places of one token in page, and where their bytes lie."""


@lru_cache(256)
def _cells_by_token(record: Record, block_size: int, num_heads: int) -> list[TokenCells]:
    """`page_cells`, token by token; remembered, since all ranks and replicas fill such pages."""
    tokens: list[TokenCells] = [[] for _ in range(block_size)]
    for place, at in page_cells(record, block_size, num_heads).items():
        tokens[place[0]].append((place, at))
    return tokens


def _hand_places(
    hand: list[int], by_offset: list[TokenCells], table: list[int], start: int
) -> Iterator[tuple[int, int, Place, tuple[int, ...]]]:
    blocks, size = iter(table), len(by_offset)
    offset, block_id = size, -1
    for token in hand:
        if offset == size:
            offset, block_id = 0, next(blocks)
        if token >= start:
            for place, at in by_offset[offset]:
                yield token, block_id, place, at
        offset += 1


def tag(cell: Cell) -> bytes:
    """The bytes a cell is filled with: different for any two cells but by rare chance in the
    shortest ones, equal on every replica."""
    name = f"{cell.component}/{cell.field}/{cell.head}/{cell.token}"
    return hashlib.shake_128(name.encode()).digest(len(cell.at))
