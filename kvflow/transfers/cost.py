"""What a link costs in each of five ways of handing it to a transport, and which one to take.

pages: whole pages, from lists prepared once. strided: rows, or as many neighbouring rows as both
sides keep together, from strided lists prepared once; the transport merges neighbours. runs: every
run that is contiguous on both sides, merged and addressed one by one. stage: whole source pages in
bulk to staging, rows to their places from there. pack: the owner packs the rows, one bulk read,
rows to their places. All five leave the same bytes at the target.

A transport has two measured constants for each of its two kinds of work: seconds per item and per
byte, on the wire (an item is a descriptor) and in local copies (an item is a piece of a row). The
round trip is a third: only packing makes the owner do something before bytes can move.
"""

import json
from collections.abc import Iterable
from sys import float_info
from typing import Literal, get_args

import numpy as np
from attrs import asdict, field, frozen

from kvflow.errors import PlanError
from kvflow.layouts.paging import page_of
from kvflow.layouts.pieces import Piece
from kvflow.layouts.sharding import Ints
from kvflow.transfers.lower import PageGeometry, SlotRuns, paired_pieces
from kvflow.transfers.slot_cuts import grains_of, take_runs

Strategy = Literal["pages", "strided", "runs", "stage", "pack"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DIRECT: tuple[Strategy, ...] = ("pages", "strided", "runs")
"""Those that need no staging."""


def _seconds(instance: object, attribute: object, value: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= float_info.max):
        name = getattr(attribute, "name", attribute)
        raise PlanError(f"{name} = {value!r}, must be seconds: finite and at least 0")


@frozen
class Rate:
    """Seconds for each item and for each byte."""

    per_item: float = field(validator=_seconds)
    per_byte: float = field(validator=_seconds)

    def seconds(self, num_items: int, nbytes: int) -> float:
        return num_items * self.per_item + nbytes * self.per_byte


@frozen
class Costs:
    """The constants of a transport and of the machine it runs on. `kvflow calibrate` measures
    them; the defaults were measured for NIXL (UCX, shared memory of one host)."""

    wire: Rate = Rate(0.8e-6, 1 / 8e9)
    copy: Rate = Rate(0.03e-6, 1 / 6e9)
    round_trip: float = field(default=600e-6, validator=_seconds)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Costs":
        """What `to_json` wrote. Raises `PlanError` for anything else."""
        try:
            said = json.loads(text)
            return cls(Rate(**said["wire"]), Rate(**said["copy"]), said["round_trip"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            raise PlanError(f"no costs: {type(e).__name__}: {e}") from e


@frozen
class Estimate:
    """`seconds` that a way would take and the `num_descriptors` the transport would be given."""

    seconds: float = 0.0
    num_descriptors: int = 0

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.seconds + other.seconds, self.num_descriptors + other.num_descriptors)


Way = tuple[Strategy, SlotRuns]


def ways(strategy: Strategy, runs: SlotRuns, src: PageGeometry, dst: PageGeometry) -> list[Way]:
    """How a strategy carries a link out. Runs that are no whole pages go as strided ones under
    `pages`, and pages in tiles, which no strided list describes, go as `runs`: there the names
    stand for the same thing."""
    if not len(runs):
        return []
    chosen: list[Way] = []
    if strategy == "pages" and same_pages(src, dst):
        whole = runs.are_whole(src.block_size)
        if whole.any():
            chosen.append(("pages", take_runs(runs, whole)))
            runs = take_runs(runs, ~whole)
    if strategy in ("pages", "strided"):
        strategy = "runs" if _tiled(runs, src, dst) else "strided"
    if len(runs):
        chosen.append((strategy, runs))
    return chosen


def same_pages(src: PageGeometry, dst: PageGeometry) -> bool:
    """A page of one can be copied, in one piece, as a page of the other."""
    alike = (src.record, src.block_size) == (dst.record, dst.block_size)
    return alike and src.record.is_solid(src.block_size)


def _tiled(runs: SlotRuns, src: PageGeometry, dst: PageGeometry) -> bool:
    pairs = paired_pieces(src, dst, runs.src_heads, runs.dst_heads)
    return any(p.tiles for pair in pairs for p in pair)


def estimate(
    costs: Costs,
    strategy: Strategy,
    runs: SlotRuns,
    src: PageGeometry,
    dst: PageGeometry,
    num_components: int = 1,
) -> Estimate:
    """Of the link between components that all look like `src` there and `dst` here. Arithmetic on
    runs: nothing is enumerated."""
    parts = ways(strategy, runs, src, dst)
    return sum((estimate_way(costs, w, r, src, dst, num_components) for w, r in parts), Estimate())


def estimate_way(
    costs: Costs,
    way: Strategy,
    runs: SlotRuns,
    src: PageGeometry,
    dst: PageGeometry,
    num_components: int,
) -> Estimate:
    """Of runs that all go one way."""
    payload, n = runs.num_tokens * src.record.row_nbytes(runs.src_heads), num_components
    if not payload:
        return Estimate()
    if way in DIRECT:
        count = num_descriptors(way, runs, src, dst)
        return Estimate(costs.wire.seconds(n * count, n * payload), n * count)
    pairs = paired_pieces(src, dst, runs.src_heads, runs.dst_heads)
    if way == "pack":
        rows = costs.copy.seconds(n * runs.num_tokens * len(pairs), n * payload)
        wire = costs.wire.seconds(1, n * payload)
        return Estimate(costs.round_trip + wire + 2 * rows, 1)
    items = sum(_num_placed(runs, a, b) for a, b in pairs)
    pages = n * len(np.unique(page_of(runs.src, src.block_size)))
    fetched = costs.wire.seconds(pages, pages * src.record.page_extent(src.block_size))
    return Estimate(fetched + costs.copy.seconds(n * items, n * payload), pages)


def _num_placed(runs: SlotRuns, src: Piece, dst: Piece) -> int:
    """Items that placing copies of a piece: tokens that lie together on both sides are one. (A
    tile's stride is more than its rows, so tokens in tiles never do.)"""
    solid = (runs.src_stride * src.stride == src.nbytes).all()
    solid &= (runs.dst_stride * dst.stride == dst.nbytes).all()
    return int((runs.count // grains_of(runs.count)).sum()) if solid else runs.num_tokens


def num_descriptors(way: Strategy, runs: SlotRuns, src: PageGeometry, dst: PageGeometry) -> int:
    """What the transport is given for one component by a direct way, neighbours merged."""
    runs = take_runs(runs, np.argsort(runs.dst, kind="stable"))
    count = 0
    if way != "strided" and same_pages(src, dst):
        whole = runs.are_whole(src.block_size)
        page = src.record.page_nbytes(src.block_size)
        here, there = (page_of(slot[whole], src.block_size) for slot in (runs.src, runs.dst))
        count += _num_merged(here, there, 1, page == src.block_stride == dst.block_stride)
        runs = take_runs(runs, ~whole)
    for a, b in paired_pieces(src, dst, runs.src_heads, runs.dst_heads):
        even = not (a.tiles or b.tiles)
        solid = even & (runs.src_stride * a.stride == a.nbytes)
        solid &= runs.dst_stride * b.stride == b.nbytes
        at, to = src.address(runs.src[solid], a), dst.address(runs.dst[solid], b)
        count += _num_merged(at, to, runs.count[solid] * a.nbytes)
        count += int(runs.count[~solid].sum())
    return count


def _num_merged(src: Ints, dst: Ints, length: Ints | int, dense: bool = True) -> int:
    """Ranges that are left when those that follow each other on both sides are joined."""
    if not dense or not len(src):
        return len(src)
    step = np.broadcast_to(length, src.shape)[:-1]
    return 1 + int(((np.diff(src) != step) | (np.diff(dst) != step)).sum())


def choose(
    costs: Costs,
    runs: SlotRuns,
    src: PageGeometry,
    dst: PageGeometry,
    num_components: int,
    allowed: Iterable[Strategy],
) -> list[Way]:
    """Whole pages as such; what is left, the cheapest allowed way. Of equals the first named."""
    chosen = ways("pages", runs, src, dst)
    if chosen and chosen[-1][0] != "pages":
        rest = chosen.pop()[1]
        others: tuple[Strategy, ...] = ("strided", "stage", "pack")  # runs are as many as strided
        options = [s for s in others if s in set(allowed)]

        def seconds(option: Strategy) -> float:
            return estimate(costs, option, rest, src, dst, num_components).seconds

        chosen += ways(min(options, key=seconds), rest, src, dst)
    return chosen
