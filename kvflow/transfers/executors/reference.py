"""The slow reference: token by token, piece by piece, nothing merged."""

from collections.abc import Mapping

import torch

from kvflow.kernels.pages import PageView
from kvflow.layouts.pieces import refine
from kvflow.transfers.executors.apart import check_apart
from kvflow.transfers.executors.base import RankCache, check_caches
from kvflow.transfers.lower import BoundPlan, SlotRuns


class ReferenceExecutor:
    """Copies one piece of one token at a time. It lowers nothing and merges nothing."""

    def execute(
        self,
        bound: BoundPlan,
        sources: Mapping[int, RankCache],
        targets: Mapping[int, RankCache],
    ) -> None:
        check_caches(bound, sources, targets)
        check_apart(bound, sources, targets)
        for part in bound.plan.parts:
            for src_rank, dst_rank in bound.plan.links:
                runs = bound.link(part, src_rank, dst_rank)
                for name in part.components if len(runs) else ():
                    _move(runs, sources[src_rank].pages[name], targets[dst_rank].pages[name])
        for dst_rank, target in targets.items():
            for part, rank, runs in bound.copies_to(dst_rank):
                for name in part.components:
                    _move(runs, targets[rank].pages[name], target.pages[name])


def _move(runs: SlotRuns, src: PageView, dst: PageView) -> None:
    src_slots, dst_slots = (torch.from_numpy(slots) for slots in runs.expand())
    here = src.record.pieces(src.block_size, runs.src_heads)
    there = dst.record.pieces(dst.block_size, runs.dst_heads)
    for a, b in refine(here, there):
        begins = zip(src.byte_offsets(src_slots, a), dst.byte_offsets(dst_slots, b), strict=True)
        for at, to in begins:
            dst.memory[to : to + b.nbytes] = src.memory[at : at + a.nbytes].clone()
