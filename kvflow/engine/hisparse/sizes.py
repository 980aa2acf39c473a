"""What HiSparse keeps where, and how many bytes that is, before anything is allocated.

Latent rows are paged on the host, index keys on the device. The device holds latent rows only in a
pool of fixed size: for every request and index group some tail pages, where new rows are written,
and hot rows, fetched from the host.
"""

from collections.abc import Mapping
from typing import Self

from attrs import field, frozen
from attrs.converters import optional

from kvflow.errors import CapacityError, LayoutError
from kvflow.layouts.layout import CacheGroup, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged, Pool
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.values import integer, not_negative, positive

LATENT, INDEXER = "latent", "indexer"
"""The two block-table groups: latent rows on the host, index keys on the device."""


def hisparse_layout(spec: KVCacheSpec, placement: Placement, block_size: int) -> KVLayout:
    """Two groups: `LATENT`, pages of a host pool, and `INDEXER`, pages of a device pool.

    >>> from kvflow.layouts.sharding import Replicated
    >>> from kvflow.layouts.spec import GLM_5_3
    >>> spec = KVCacheSpec.from_config(GLM_5_3)
    >>> layout = hisparse_layout(spec, Placement.simple(Replicated()), 64)
    >>> [(g.name, len(g.components)) for g in layout.groups]
    [('latent', 79), ('indexer', 22)]
    """
    groups = [CacheGroup(LATENT, spec.select(kind="latent"), Pool(block_size))]
    if keys := spec.select(kind="indexer"):
        groups.append(CacheGroup(INDEXER, keys, Paged(block_size)))
    return KVLayout(spec, placement, groups)


def latent_pool_layout(layout: KVLayout) -> KVLayout:
    """The device's pool of latent rows: one row a slot, a slot one number in all layers."""
    names = layout.spec.select(kind="latent")
    spec = KVCacheSpec([layout.spec[name] for name in names], layout.spec.content)
    return KVLayout(spec, layout.placement, (CacheGroup(LATENT, names, Paged(1)),))


@frozen
class HiSparseSizes:
    """How many rows the device holds.

    max_requests: requests that decode at a time. hot_rows: per request and index group; see
    `for_drafts`. tail_pages: likewise, of the layout's block size. device_nbytes: what the latent
    pool on the device may take, None for no limit. Raises `LayoutError` for hot rows that cannot
    hold the rows of one query, or fewer than two tail pages (one fills, the next begins)."""

    topk: int = field(converter=integer, validator=positive)
    max_requests: int = field(converter=integer, validator=positive)
    hot_rows: int = field(converter=integer, validator=positive)
    tail_pages: int = field(default=2, converter=integer, validator=positive)
    device_nbytes: int | None = field(default=None, converter=optional(integer))

    def __attrs_post_init__(self) -> None:
        if self.hot_rows < self.topk:
            raise LayoutError(
                f"hot_rows {self.hot_rows} must hold the topk {self.topk} rows of one query"
            )
        if self.tail_pages < 2:
            raise LayoutError(f"tail_pages {self.tail_pages}, must be at least 2")

    @classmethod
    def for_drafts(
        cls, topk: int, max_requests: int, num_drafts: int, *, device_nbytes: int | None = None
    ) -> Self:
        """Hot rows for `num_drafts` drafts: (longest query + 1) * topk, a query being one token and
        its drafts. All rows that a step can choose fit, and a query's worth of older ones.

        >>> HiSparseSizes.for_drafts(2048, 1, 3).hot_rows
        10240
        """
        queries = not_negative_drafts(num_drafts) + 1
        return cls(topk, max_requests, (queries + 1) * topk, device_nbytes=device_nbytes)

    def rows_per_request(self, block_size: int) -> int:
        """Slots of one request in one layer."""
        return self.tail_pages * block_size + self.hot_rows


def not_negative_drafts(num_drafts: int) -> int:
    """Raises `LayoutError` for a number of drafts below 0."""
    if integer(num_drafts, "num_drafts") < 0:
        raise LayoutError(f"num_drafts {num_drafts} must be at least 0")
    return num_drafts


@frozen
class HiSparseBytes:
    """Bytes of one rank: latent pages on the host; index pages, tail pages and hot rows on the
    device, over all layers."""

    host: int = field(validator=not_negative)
    index_pages: int = field(validator=not_negative)
    tail_pages: int = field(validator=not_negative)
    hot_rows: int = field(validator=not_negative)

    @property
    def latent_pool(self) -> int:
        """What `HiSparseSizes.device_nbytes` limits."""
        return self.tail_pages + self.hot_rows

    @property
    def device(self) -> int:
        return self.index_pages + self.latent_pool

    @classmethod
    def of(
        cls, layout: KVLayout, num_blocks: Mapping[str, int], sizes: HiSparseSizes
    ) -> "HiSparseBytes":
        """max_requests * (tail_pages * block_size + hot_rows) rows of every latent component, and
        `num_blocks` pages of each group. Raises `LayoutError` for a layout of other groups,
        `CapacityError` if the latent pool exceeds ``sizes.device_nbytes``."""
        size = block_size_of(layout)
        row = sum(layout.spec[c].record.page_pitch(1) for c in layout.group(LATENT).components)
        pages = {
            g.name: num_blocks[g.name]
            * sum(layout.spec[c].record.page_pitch(size) for c in g.components)
            for g in layout.groups
        }
        tail, hot = (
            sizes.max_requests * rows * row for rows in (sizes.tail_pages * size, sizes.hot_rows)
        )
        found = cls(pages[LATENT], pages.get(INDEXER, 0), tail, hot)
        cap = sizes.device_nbytes
        if cap is not None and found.latent_pool > cap:
            raise CapacityError(
                f"the latent pool on the device takes {found.latent_pool} bytes ({tail} of tail "
                f"pages, {hot} of hot rows), its cap is {cap}"
            )
        return found


def block_size_of(layout: KVLayout) -> int:
    """The block size that both groups share. Raises `LayoutError` for a layout that is not that of
    `hisparse_layout`."""
    wanted = {LATENT: "latent", INDEXER: "indexer"}
    for group in layout.groups:
        kinds = {layout.spec[c].kind for c in group.components}
        if kinds != {wanted.get(group.name)}:
            raise LayoutError(
                f"group {group.name!r} of {sorted(kinds)}: HiSparse pages latents in a group "
                f"{LATENT!r} and index keys in a group {INDEXER!r}"
            )
    sizes = {group.paging.block_size for group in layout.groups}
    if LATENT not in [g.name for g in layout.groups] or len(sizes) != 1:
        raise LayoutError(f"groups {[str(g) for g in layout.groups]} must share one block size")
    return sizes.pop()
