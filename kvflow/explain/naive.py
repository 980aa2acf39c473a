"""What simpler formulas would have got wrong: each is computed, token by token, not estimated.

Systems of today derive owners and addresses from pages or from the width alone. Each formula here
is one of those, applied to a request of the two layouts at hand; a token counts as misplaced if
the bytes that the formula names are not all its own.
"""

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paging, bytes_of_slots, num_entries, slots_of
from kvflow.layouts.sharding import Ints, RoundRobin, Sharding
from kvflow.transfers.lower import PageGeometry, paired_pieces

Tokens = tuple[int, int]


@frozen
class Naive:
    """A formula, what it says of this transfer, and how many of `num_tokens` it would misplace."""

    name: str
    says: str
    num_wrong: int
    num_tokens: int


def naive_formulas(src: KVLayout, dst: KVLayout, tokens: Tokens) -> tuple[Naive, ...]:
    """Every formula that applies to the pair, on the tokens ``[start, stop)`` of a request of
    `stop` tokens: owner by page, by width and by one axis for each sharded side, pages regrouped
    by concatenation and aligned from the end for the pair."""
    found = [*_owners("source", src, tokens), *_owners("target", dst, tokens)]
    for name, says, from_end in (
        ("concatenation", "pages put one behind the other make the target's pages", False),
        ("suffix", "the last page is the last page: align from the end", True),
    ):
        wrong = np.zeros(tokens[1] - tokens[0], np.bool_)
        for pair in _page_pairs(src, dst):
            wrong |= _misplaced(src, dst, *pair, tokens, from_end=from_end)
        found.append(Naive(name, says, int(wrong.sum()), len(wrong)))
    return tuple(found)


# --- owners ---------------------------------------------------------------------------------------


def _owners(side: str, layout: KVLayout, tokens: Tokens) -> Iterator[Naive]:
    sharding = layout.placement.sharding
    width = sharding.num_shards
    if width == 1:
        return
    for size in sorted({g.paging.block_size for g in layout.groups}):
        says = f"{side}: page j of {size} tokens is on shard j mod {width}"
        yield Naive("page", says, *_count(sharding, RoundRobin(width, size), tokens))
    says = f"{side}: token t is on shard t mod {width}"
    yield Naive("width", says, *_count(sharding, RoundRobin(width, 1), tokens))
    factor = next(n for n in range(2, width + 1) if width % n == 0)
    if factor < width:
        interleave = getattr(sharding, "interleave", 1)
        axis = RoundRobin(width // factor, interleave)
        says = f"{side}: the stride is that of one axis of {width // factor}, not of all {width}"
        yield Naive("axis", says, *_count(sharding, axis, tokens))


def _count(true: Sharding, formula: Sharding, tokens: Tokens) -> tuple[int, int]:
    return num_misplaced(true, formula, tokens), tokens[1] - tokens[0]


def num_misplaced(true: Sharding, formula: Sharding, tokens: Tokens) -> int:
    """Tokens of ``[start, stop)`` that are not where `formula` looks for them, in a request of
    `stop` tokens that is dealt by `true`.

    >>> num_misplaced(RoundRobin(8, 32), RoundRobin(8, 64), (0, 2000))
    1776
    """
    start, stop = tokens
    t = np.arange(start, stop, dtype=np.int64)
    shard, local = formula.owner(t), formula.local(t)
    there = local < true.local_len(stop, shard)
    found = true.token(shard[there], local[there]) == t[there]
    return len(t) - int(found.sum())


# --- pages ----------------------------------------------------------------------------------------


def _page_pairs(src: KVLayout, dst: KVLayout) -> list[tuple[str, str, str]]:
    """(component, source group, target group), one component for each kind of pair."""
    seen: dict[object, tuple[str, str, str]] = {}
    for c in src.spec.components:
        if c.name in dst.spec.names:
            here, there = src.group_of(c.name), dst.group_of(c.name)
            kind = (here.paging, there.paging, c.record, dst.spec[c.name].record)
            seen.setdefault(kind, (c.name, here.name, there.name))
    return list(seen.values())


def _misplaced(
    src: KVLayout,
    dst: KVLayout,
    component: str,
    src_group: str,
    dst_group: str,
    tokens: Tokens,
    *,
    from_end: bool,
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Which tokens have a byte at another place of the source's pages than of the target's, both
    taken entry by entry, shard by shard, as one stream of bytes."""
    sides = []
    for layout, group in ((src, src_group), (dst, dst_group)):
        paging, record = layout.group(group).paging, layout.spec[component].record
        slots, num_pages = _stream(layout.placement, paging, tokens)
        pitch = record.page_pitch(paging.block_size)
        sides.append((slots, PageGeometry(record, paging.block_size, 0, pitch, num_pages)))
    (src_slots, here), (dst_slots, there) = sides
    end = here.num_blocks * here.block_stride - there.num_blocks * there.block_stride
    wrong = np.zeros(len(src_slots), np.bool_)
    for a, b in paired_pieces(here, there):
        at = bytes_of_slots(src_slots, here.block_size, here.block_stride, a)
        to = bytes_of_slots(dst_slots, there.block_size, there.block_stride, b)
        wrong |= at - to != (end if from_end else 0)
    return wrong


def _stream(placement: Placement, paging: Paging, tokens: Tokens) -> tuple[Ints, int]:
    """The slot of each token if the pages of all shards stand one behind the other: entry by
    entry, in each entry shard by shard; and how many pages that are."""
    start, stop = tokens
    width, entries = placement.sharding.num_shards, num_entries(placement, paging, stop)
    t = np.arange(start, stop, dtype=np.int64)
    shard, local = placement.sharding.owner(t), placement.sharding.local(t)
    slots = np.empty_like(t)
    for s in range(width):
        table = np.arange(entries, dtype=np.int64) * width + s
        slots[shard == s] = slots_of(paging, table, local[shard == s])
    return slots, entries * width
