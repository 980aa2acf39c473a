"""RequestRows: where one request's latent rows lie on the device, by index group."""

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from kvflow.engine.hisparse.hot import HotRows
from kvflow.engine.hisparse.sizes import LATENT
from kvflow.engine.hisparse.tail import Moves, TailPages
from kvflow.layouts.layout import Binding
from kvflow.layouts.sharding import Ints
from kvflow.transfers.operators.hotfetch import DeviceSlots, Misses

if TYPE_CHECKING:
    from kvflow.engine.hisparse.pool import LatentPool


@define(eq=False)
class GroupRows:
    """One index group's share: the newest rows in tail pages, others in hot rows, none in both.
    Rows are local indices of the rank; those from `first_new` on are written by the step that runs,
    and `missed_new` says whether one of them is to be fetched from the host."""

    tail: TailPages
    hot: HotRows
    first_new: int = field(init=False, default=0)
    missed_new: bool = field(init=False, default=False)
    hits: int = field(init=False, default=0)
    misses: int = field(init=False, default=0)

    def advance(self, cached: int, total: int) -> Moves:
        """A step begins that writes the rows [cached, total)."""
        self.first_new, self.missed_new = cached, False
        moves = self.tail.advance(cached, total)
        self.hot.forget(min(cached, self.tail.first_row))
        return moves

    def resolve(self, rows: Ints) -> "tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]":
        """Slots for rows int64 [n], each once, and which of them must be fetched."""
        slots, missing = np.empty(len(rows), np.int64), np.zeros(len(rows), np.bool_)
        new = rows >= self.tail.first_row
        slots[new] = self.tail.slots(rows[new])
        placed = self.hot.resolve(rows[~new])
        slots[~new], missing[~new] = placed.slots, placed.missing
        self.missed_new |= bool((rows[missing] >= self.first_new).any())
        self.misses += int(missing.sum())
        self.hits += len(rows) - int(missing.sum())
        return slots, missing


@frozen(eq=False)
class Written:
    """Where the new rows of one request that this rank owns go: which of them to slots of the pool,
    which to the host's, as int64 indices into them and slots."""

    new: Ints
    slots: Ints
    through: Ints
    host_slots: Ints


@define(eq=False)
class RequestRows:
    """A request that has a seat among those that decode. `binding` is its place on the host, as of
    its last step."""

    seat: int
    pool: "LatentPool"
    binding: Binding
    groups: dict[tuple[str, ...], GroupRows] = field(init=False)

    def __attrs_post_init__(self) -> None:
        sizes, layout = self.pool.sizes, self.pool.layout
        size, n = layout.group(LATENT).paging.block_size, sizes.tail_pages
        pages = range(self.seat * n, (self.seat + 1) * n)
        first = self.pool.num_tail_slots + self.seat * sizes.hot_rows
        self.groups = {
            group: GroupRows(TailPages(pages, size), HotRows(first, sizes.hot_rows))
            for group in self.pool.groups
        }

    def advance(self, group: tuple[str, ...], start: int, stop: int) -> Written:
        """A step begins that writes positions [start, stop) of the layers of a group."""
        mine, placement = self.groups[group], self.pool.layout.placement
        shard, sharding = placement.shard_of(self.pool.rank), placement.sharding
        cached, total = (int(sharding.local_len(n, shard)) for n in (start, stop))
        moves = mine.advance(cached, total)
        self.pool.mirror(group, [self.lanes(*moves.mirror)])
        self.pool.fetch(group, [self.lanes(*moves.load)])
        rows = np.arange(cached, total)
        kept = rows >= mine.tail.first_row
        positions = sharding.token(shard, rows[~kept])
        host = self.binding.slots(LATENT, positions, self.pool.rank)
        slots, through = mine.tail.slots(rows[kept]), np.flatnonzero(~kept)
        return Written(np.flatnonzero(kept), slots, through, host)

    def flush(self) -> None:
        """The host gets all rows it has not."""
        for group, mine in self.groups.items():
            self.pool.mirror(group, [self.lanes(*mine.tail.flush())])

    def discard(self) -> None:
        for mine in self.groups.values():
            mine.tail.discard()

    def lanes(self, rows: Ints, slots: Ints) -> Misses:
        """Rows of the host and the slots of the pool that they land in, or come from."""
        placement = self.pool.layout.placement
        positions = placement.sharding.token(placement.shard_of(self.pool.rank), rows)
        return Misses(self.binding, positions, DeviceSlots(slots))
