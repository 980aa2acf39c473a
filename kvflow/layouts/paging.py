"""Paging: local index -> slot. A slot is block_id * block_size + offset, in one rank's pool."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.mesh import Placement
from kvflow.layouts.pieces import Piece
from kvflow.layouts.sharding import Ints, IntsLike, RoundRobin, as_ints
from kvflow.layouts.values import integer, not_negative, positive

A = TypeVar("A", bound=Any)

PADDING_SLOT = -1
"""Marks "no slot" inside arrays handed to a kernel; only `kernel_slots` writes it."""


@runtime_checkable
class Paging(Protocol):
    """`block_size` slots share a block id; the block table of a request binds late."""

    @property
    def block_size(self) -> int: ...


@frozen
class Paged:
    """Blocks of a device pool."""

    block_size: int = field(converter=integer, validator=positive)

    def __str__(self) -> str:
        return f"paged({self.block_size})"


@frozen
class Dense:
    """One block holds all `capacity` slots of a request: its block table has one entry, and that of
    a cache without other requests is [0], so that slot = local index."""

    capacity: int = field(converter=integer, validator=positive)

    @property
    def block_size(self) -> int:
        return self.capacity

    def __str__(self) -> str:
        return f"dense({self.capacity})"


@frozen
class Pool:
    """Pages of a host pool; ``block_size=1`` makes it row-granular."""

    block_size: int = field(default=1, converter=integer, validator=positive)

    def __str__(self) -> str:
        return f"pool({self.block_size})"


@frozen
class LocalSlot:
    """The place of one token in the pool of `rank`."""

    rank: int = field(converter=integer, validator=not_negative)
    index: int = field(converter=integer, validator=not_negative)


@frozen
class GlobalSlot:
    """block_id*B*W + (t mod B*W): a place in the pools of all W ranks together. It exists only if
    the interleave divides the block size, for then a block id stands for B*W consecutive
    positions (a virtual block)."""

    index: int = field(converter=integer, validator=not_negative)


def to_local_slot(slot: GlobalSlot, deal: RoundRobin, paging: Paging) -> LocalSlot:
    """The rank and local slot of a global one. Raises `LayoutError` where none exists."""
    if not isinstance(slot, GlobalSlot):
        raise LayoutError(f"expected a GlobalSlot, got {slot!r}")
    span = _virtual_block_size(deal, paging)
    block, position = divmod(slot.index, span)
    rank, local = int(deal.owner(position)), int(deal.local(position))
    return LocalSlot(rank, block * paging.block_size + local)


def to_global_slot(slot: LocalSlot, deal: RoundRobin, paging: Paging) -> GlobalSlot:
    """The inverse of `to_local_slot`."""
    if not isinstance(slot, LocalSlot):
        raise LayoutError(f"expected a LocalSlot, got {slot!r}")
    span = _virtual_block_size(deal, paging)
    block, local = divmod(slot.index, paging.block_size)
    return GlobalSlot(block * span + int(deal.token(slot.rank, local)))


def _virtual_block_size(deal: RoundRobin, paging: Paging) -> int:
    if paging.block_size % deal.interleave:
        raise LayoutError(
            f"no global slots: interleave {deal.interleave} does not divide "
            f"block_size {paging.block_size}; use (rank, LocalSlot)"
        )
    return paging.block_size * deal.num_shards


def num_entries(placement: Placement, paging: Paging, length: int) -> int:
    """Block-table entries that positions below `length` need: the fullest shard decides.

    >>> deal = Placement.simple(RoundRobin(4, interleave=16))
    >>> num_entries(deal, Paged(4), 200)  # ceil(200 / (4*4)) would say 13
    14
    """
    sharding = placement.sharding
    fullest = int(sharding.local_len(length, np.arange(sharding.num_shards)).max())
    return -(-fullest // paging.block_size)


def num_full_entries(placement: Placement, paging: Paging, length: int) -> int:
    """Block-table entries whose slots all hold positions below `length`, on every shard: the
    emptiest shard decides. They are the first ones of a table.

    >>> deal = Placement.simple(RoundRobin(4, interleave=16))
    >>> num_full_entries(deal, Paged(4), 52), num_full_entries(deal, Paged(4), 51)
    (1, 0)
    """
    sharding = placement.sharding
    emptiest = int(sharding.local_len(length, np.arange(sharding.num_shards)).min())
    return emptiest // paging.block_size


def open_spans(placement: Placement, paging: Paging, length: int) -> list[tuple[int, int]]:
    """The positions below `length` that lie in entries with slots for others too, as ascending
    ranges.

    >>> open_spans(Placement.simple(RoundRobin(4, interleave=16)), Paged(4), 52)
    [(4, 16), (20, 32), (36, 48)]
    """
    sharding, size = placement.sharding, paging.block_size
    full = num_full_entries(placement, paging, length) * size
    held = sharding.local_len(length, np.arange(sharding.num_shards)).tolist()
    parts = [
        sharding.token(shard, np.arange(full, stop))
        for shard, stop in enumerate(held)
        if stop > full
    ]
    if not parts:
        return []
    positions = np.sort(np.concatenate(parts))
    cuts = np.flatnonzero(np.diff(positions) > 1)
    first = positions[np.concatenate([[0], cuts + 1])]
    last = positions[np.concatenate([cuts, [len(positions) - 1]])]
    return [(start, stop + 1) for start, stop in zip(first.tolist(), last.tolist(), strict=True)]


def page_of(index: A, block_size: int) -> A:
    """The page (block) of each slot, or the block-table entry of each local index. `index` may be
    an int or an array of any library; so it is for the two functions below."""
    pages: A = index // block_size
    return pages


def in_page(index: A, block_size: int) -> A:
    """The place of each slot or local index within its page."""
    offsets: A = index - page_of(index, block_size) * block_size
    return offsets


def bytes_of_slots(slots: A, block_size: int, block_stride: int, piece: Piece) -> A:
    """Where a piece of each slot begins, in bytes from the first page; 64-bit as `slots` is."""
    begins: A = page_of(slots, block_size) * block_stride + piece.offset
    index = in_page(slots, block_size)
    for size, stride in reversed(piece.tiles):
        begins = begins + in_page(index, size) * stride
        index = page_of(index, size)
    placed: A = begins + index * piece.stride
    return placed


def slots_of(paging: Paging, table: IntsLike, local: IntsLike) -> Ints:
    """The slot function: block table and local indices -> slots. Raises `LayoutError` for a local
    index that the table does not reach."""
    ids, index = as_ints(table), as_ints(local)
    entry = page_of(index, paging.block_size)
    bad = (index < 0) | (entry >= len(ids))
    if bad.any():
        raise LayoutError(
            f"local index {int(index[bad][0])} needs entry {int(entry[bad][0])} "
            f"of a block table of {len(ids)} entries of {paging.block_size}"
        )
    return ids[entry] * paging.block_size + in_page(index, paging.block_size)


def kernel_slots(
    placement: Placement, paging: Paging, table: IntsLike, positions: IntsLike, rank: int
) -> Ints:
    """Slots on `rank` for each position, `PADDING_SLOT` where another rank owns it."""
    t, sharding = as_ints(positions), placement.sharding
    mine = sharding.owner(t) == placement.shard_of(rank)
    slots = np.full(t.shape, PADDING_SLOT, np.int64)
    slots[mine] = slots_of(paging, table, sharding.local(t[mine]))
    return slots
