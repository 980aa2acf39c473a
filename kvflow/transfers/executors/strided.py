"""The torch executor: whole pages and long runs as slices, everything else as indexed rows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvflow.kernels.rows import PageView, gather_rows, scatter_rows
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.base import RankCache, require_caches
from kvflow.transfers.lower import BoundPlan, SlotRuns


class StridedExecutor:
    """Moves links between caches of one process, on CPU or one GPU."""

    def execute(
        self,
        bound: BoundPlan,
        sources: Mapping[int, RankCache],
        targets: Mapping[int, RankCache],
    ) -> None:
        require_caches(bound, sources, targets)
        for dst_rank, target in targets.items():
            for part, src_rank, runs in bound.links_to(dst_rank):
                for name in part.components:
                    move_runs(runs, sources[src_rank].pages[name], target.pages[name])


def move_runs(runs: SlotRuns, src: PageView, dst: PageView) -> None:
    """Moves one component on one link: whole blocks if every run is one and pages look alike,
    rows otherwise."""
    blocks = runs.whole_blocks(src.block_size, dst.block_size)
    if blocks is not None and src.record == dst.record:
        _page_matrix(dst)[_index(blocks[1])] = _page_matrix(src)[_index(blocks[0])]
        return
    src_slots, dst_slots = runs.expand()
    scatter_rows(dst, _index(dst_slots), gather_rows(src, _index(src_slots)))


def _index(values: Ints) -> Tensor:
    return torch.from_numpy(values)


def _page_matrix(view: PageView) -> Tensor:
    """uint8 [num_blocks, page bytes] over the pages of a region."""
    page = view.record.page_nbytes(view.block_size)
    return view.memory.as_strided((view.num_blocks, page), (view.block_stride, 1), view.offset)
