"""LinksHere: one process's part of a plan, where one side is memory that every rank maps."""

from kvflow.transfers.executors.strided import move_link
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.operators.protocol import Caches


class LinksHere:
    """An executor that moves the links whose two ends it is given. Ranks that share the memory of
    one side, each given its own cache on the other, carry out the whole plan together."""

    def execute(self, bound: BoundPlan, sources: Caches, targets: Caches) -> None:
        for dst_rank, target in targets.items():
            for part, src_rank, runs in bound.links_to(dst_rank):
                if src_rank in sources:
                    move_link(runs, part.components, sources[src_rank].pages, target.pages)
