"""The catalogue: how the systems of the field lay a KV cache out in memory, as data.

Each entry states its source, the order of its axes in memory and golden numbers, and gives the
regions and pages of any shape. Entries of one family hold the same components, so a plan exists
between any two of them; whether their bytes also mean the same (rope order, scale rounding) is a
matter of content, which two engines compare when they meet.

>>> order = entry("vllm.fp8_ds_mla").order(Shape(num_layers=79, block_size=64))
>>> order.pages_of("latent.1").base, order.pages_of("latent.1").block_stride
(125952, 41984)
"""

from kvflow.errors import LayoutError
from kvflow.layouts.catalogue import (
    dynamo,
    lmcache,
    sglang,
    trtllm,
    vllm,
    vllm_host,
    vllm_mla,
)
from kvflow.layouts.catalogue.entry import FAMILIES, Entry, Golden, Shape, Source

CATALOGUE: tuple[Entry, ...] = (
    *vllm.ENTRIES,
    *vllm_mla.ENTRIES,
    *vllm_host.ENTRIES,
    *sglang.ENTRIES,
    *trtllm.ENTRIES,
    *dynamo.ENTRIES,
    *lmcache.ENTRIES,
)


def names() -> tuple[str, ...]:
    return tuple(e.name for e in CATALOGUE)


def entry(name: str) -> Entry:
    """Raises `LayoutError` for a name that is not in the catalogue."""
    for e in CATALOGUE:
        if e.name == name:
            return e
    raise LayoutError(f"no layout {name!r} in the catalogue; it has {list(names())}")


__all__ = ["CATALOGUE", "FAMILIES", "Entry", "Golden", "Shape", "Source", "entry", "names"]
