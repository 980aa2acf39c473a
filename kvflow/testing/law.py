"""The law of every transfer, checked on real bytes.

read(dst, t) == read(src, t) for every token, component and field that is claimed, on every replica
of the target, and no other byte of the target changes; the source changes nowhere.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from kvflow.layouts.layout import Binding, KVLayout
from kvflow.testing.images import Caches, Images, LawError
from kvflow.testing.oracle import cells, tag
from kvflow.transfers.executors.base import Executor, RankCache
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer

__all__ = ["LawError", "MakeCache", "Move", "allocate_caches", "check_law"]

Move = Callable[[BoundPlan, Caches, Caches], None]


class MakeCache(Protocol):
    """Allocates one rank's cache, every byte set to `fill`; `num_blocks` is by group."""

    def __call__(
        self, layout: KVLayout, rank: int, num_blocks: Mapping[str, int], fill: int = 0
    ) -> RankCache: ...


SOURCE_FILL, TARGET_FILL = 0x5A, 0xA5


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
    sources = allocate_caches(src.layout, src.num_blocks, SOURCE_FILL, make_source)
    targets = allocate_caches(dst.layout, dst.num_blocks, TARGET_FILL, make_target)
    before, after = Images(sources), Images(targets)
    for cell in cells(src.layout, src, (0, tokens[1]), src.layout.spec.names):
        before.put(cell, tag(cell))
    before.write()
    for cell in cells(dst.layout, dst, tokens, moved):
        after.put(cell, tag(cell))
    execute = move.execute if hasattr(move, "execute") else move
    execute(bound, sources, targets)
    after.compare("target")
    before.compare("source")


def allocate_caches(
    layout: KVLayout,
    num_blocks: Mapping[str, int],
    fill: int,
    make: MakeCache = RankCache.allocate,
) -> dict[int, RankCache]:
    """A cache of every rank of a layout, every byte set to `fill`."""
    return {rank: make(layout, rank, num_blocks, fill=fill) for rank in layout.ranks}
