"""What a request takes from each pool, and which pool is too small for it."""

from collections.abc import Mapping

from kvflow.engine.hisparse.sizes import INDEXER, LATENT
from kvflow.errors import CapacityError
from kvflow.layouts.layout import KVLayout

_POOLS = {LATENT: "host pool of latent pages", INDEXER: "device pool of index pages"}


def check_admission(layout: KVLayout, num_blocks: Mapping[str, int], length: int) -> dict[str, int]:
    """Blocks by group of a request of `length` tokens, prompt and max_tokens together, on the
    fullest rank. The hot part of the device is no limit: it holds some rows of any context. Raises
    `CapacityError` naming the pool that is too small even when empty, and both numbers."""
    need = layout.num_blocks_for(length)
    for name, blocks in need.items():
        if blocks > num_blocks[name]:
            size = layout.group(name).paging.block_size
            raise CapacityError(
                f"{length} tokens need {blocks} blocks of {size} in the {_POOLS[name]}, it has "
                f"{num_blocks[name]}"
            )
    return need
