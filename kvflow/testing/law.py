"""The law of every transfer, checked on real bytes.

read(dst, t) == read(src, t) for every token, component and field that is claimed, on every replica
of the target, and no other byte of the target changes; the source changes nowhere.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from kvflow.layouts.layout import Binding, KVLayout
from kvflow.testing.oracle import Cell, cells, tag
from kvflow.transfers.executors.base import Executor, RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

Caches = Mapping[int, RankCache]
Move = Callable[[BoundPlan, Caches, Caches], None]


class LawError(AssertionError):
    """An executor moved a wrong byte, left one out, or touched one it did not claim."""


class MakeCache(Protocol):
    """Allocates one rank's cache, every byte set to `fill`; `num_blocks` is by group."""

    def __call__(
        self, layout: KVLayout, rank: int, num_blocks: Mapping[str, int], fill: int = 0
    ) -> RankCache: ...


SOURCE_FILL, TARGET_FILL = 0x5A, 0xA5


@frozen(eq=False)
class _Region:
    """One memory of one cache, what it must hold, and the cells claimed in it by first byte."""

    memory: Tensor
    expected: bytearray


def check_law(
    move: Executor | Move,
    src: Binding,
    dst: Binding,
    tokens: tuple[int, int],
    *,
    absent: Iterable[str] = (),
    make_source: MakeCache = RankCache.allocate,
    make_target: MakeCache = RankCache.allocate,
) -> None:
    """Derives the plan for `tokens`, lets `move` carry it out on fresh caches, and compares every
    byte of both sides with the oracle.

    `move` is an `Executor` or a function ``(bound, sources, targets)``; caches are by rank. The
    source holds tagged tokens ``[.., stop)``, everything else is a sentinel. Raises `LawError`
    naming token, component, field, rank and both bytes; errors of `move` and of planning pass
    through.
    """
    plan = plan_transfer(src.layout, dst.layout, tokens, absent=absent)
    bound = BoundPlan(plan, src, dst)
    moved = tuple(c for part in plan.parts for c in part.components)
    sources = _caches(src, make_source, SOURCE_FILL)
    targets = _caches(dst, make_target, TARGET_FILL)
    held = list(cells(src.layout, src, (0, tokens[1]), src.layout.spec.names))
    before = _images(sources)
    for cell in held:
        _expect(before, sources[cell.rank], cell)
    for region in before.values():
        region.memory.copy_(torch.frombuffer(region.expected, dtype=torch.uint8))
    wanted = _images(targets)
    claimed = list(cells(dst.layout, dst, tokens, moved))
    for cell in claimed:
        _expect(wanted, targets[cell.rank], cell)
    execute = move.execute if hasattr(move, "execute") else move
    execute(bound, sources, targets)
    _compare("target", targets, wanted, claimed)
    _compare("source", sources, before, held)


def _caches(binding: Binding, make: MakeCache, fill: int) -> dict[int, RankCache]:
    layout = binding.layout
    return {
        rank: make(layout, rank, binding.num_blocks, fill=fill)
        for group in layout.placement.ranks
        for rank in group
    }


def _places(cache: RankCache, cell: Cell) -> list[int]:
    view = cache.pages[cell.component]
    return [view.offset + cell.block_id * view.block_stride + i for i in cell.at]


def _images(caches: Caches) -> dict[int, _Region]:
    """Every distinct memory of the caches by its address, with a copy of what it holds."""
    memories = {v.memory.data_ptr(): v.memory for c in caches.values() for v in c.pages.values()}
    return {at: _Region(m, bytearray(m.cpu().numpy().tobytes())) for at, m in memories.items()}


def _expect(regions: dict[int, _Region], cache: RankCache, cell: Cell) -> None:
    region = regions[cache.pages[cell.component].memory.data_ptr()]
    for at, value in zip(_places(cache, cell), tag(cell), strict=True):
        region.expected[at] = value


def _compare(
    side: str, caches: Caches, regions: Mapping[int, _Region], claimed: Iterable[Cell]
) -> None:
    for address, region in regions.items():
        actual = region.memory.cpu().numpy().tobytes()
        if actual == bytes(region.expected):
            continue
        at = next(i for i, (a, b) in enumerate(zip(actual, region.expected, strict=True)) if a != b)
        where = _name(caches, address, at, claimed)
        raise LawError(
            f"{side} {where}: byte is {actual[at]:#04x}, must be {region.expected[at]:#04x}"
        )


def _name(caches: Caches, address: int, at: int, claimed: Iterable[Cell]) -> str:
    for cell in claimed:
        cache = caches[cell.rank]
        if cache.pages[cell.component].memory.data_ptr() == address:
            places = _places(cache, cell)
            if at in places:
                return (
                    f"rank {cell.rank}, component {cell.component}, token {cell.token}, field "
                    f"{cell.field}, head {cell.head}, byte {places.index(at)} of {len(places)}"
                )
    owners = [
        f"rank {cache.rank}, component {name}"
        for cache in caches.values()
        for name, view in cache.pages.items()
        if view.memory.data_ptr() == address
    ]
    return f"{' / '.join(owners)}, byte {at} of the region, which no claimed token owns"
