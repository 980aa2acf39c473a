"""What an entry of the catalogue is, and how it becomes pages in regions."""

from collections.abc import Callable

from attrs import evolve, field, frozen

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import Arrangement, Plane
from kvflow.layouts.catalogue.axes import Placed, place_axes
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.memory import MemoryOrder, Place
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import DTYPE_NBYTES, Field, Record, index_record, latent_record
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import Component, KVCacheSpec
from kvflow.layouts.values import integer, not_negative, positive

GROUP = "kv"
"""The block table that all layers of an entry share, and the region where they share one."""


@frozen
class Shape:
    """The numbers that a layout is stated in, as one rank stores them. `full_layers` are the
    layers that own an indexer (default: all). `chunk_blocks` is how many device blocks one block
    of a host pool holds, `num_workers` and `worker` who shares its rows."""

    num_layers: int = field(default=2, converter=integer, validator=positive)
    num_blocks: int = field(default=3, converter=integer, validator=positive)
    block_size: int = field(default=32, converter=integer, validator=positive)
    num_kv_heads: int = field(default=2, converter=integer, validator=positive)
    head_dim: int = field(default=32, converter=integer, validator=positive)
    dtype: str = "bfloat16"
    latent_rank: int = field(default=512, converter=integer, validator=positive)
    rope_dim: int = field(default=64, converter=integer, validator=positive)
    index_dim: int = field(default=128, converter=integer, validator=positive)
    full_layers: tuple[int, ...] | None = None
    chunk_blocks: int = field(default=2, converter=integer, validator=positive)
    num_workers: int = field(default=1, converter=integer, validator=positive)
    worker: int = field(default=0, converter=integer, validator=not_negative)

    def __attrs_post_init__(self) -> None:
        if self.worker >= self.num_workers:
            raise LayoutError(f"worker {self.worker}, must be below {self.num_workers} workers")

    @property
    def indexed(self) -> tuple[int, ...]:
        """The layers that own an indexer."""
        return tuple(range(self.num_layers)) if self.full_layers is None else self.full_layers


@frozen
class Source:
    """Where a fact is from: project, version, file or document, and what it says in our words."""

    project: str
    version: str
    where: str
    says: str


@frozen
class Golden:
    """Numbers of an entry at one shape, in bytes: one token in all layers, the pages of one layer
    in one block, from layer 0 to layer 1 (None where each has a region), from block 0 to block 1,
    all regions."""

    shape: Shape
    nbytes_per_token: int
    page_nbytes: int
    layer_stride: int | None
    block_stride: int
    nbytes: int


Page = Callable[[Shape], Arrangement]
"""The arrangement of pages that axes alone do not say."""


@frozen
class Entry:
    """One layout of the field: what it holds (entries of one `family` hold the same components at
    the same shape), and its `axes` in memory, those of V apart where they differ. `page` is the
    arrangement behind the word ``page``; `block_multiple` rounds the slowest axis up; blocks of a
    `chunked` entry hold `chunk_blocks` device blocks, of whose tokens ``t*`` is a tile. `custom`
    places pages that no axes describe.
    """

    name: str
    family: str
    axes: str
    source: Source
    golden: Golden
    value_axes: str | None = None
    page: Page | None = field(default=None, repr=False)
    block_multiple: int = 1
    chunked: bool = False
    custom: Callable[["Entry", Shape], MemoryOrder] | None = field(default=None, repr=False)
    note: str = ""

    def order(self, shape: Shape) -> MemoryOrder:
        """The regions and pages of a rank that stores `shape` in this layout. Raises `LayoutError`
        for a shape that it cannot have."""
        if self.custom is not None:
            return self.custom(self, shape)
        entry = evolve(self, axes=self.axes.replace("t*", f"t{shape.block_size}"))
        if self.chunked:
            shape = evolve(shape, block_size=shape.block_size * shape.chunk_blocks)
        components: list[Component] = []
        places: dict[str, Place] = {}
        sizes: dict[str, int] = {}
        for component, axes in FAMILIES[self.family](entry, shape):
            at = {"v": int(component.kind == "value"), "w": shape.worker}
            at["L"] = sum(c.kind == component.kind for c in components)
            region = _region(axes.regions, at)
            inside = {axis: index for axis, index in at.items() if axis not in axes.regions}
            places[component.name] = (region, axes.base(inside), axes.strides["B"])
            sizes[region] = axes.nbytes
            components.append(component)
        layout = one_rank(KVCacheSpec(components), shape.block_size)
        blocks = {GROUP: shape.num_blocks}
        return MemoryOrder.placed(layout, 0, blocks, places, sizes=sizes)


def _region(axes: str, at: dict[str, int]) -> str:
    """A region's name: ``kv``, ``layer.3``, ``key.3``."""
    if "L" not in axes:
        return GROUP
    return f"{('key', 'value')[at['v']] if 'v' in axes else 'layer'}.{at['L']}"


def one_rank(spec: KVCacheSpec, block_size: int) -> KVLayout:
    """Everything on rank 0, in one group."""
    return KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(block_size), GROUP)


# --- families: components and their axes ----------------------------------------------------------


def _sizes(shape: Shape, num_layers: int, **page: int) -> dict[str, int]:
    which = {"L": num_layers, "B": shape.num_blocks, "v": 2, "w": shape.num_workers}
    return which | {"t": shape.block_size} | page


def _gqa(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    """Keys and values of every layer."""
    sizes = _sizes(shape, shape.num_layers, h=shape.num_kv_heads, e=shape.head_dim)
    unit = DTYPE_NBYTES[shape.dtype]
    pairs = []
    for layer in range(shape.num_layers):
        for kind, text in (("key", entry.axes), ("value", entry.value_axes or entry.axes)):
            axes = place_axes(text, sizes, unit, entry.block_multiple)
            held = Field(kind, shape.dtype, shape.head_dim, shape.num_kv_heads)
            component = Component(kind, layer, Record((held,), axes.order))  # type: ignore[arg-type]
            pairs.append((component, axes))
    return pairs


def _rows(
    entry: Entry, shape: Shape, kind: str, layers: tuple[int, ...], fields: tuple[Field, ...]
) -> list[tuple[Component, Placed]]:
    """One record without heads for each layer."""
    sizes = _sizes(shape, len(layers), f=1, e=1)
    if entry.page is None:
        unit = Record(fields).nbytes
        axes = place_axes(entry.axes, sizes, unit, entry.block_multiple)
        record = Record(fields, axes.order)
    else:
        record = Record(fields, entry.page(shape))
        unit = record.page_pitch(shape.block_size)
        axes = place_axes(entry.axes, sizes, unit, entry.block_multiple)
    return [(Component(kind, layer, record), axes) for layer in layers]  # type: ignore[arg-type]


def _latent(entry: Entry, shape: Shape, *fields: Field) -> list[tuple[Component, Placed]]:
    return _rows(entry, shape, "latent", tuple(range(shape.num_layers)), fields)


def _mla_bf16(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    sizes = {"latent_rank": shape.latent_rank, "rope_dim": shape.rope_dim}
    return _latent(entry, shape, *latent_record("bfloat16", **sizes).fields)


def _mla_fp8(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    return _latent(entry, shape, *fp8_latent(shape).fields)


def _mla_nvfp4(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    if shape.latent_rank % 16:
        raise LayoutError(f"latent_rank {shape.latent_rank}, must be a multiple of 16 for NVFP4")
    return _latent(
        entry,
        shape,
        Field("latent", "uint8", shape.latent_rank // 2),
        Field("rope", "float8_e4m3fn", shape.rope_dim),
        Field("scale", "float8_e4m3fn", shape.latent_rank // 16),
    )


def _dsv4(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    return _latent(
        entry,
        shape,
        Field("latent", "float8_e4m3fn", 448),
        Field("rope", "bfloat16", 64),
        Field("scale", "uint8", 8),
    )


def _dsv41(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    return _latent(entry, shape, Field("latent", "float8_e4m3fn", 512), Field("scale", "uint8", 16))


def _index(entry: Entry, shape: Shape) -> list[tuple[Component, Placed]]:
    record = index_record("fp8", index_dim=shape.index_dim)
    return _rows(entry, shape, "indexer", shape.indexed, record.fields)


FAMILIES: dict[str, Callable[[Entry, Shape], list[tuple[Component, Placed]]]] = {
    "gqa": _gqa,
    "mla_bf16": _mla_bf16,
    "mla_fp8": _mla_fp8,
    "mla_nvfp4": _mla_nvfp4,
    "dsv4": _dsv4,
    "dsv41": _dsv41,
    "index_fp8": _index,
}
"""What an entry can hold: keys and values; latent rows as bf16, as fp8 with float32 scales, as
NVFP4; DeepSeek-V4's and V4.1's rows; indexer keys as fp8 with one scale."""


def fp8_latent(shape: Shape) -> Record:
    return latent_record("fp8", latent_rank=shape.latent_rank, rope_dim=shape.rope_dim)


def planes(*orders: tuple[str, str], multiple: int = 1) -> Page:
    """Planes behind each other, each of some fields in an order."""
    arrangement = Arrangement([Plane(fields.split(), order) for fields, order in orders], multiple)
    return lambda _: arrangement
