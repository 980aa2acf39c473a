"""What the links of a plan would cost, on block tables that stand for any request's: permuted."""

import numpy as np
from attrs import evolve, frozen

from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.paging import page_of
from kvflow.transfers.cost import STRATEGIES, Costs, Strategy, estimate
from kvflow.transfers.lower import BoundPlan, PageGeometry
from kvflow.transfers.plan import Plan, PlanPart

SEED = 0
"""Of the permuted block tables: the same question gets the same answer."""


@frozen
class Link:
    """One (source rank, target rank) pair: `num_tokens` is the most of any component, `seconds`
    and `num_descriptors` are by strategy, `staged` by strategy the bytes that wait at the target
    for their places."""

    src_rank: int
    dst_rank: int
    num_tokens: int
    num_runs: int
    nbytes: int
    num_descriptors: dict[Strategy, int]
    staged: dict[Strategy, int]
    seconds: dict[Strategy, float]

    @property
    def pick(self) -> Strategy:
        """The strategy with the shortest prediction."""
        return min(STRATEGIES, key=lambda s: self.seconds[s])


def synthetic_binding(layout: KVLayout, length: int) -> Binding:
    """A request of `length` tokens with its block ids in an order that nothing can merge by luck
    alone: a permutation of as many blocks as it needs."""
    rng = np.random.default_rng(SEED)
    need = layout.num_blocks_for(length)
    tables = {name: rng.permutation(n) for name, n in need.items()}
    return Binding.of(layout, tables, {name: max(n, 1) for name, n in need.items()}, length)


def price_links(plan: Plan, costs: Costs) -> tuple[Link, ...]:
    """Every link of the plan, sorted, priced with `costs`."""
    length = plan.tokens[1]
    bound = BoundPlan(
        plan, synthetic_binding(plan.src, length), synthetic_binding(plan.dst, length)
    )
    return tuple(_price(bound, src, dst, costs) for src, dst in plan.links)


def _price(bound: BoundPlan, src_rank: int, dst_rank: int, costs: Costs) -> Link:
    descriptors = dict.fromkeys(STRATEGIES, 0)
    staged = dict.fromkeys(STRATEGIES, 0)
    seconds = dict.fromkeys(STRATEGIES, 0.0)
    num_tokens = num_runs = nbytes = 0
    for part in bound.plan.parts:
        runs = bound.link(part, src_rank, dst_rank)
        if not len(runs):
            continue
        num_tokens, num_runs = max(num_tokens, runs.num_tokens), num_runs + len(runs)
        nbytes += runs.num_tokens * bound.plan.row_nbytes(part)
        for (src, dst), n in _kinds(bound, part, src_rank, dst_rank).items():
            pages = n * len(np.unique(page_of(runs.src, src.block_size)))
            staged["stage"] += pages * src.record.page_extent(src.block_size)
            staged["pack"] += runs.num_tokens * n * src.record.row_nbytes(runs.src_heads)
            for strategy in STRATEGIES:
                priced = estimate(costs, strategy, runs, src, dst, n)
                descriptors[strategy] += priced.num_descriptors
                seconds[strategy] += priced.seconds
            costs = evolve(costs, round_trip=0.0)  # one request for all that a link packs
    return Link(src_rank, dst_rank, num_tokens, num_runs, nbytes, descriptors, staged, seconds)


def _kinds(
    bound: BoundPlan, part: PlanPart, src_rank: int, dst_rank: int
) -> dict[tuple[PageGeometry, PageGeometry], int]:
    """How many of a part's components have each pair of page geometries."""
    counted: dict[tuple[PageGeometry, PageGeometry], int] = {}
    for component in part.components:
        src = _geometry(bound.src, part.src_group, component, src_rank)
        dst = _geometry(bound.dst, part.dst_group, component, dst_rank)
        counted[src, dst] = counted.get((src, dst), 0) + 1
    return counted


def _geometry(binding: Binding, group: str, component: str, rank: int) -> PageGeometry:
    layout = binding.layout
    record, size = layout.local_record(component, rank), layout.group(group).paging.block_size
    return PageGeometry(record, size, 0, record.page_pitch(size), binding.num_blocks[group])
