"""The block tables of a request that grows."""

from collections.abc import Mapping

from kvflow.engine.blocks import BlockPool
from kvflow.engine.decode.requests import Decoding
from kvflow.layouts.layout import KVLayout

Pools = Mapping[str, BlockPool]


def grow(work: Decoding, pools: Pools, layout: KVLayout, length: int) -> bool:
    """Blocks for `length` positions in every group, or nothing and False if too few are free."""
    need = layout.num_blocks_for(length)
    lacking = {name: max(n - len(work.tables.get(name, ())), 0) for name, n in need.items()}
    if any(n > pools[name].num_free for name, n in lacking.items()):
        return False
    for name, n in lacking.items():
        work.tables.setdefault(name, []).extend(pools[name].allocate(n))
    return True


def give_back(work: Decoding, pools: Pools) -> None:
    """All blocks of the request are free again."""
    for name, ids in work.tables.items():
        pools[name].free(ids)
    work.tables = {}
