"""Memory orders: in which region of a rank the page of (component, block) lies, and where.

A region is memory that is allocated and registered as one. The pages of a component stand at
``base + block * block_stride`` in one region; what differs between systems is which region, which
base and which stride: one region for each layer, all layers of a block together, keys in one half
and values in the other. Pages with holes may interlace. The order is checked as a whole: every
page inside its region, no byte in two pages.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise

from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.record import DTYPE_NBYTES, Record
from kvflow.layouts.values import integer, not_negative, positive, tuple_of

MAX_RUNS = 1 << 16
"""How many runs of bytes are compared one by one before an order is refused as too tangled."""


@frozen
class Region:
    """Memory that is allocated and registered as one."""

    name: str
    nbytes: int = field(converter=integer, validator=positive)


@frozen
class Pages:
    """Where the pages of one component begin: block b at byte ``base + b * block_stride``."""

    component: str
    region: str
    base: int = field(converter=integer, validator=not_negative)
    block_stride: int = field(converter=integer, validator=positive)
    num_blocks: int = field(converter=integer, validator=positive)

    def begin(self, block_id: int) -> int:
        """The first byte of a block's page. Raises `LayoutError` for a block out of range."""
        if not 0 <= block_id < self.num_blocks:
            raise LayoutError(
                f"{self.component}: block {block_id}, must be in [0, {self.num_blocks})"
            )
        return self.base + block_id * self.block_stride


Place = tuple[str, int, int]
"""Region, base and block stride of a component's pages."""


def _regions(regions: Iterable[Region]) -> tuple[Region, ...]:
    return tuple_of(Region, regions)


def _pages(pages: Iterable[Pages]) -> tuple[Pages, ...]:
    return tuple_of(Pages, pages)


@frozen
class MemoryOrder:
    """The regions of one rank and the pages in them, for every component the rank holds.

    Groups may be `overlaid`: their pages then share bytes, which is sound while no block id is
    held by two groups at a time. Raises `LayoutError` for a page outside its region, a byte in two
    pages, or a component without pages.
    """

    layout: KVLayout
    rank: int = field(converter=integer)
    regions: tuple[Region, ...] = field(converter=_regions)
    pages: tuple[Pages, ...] = field(converter=_pages)
    overlaid: bool = False

    def __attrs_post_init__(self) -> None:
        placed, held = [p.component for p in self.pages], self.layout.components_of(self.rank)
        if sorted(placed) != sorted(held):
            odd = sorted(set(placed) ^ set(held)) or placed
            raise LayoutError(f"rank {self.rank}: pages must be placed once for {odd}")
        if len({r.name for r in self.regions}) != len(self.regions):
            raise LayoutError(f"regions named twice: {[r.name for r in self.regions]}")
        for pages in self.pages:
            self._check_inside(pages)
        spaces: dict[tuple[str, str], list[_Bytes]] = {}
        for pages in self.pages:
            group = self.layout.group_of(pages.component)
            space = spaces.setdefault((pages.region, group.name if self.overlaid else ""), [])
            space += _bytes_of(pages, self.record(pages.component), group.paging.block_size)
        for (region, _), runs in spaces.items():
            _check_apart(region, runs)

    def _check_inside(self, pages: Pages) -> None:
        region = self.region(pages.region)
        size = self.block_size(pages.component)
        stop = pages.begin(pages.num_blocks - 1) + self.record(pages.component).page_extent(size)
        if stop > region.nbytes:
            raise LayoutError(
                f"{pages.component}: its last page ends at byte {stop} of region {region.name!r}, "
                f"which has {region.nbytes}"
            )

    @classmethod
    def placed(
        cls,
        layout: KVLayout,
        rank: int,
        num_blocks: Mapping[str, int],
        places: Mapping[str, Place],
        *,
        sizes: Mapping[str, int] | None = None,
        overlaid: bool = False,
    ) -> "MemoryOrder":
        """From a place for each component. `num_blocks` is by group, `sizes` by region: one that
        is not named ends with its last page."""
        pages, stops = [], dict[str, list[int]]()
        for name, (region, base, stride) in places.items():
            group = layout.group_of(name)
            run = Pages(name, region, base, stride, num_blocks[group.name])
            extent = layout.local_record(name, rank).page_extent(group.paging.block_size)
            stops.setdefault(region, []).append(run.begin(run.num_blocks - 1) + extent)
            pages.append(run)
        ends = {region: max(all_of_it) for region, all_of_it in stops.items()} | dict(sizes or {})
        return cls(layout, rank, [Region(*end) for end in ends.items()], pages, overlaid)

    def region(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise LayoutError(f"no region {name!r} in {[r.name for r in self.regions]}")

    def pages_of(self, component: str) -> Pages:
        for pages in self.pages:
            if pages.component == component:
                return pages
        raise LayoutError(f"rank {self.rank}: no pages of {component!r}")

    def record(self, component: str) -> Record:
        """The record as this rank stores it."""
        return self.layout.local_record(component, self.rank)

    def block_size(self, component: str) -> int:
        return self.layout.group_of(component).paging.block_size

    @property
    def num_blocks(self) -> dict[str, int]:
        """Blocks by group, as bindings take them."""
        return {self.layout.group_of(p.component).name: p.num_blocks for p in self.pages}

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self.regions)


def layer_outermost(
    layout: KVLayout, rank: int, num_blocks: Mapping[str, int], region: str | None = None
) -> MemoryOrder:
    """Each component's pages behind each other, in a region of its own, or all in `region`, one
    component behind the other."""
    places: dict[str, Place] = {}
    base = 0
    for name, group, pitch in _pitches(layout, rank):
        places[name] = (region or name, base, pitch)
        if region is not None:
            base += pitch * num_blocks[group.name]
    return MemoryOrder.placed(layout, rank, num_blocks, places)


def block_outermost(
    layout: KVLayout, rank: int, num_blocks: Mapping[str, int], multiple: int = 1
) -> MemoryOrder:
    """All pages of a block together, in the order of the group's components; a block takes a
    multiple of `multiple` bytes. One region for each group. Raises `LayoutError` for a multiple
    below 1."""
    if integer(multiple, "multiple") < 1:
        raise LayoutError(f"blocks of a multiple of {multiple} bytes, must be at least 1")
    places: dict[str, Place] = {}
    for group in layout.groups:
        mine = [(name, pitch) for name, g, pitch in _pitches(layout, rank) if g == group]
        stride = -(-sum(pitch for _, pitch in mine) // multiple) * multiple
        base = 0
        for name, pitch in mine:
            places[name] = (group.name, base, stride)
            base += pitch
    return MemoryOrder.placed(layout, rank, num_blocks, places)


def _pitches(layout: KVLayout, rank: int) -> Iterator[tuple[str, CacheGroup, int]]:
    """Every component of a rank, its group, and the bytes from one of its pages to the next."""
    for name in layout.components_of(rank):
        group = layout.group_of(name)
        record = layout.local_record(name, rank)
        yield name, group, record.page_pitch(group.paging.block_size)


# --- no byte in two pages -------------------------------------------------------------------------


def pages_are_apart(record: Record, block_size: int, block_stride: int, num_blocks: int) -> bool:
    """Whether pages at this stride share no byte: from a page's bytes on always; below that only
    if they stand in each other's holes."""
    if block_stride >= record.page_extent(block_size):
        return True
    if block_stride < 1 or num_blocks < 1 or record.is_solid(block_size):
        return False
    pages = Pages("page", "pages", 0, block_stride, num_blocks)
    try:
        _check_apart(pages.region, _bytes_of(pages, record, block_size))
    except LayoutError:
        return False
    return True


@frozen
class _Bytes:
    """The bytes of one field: runs of `nbytes` at `start` plus any step of each (size, stride)
    digit, largest stride first."""

    owner: str
    start: int
    nbytes: int
    digits: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        return self.start + self.nbytes + sum((size - 1) * stride for size, stride in self.digits)

    def inner(self, step: int = 0) -> "_Bytes":
        """One step of the first digit."""
        (_, stride), *rest = self.digits
        return _Bytes(self.owner, self.start + step * stride, self.nbytes, tuple(rest))


def _bytes_of(pages: Pages, record: Record, block_size: int) -> Iterator[_Bytes]:
    for place, f in zip(record.places(block_size), record.fields, strict=True):
        nbytes = DTYPE_NBYTES[f.dtype]
        digits = [(d.size, d.stride) for d in place.digits]
        digits.append((pages.num_blocks, pages.block_stride))
        digits.sort(key=lambda digit: digit[1])
        while digits and digits[0][1] == nbytes:
            nbytes *= digits.pop(0)[0]
        owner = f"{pages.component} {f.name}"
        yield _Bytes(owner, pages.base + place.offset, nbytes, tuple(reversed(digits)))


def _check_apart(region: str, runs: Iterable[_Bytes]) -> None:
    """Raises `LayoutError` if two of the runs share a byte, or one holds a byte twice. Digits that
    all runs share are looked at once; nothing is enumerated unless strides differ."""
    left = [list(runs)]
    while left:
        for cluster in _clusters(left.pop()):
            if any(run.digits for run in cluster):
                left.append(_opened(region, cluster))
            elif len(cluster) > 1:
                a, b = cluster[:2]
                raise LayoutError(
                    f"region {region!r}: {a.owner} at bytes [{a.start}, {a.stop}) and {b.owner} "
                    f"at [{b.start}, {b.stop}) overlap"
                )


def _clusters(runs: list[_Bytes]) -> Iterator[list[_Bytes]]:
    """The runs in groups whose spans of bytes touch no other group's."""
    ordered = sorted(runs, key=lambda run: run.start)
    stops = accumulate((run.stop for run in ordered), max)
    pairs = zip(stops, ordered[1:], strict=False)
    gaps = [i for i, (stop, run) in enumerate(pairs, 1) if run.start >= stop]
    for begin, end in pairwise((0, *gaps, len(ordered))):
        yield ordered[begin:end]


def _opened(region: str, cluster: list[_Bytes]) -> list[_Bytes]:
    """The cluster without its widest digit: one step of it where all runs take the same steps and
    none reaches into the next, all steps otherwise."""
    widest = max(run.digits[0][1] for run in cluster if run.digits)
    if len({run.digits[:1] for run in cluster}) == 1:
        once = [run.inner() for run in cluster]
        if max(run.stop for run in once) - min(run.start for run in once) <= widest:
            return once
    opened = []
    for run in cluster:
        wide = run.digits and run.digits[0][1] == widest
        opened += [run.inner(i) for i in range(run.digits[0][0])] if wide else [run]
        if len(opened) > MAX_RUNS:
            owners = sorted({r.owner for r in cluster})
            raise LayoutError(
                f"region {region!r}: {owners} interlace in more than {MAX_RUNS} runs of bytes"
            )
    return opened
