"""The slow reference: token by token, piece by piece, through the layouts alone."""

from collections.abc import Mapping

from kvflow.transfers.executors.base import RankCache, require_caches
from kvflow.transfers.lower import BoundPlan, PageGeometry


class ReferenceExecutor:
    """Copies one field of one token at a time. It lowers nothing and merges nothing."""

    def execute(
        self,
        bound: BoundPlan,
        sources: Mapping[int, RankCache],
        targets: Mapping[int, RankCache],
    ) -> None:
        require_caches(bound, sources, targets)
        for part in bound.plan.parts:
            for src_rank, dst_rank in bound.plan.links:
                src_slots, dst_slots = bound.link(part, src_rank, dst_rank).expand()
                for name in part.components:
                    src, dst = sources[src_rank].pages[name], targets[dst_rank].pages[name]
                    here = PageGeometry(
                        src.record, src.block_size, src.offset, src.block_stride, src.num_blocks
                    )
                    there = PageGeometry(
                        dst.record, dst.block_size, dst.offset, dst.block_stride, dst.num_blocks
                    )
                    pieces = zip(
                        src.record.field_pieces(src.block_size),
                        dst.record.field_pieces(dst.block_size),
                        strict=True,
                    )
                    for a, b in pieces:
                        for s, d in zip(src_slots, dst_slots, strict=True):
                            at, to = int(here.address(s, a)), int(there.address(d, b))
                            block = src.memory[at : at + a.nbytes].clone()
                            dst.memory[to : to + b.nbytes] = block
