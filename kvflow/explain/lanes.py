"""What a drawing shows: for each rank its pages with their tokens, and what is left out."""

from itertools import pairwise

import numpy as np
from attrs import frozen

from kvflow.layouts.layout import KVLayout
from kvflow.layouts.paging import page_of
from kvflow.transfers.plan import Plan

MAX_LANES = 12
"""Ranks of one side that are drawn; of more, the first and the last ones are."""


@frozen
class Page:
    """One entry of a rank's block table: the token in each slot, -1 where none is."""

    entry: int
    tokens: tuple[int, ...]


@frozen
class Gap:
    """Pages that are not drawn."""

    num_pages: int


@frozen
class Lane:
    """One rank and its pages, in order; a lane of several ranks stands for ranks not drawn."""

    ranks: tuple[int, ...]
    label: str
    pages: tuple[Page | Gap, ...] = ()
    num_tokens: int = 0

    @property
    def hidden(self) -> bool:
        return len(self.ranks) != 1

    @property
    def num_hidden_pages(self) -> int:
        return sum(page.num_pages for page in self.pages if isinstance(page, Gap))


def lanes_of(
    layout: KVLayout, component: str, tokens: tuple[int, int], max_pages: int
) -> tuple[Lane, ...]:
    """A lane for each rank of a layout that holds a request of `stop` tokens, in the order of the
    ranks; pages are those of `component`, or of the first one that a rank holds. Of more than
    `max_pages` pages those are drawn where the moved tokens begin, in their middle, and the last.
    """
    ranks = layout.ranks
    drawn, left, last = ranks, ranks[:0], ranks[:0]
    if len(ranks) > MAX_LANES:
        drawn, left, last = ranks[: MAX_LANES - 3], ranks[MAX_LANES - 3 : -2], ranks[-2:]
    lanes = [_lane(layout, component, rank, tokens, max_pages) for rank in drawn]
    if left:
        lanes.append(Lane(left, f"ranks {left[0]} to {left[-1]}: {len(left)} ranks, not drawn"))
    return (*lanes, *(_lane(layout, component, rank, tokens, max_pages) for rank in last))


def _lane(
    layout: KVLayout, component: str, rank: int, tokens: tuple[int, int], max_pages: int
) -> Lane:
    held = layout.components_of(rank)
    if not held:
        return Lane((rank,), f"rank {rank}: holds nothing")
    shown = component if component in held else held[0]
    sharding, shard = layout.placement.sharding, layout.placement.shard_of(rank)
    size = layout.group_of(shown).paging.block_size
    start, num_tokens = (int(sharding.local_len(t, shard)) for t in tokens)
    entries = _chosen(-(-num_tokens // size), page_of(start, size), max_pages)
    pages: list[Page | Gap] = []
    for before, entry in pairwise([-1, *entries]):
        if entry - before > 1:
            pages.append(Gap(entry - before - 1))
        pages.append(_page(layout, shard, entry, size, num_tokens))
    return Lane((rank,), _label(layout, shown, rank, shard), tuple(pages), num_tokens)


def _chosen(num_pages: int, first_moved: int, limit: int) -> list[int]:
    """Entries that are drawn, ascending: all, or those around three places."""
    if num_pages <= limit:
        return list(range(num_pages))
    middle = (first_moved + num_pages) // 2
    places = [(first_moved, 1), (num_pages - 1, -1), (middle, 1)]
    chosen: set[int] = set()
    for step in range(limit):
        for place, way in places:
            if len(chosen) < limit and 0 <= place + way * step < num_pages:
                chosen.add(place + way * step)
    return sorted(chosen)


def _page(layout: KVLayout, shard: int, entry: int, size: int, num_tokens: int) -> Page:
    local = np.arange(num_tokens, dtype=np.int64)[entry * size : (entry + 1) * size]
    tokens = layout.placement.sharding.token(shard, local)
    return Page(entry, (*tokens.tolist(), *[-1] * (size - len(local))))


def _label(layout: KVLayout, component: str, rank: int, shard: int) -> str:
    said = [f"rank {rank}"]
    if layout.placement.sharding.num_shards > 1:
        said.append(f"shard {shard}")
    if len(group := layout.placement.ranks[shard]) > 1:
        said.append(f"replica {group.index(rank) + 1} of {len(group)}")
    heads = layout.head_shard_of(component, rank)
    if layout.head_ranks and heads is not None:
        said.append(f"heads {heads.heads[0]} to {heads.heads[1] - 1}")
    if layout.stages:
        said.append(f"{len(layout.components_of(rank))} components")
    return " · ".join(said)


@frozen
class Flow:
    """What flows between two lanes, by their places: tokens and bytes, all links together."""

    src: int
    dst: int
    num_tokens: int
    nbytes: int


def flows_of(plan: Plan, src: tuple[Lane, ...], dst: tuple[Lane, ...]) -> tuple[Flow, ...]:
    """The links of a plan between the lanes of both sides, sorted."""
    return _flows(plan, src, dst, copies=False)


def copies_of(plan: Plan, dst: tuple[Lane, ...]) -> tuple[Flow, ...]:
    """The copies of the second stage between the target's lanes, sorted."""
    return _flows(plan, dst, dst, copies=True)


def _flows(
    plan: Plan, src: tuple[Lane, ...], dst: tuple[Lane, ...], *, copies: bool
) -> tuple[Flow, ...]:
    here = {rank: i for i, lane in enumerate(src) for rank in lane.ranks}
    there = {rank: i for i, lane in enumerate(dst) for rank in lane.ranks}
    tokens: dict[tuple[int, int], int] = {}
    nbytes: dict[tuple[int, int], int] = {}
    for a, b in plan.local_links if copies else plan.links:
        most = 0
        for part in plan.parts:
            runs = part.copies if copies else part.runs
            num = int(runs.count[(runs.src_rank == a) & (runs.dst_rank == b)].sum())
            key, most = (here[a], there[b]), max(most, num)
            nbytes[key] = nbytes.get(key, 0) + num * plan.row_nbytes(part)
        tokens[key] = tokens.get(key, 0) + most
    return tuple(Flow(*key, tokens[key], nbytes[key]) for key in sorted(tokens))
