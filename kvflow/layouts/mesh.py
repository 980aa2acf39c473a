"""Meshes: named axes of ranks, and which ranks hold which shard.

The order of the axes is said once, slowest first. An axis multiplies the ranks, or is folded over
other axes: then it names groups among the ranks those axes already have. PCP 4 with DCP 4 folded
over it is 4 ranks; PCP 2 x DCP 2 as plain axes is 4 ranks with shard strides of the product.
"""

from collections.abc import Collection, Iterable
from functools import cached_property
from math import prod
from typing import SupportsIndex

import numpy as np
from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.sharding import ANY_STOP, Ints, IntsLike, Sharding, as_ints
from kvflow.layouts.values import integer, items_of, names, positive, tuple_of


@frozen
class Axis:
    """A named axis. With `over`, the axis adds no ranks: its coordinate is the index of the rank
    along those axes, modulo `size`."""

    name: str
    size: int = field(converter=integer, validator=positive)
    over: tuple[str, ...] = field(default=(), converter=names)

    def __attrs_post_init__(self) -> None:
        if len(set(self.over)) != len(self.over):
            raise LayoutError(f"axis {self} folds over an axis twice")

    def __str__(self) -> str:
        return f"{self.name}={self.size}" + (f"@{'*'.join(self.over)}" if self.over else "")


def _axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple_of(Axis, axes)


@frozen
class Mesh:
    """Ranks 0..num_ranks-1 in the C order of the plain axes (the last one is fastest).

    >>> mesh = Mesh((Axis("pcp", 4), Axis("tp", 2), Axis("dcp", 4, over=("pcp", "tp"))))
    >>> mesh.num_ranks, mesh.ranks_by_shard("dcp")
    (8, ((0, 4), (1, 5), (2, 6), (3, 7)))
    """

    axes: tuple[Axis, ...] = field(converter=_axes)

    def __attrs_post_init__(self) -> None:
        names = [a.name for a in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError(f"axes named twice in {names}")
        for axis in self.axes:
            for other in axis.over:
                if self[other].over:
                    raise LayoutError(f"{axis} folds over {other}, which is folded itself")
            extent = prod(self[other].size for other in axis.over)
            if axis.over and extent % axis.size:
                raise LayoutError(
                    f"{axis}: size {axis.size} must divide the {extent} ranks it folds over"
                )
        check_num_ranks(self.num_ranks)

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"no axis {name!r} in {[a.name for a in self.axes]}")

    @property
    def num_ranks(self) -> int:
        return prod(a.size for a in self.axes if not a.over)

    def coordinate(self, name: str, ranks: IntsLike) -> Ints:
        """Each rank's place on an axis. Raises `LayoutError` for a rank the mesh does not have."""
        r, axis = as_ints(ranks), self[name]
        bad = (r < 0) | (r >= self.num_ranks)
        if bad.any():
            raise LayoutError(f"rank {int(r[bad][0])} is not one of the {self.num_ranks} of {self}")
        if axis.over:
            return self._index(axis.over, r) % axis.size
        plain = [a for a in self.axes if not a.over]
        inner = prod(a.size for a in plain[plain.index(axis) + 1 :])
        return r // inner % axis.size

    def _index(self, names: tuple[str, ...], ranks: Ints) -> Ints:
        """Mixed-radix index of each rank over several axes, in the mesh's own order."""
        index = np.zeros_like(ranks)
        for axis in self.axes:
            if axis.name in names:
                index = index * axis.size + self.coordinate(axis.name, ranks)
        return index

    def ranks_by_shard(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """For every index over the named axes, the ranks that share it (the replicas). Raises
        `LayoutError` unless the named axes are independent: none twice, and no two that stand for
        the same plain axis."""
        self._check_independent(names)
        ranks = np.arange(self.num_ranks, dtype=np.int64)
        index = self._index(names, ranks)
        size = prod(self[n].size for n in names)
        return tuple(tuple(int(r) for r in ranks[index == s]) for s in range(size))

    def _check_independent(self, names: tuple[str, ...]) -> None:
        said: dict[str, str] = {}
        for name in names:
            for plain in self[name].over or (name,):
                if plain in said:
                    raise LayoutError(
                        f"axes {said[plain]!r} and {name!r} of {self} both deal the ranks of "
                        f"{plain!r}: name one of them"
                    )
                said[plain] = name

    def place(self, sharding: Sharding, *names: str) -> "Placement":
        """Deals the shards of `sharding` along the named axes; all other axes replicate."""
        return Placement(sharding, self.ranks_by_shard(*names))

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))


MAX_RANKS = 1 << 16
"""Placements list their ranks one by one; no system has more than this."""


def check_num_ranks(num_ranks: int) -> None:
    if num_ranks > MAX_RANKS:
        raise LayoutError(f"{num_ranks} ranks, at most {MAX_RANKS} can be placed")


def rank_ids(ranks: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(integer(r, "rank") for r in items_of(ranks))


def rank_groups(groups: Iterable[Iterable[SupportsIndex]]) -> tuple[tuple[int, ...], ...]:
    return tuple(rank_ids(group) for group in items_of(groups))


@frozen(cache_hash=True)
class Placement:
    """A token sharding and, for each shard, the ranks that hold a copy of it."""

    sharding: Sharding
    ranks: tuple[tuple[int, ...], ...] = field(converter=rank_groups)

    def __attrs_post_init__(self) -> None:
        if len(self.ranks) != self.sharding.num_shards:
            raise LayoutError(
                f"{self.sharding} has {self.sharding.num_shards} shards, "
                f"ranks are given for {len(self.ranks)}"
            )
        flat = [r for group in self.ranks for r in group]
        if len(set(flat)) != len(flat) or not all(self.ranks):
            raise LayoutError(
                f"every shard needs ranks of its own, a rank holds one shard: got {self.ranks}"
            )
        if not 0 <= min(flat) <= max(flat) < ANY_STOP:
            raise LayoutError(f"ranks must be at least 0 and below {ANY_STOP}, got {self.ranks}")

    @classmethod
    def simple(cls, sharding: Sharding) -> "Placement":
        """Shard s on rank s."""
        check_num_ranks(sharding.num_shards)
        return cls(sharding, tuple((s,) for s in range(sharding.num_shards)))

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(r for group in self.ranks for r in group))

    def on(self, ranks: Collection[int]) -> "Placement":
        """The same shards, held by some of the ranks alone. Raises `LayoutError` for a shard that
        none of them holds."""
        kept = tuple(tuple(r for r in group if r in ranks) for group in self.ranks)
        for shard, group in enumerate(kept):
            if not group:
                raise LayoutError(
                    f"shard {shard} of {self.sharding} lies on ranks {self.ranks[shard]}, "
                    f"none of {sorted(ranks)}"
                )
        return Placement(self.sharding, kept)

    def shard_of(self, rank: int) -> int:
        """The shard a rank holds. Raises `LayoutError` for a rank outside the placement."""
        for shard, group in enumerate(self.ranks):
            if rank in group:
                return shard
        raise LayoutError(f"rank {rank} holds nothing, the ranks are {self.all_ranks}")

    def __str__(self) -> str:
        if self.ranks == tuple((s,) for s in range(len(self.ranks))):
            return str(self.sharding)
        groups = "|".join(",".join(map(str, g)) for g in self.ranks)
        return f"{self.sharding} on {groups}"
