"""The oracle: where every byte of a request lies, found the slow and obvious way.

It shares no arithmetic with what it judges. Tokens are dealt one at a time into the hand of each
shard, as cards are; pages are filled byte by byte from the field descriptions. It reads only the
parameters of layout values, never their methods.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import singledispatch

from attrs import frozen

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
    """The bytes of one field of one token on one rank: byte i lies at ``at[i]``, counted from the
    first byte of page `block_id`."""

    rank: int
    component: str
    field: str
    token: int
    block_id: int
    at: tuple[int, ...]


def page_cells(record: Record, block_size: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """For every (token in page, field) its bytes' places in the page, counted one by one."""
    cells: dict[tuple[int, str], list[int]] = {}
    offsets, names = range(block_size), [f.name for f in record.fields]
    if record.arrangement == "row":
        order = [(i, name) for i in offsets for name in names]
    else:
        order = [(i, name) for name in names for i in offsets]
    size = {f.name: _ELEMENT_NBYTES[f.dtype] * f.num_elements for f in record.fields}
    cursor = 0
    for i, name in order:
        cells[i, name] = []
        for _ in range(size[name]):
            cells[i, name].append(cursor)
            cursor += 1
    return {key: tuple(at) for key, at in cells.items()}


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
            page = page_cells(layout.spec[component].record, size)
            for hand, ranks in zip(hands, layout.placement.ranks, strict=True):
                for rank in ranks:
                    yield from _hand_cells(
                        hand, rank, component, page, size, binding.tables[group.name], start
                    )


def _hand_cells(
    hand: list[int],
    rank: int,
    component: str,
    page: Mapping[tuple[int, str], tuple[int, ...]],
    size: int,
    table: object,
    start: int,
) -> Iterator[Cell]:
    blocks = iter(table)  # type: ignore[call-overload]
    names = list(dict.fromkeys(name for _, name in page))
    offset, block_id = size, -1
    for token in hand:
        if offset == size:
            offset, block_id = 0, int(next(blocks))
        if token >= start:
            for name in names:
                yield Cell(rank, component, name, token, block_id, page[offset, name])
        offset += 1


def tag(component: str, field: str, token: int, nbytes: int) -> bytes:
    """The bytes a token's field is filled with: different for any two cells but by rare chance in
    the shortest ones."""
    return hashlib.shake_128(f"{component}/{field}/{token}".encode()).digest(nbytes)
