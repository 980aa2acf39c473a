"""What a bound plan costs, link by link, in every strategy: for `explain` and for reports."""

from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from kvflow.layouts.layout import Binding
from kvflow.transfers.cost import (
    STRATEGIES,
    Costs,
    Estimate,
    Strategy,
    choose,
    estimate,
    estimate_way,
)
from kvflow.transfers.lower import BoundPlan, PageGeometry, SlotRuns
from kvflow.transfers.plan import PlanPart


@frozen(eq=False)
class LinkCost:
    """Components that look alike on one link. `estimates` is by strategy; `chosen` the ways that
    the cost model takes, with what they cost together."""

    src_rank: int
    dst_rank: int
    components: tuple[str, ...]
    num_tokens: int
    nbytes: int
    estimates: Mapping[Strategy, Estimate]
    chosen: tuple[Strategy, ...]
    best: Estimate

    def same_as(self, strategy: Strategy) -> tuple[Strategy, ...]:
        """Other strategies that cost exactly the same here: they hand over the same thing."""
        mine = self.estimates[strategy]
        return tuple(s for s in STRATEGIES if s != strategy and self.estimates[s] == mine)


def predict(bound: BoundPlan, costs: Costs) -> tuple[LinkCost, ...]:
    """Every link of a plan, for pages that stand behind each other."""
    return tuple(
        cost
        for dst_rank in sorted({dst for _, dst in bound.plan.links})
        for part, src_rank, runs in bound.links_to(dst_rank)
        for cost in _link(bound, costs, part, src_rank, dst_rank, runs)
    )


def total(links: Iterable[LinkCost]) -> tuple[Mapping[Strategy, Estimate], Estimate]:
    """The sum of all links: by strategy, and as chosen. Links of one target run one after the
    other; those of different targets may run at once, so these are seconds of work."""
    links = tuple(links)
    by_strategy = {s: sum((k.estimates[s] for k in links), Estimate()) for s in STRATEGIES}
    return by_strategy, sum((k.best for k in links), Estimate())


def _link(
    bound: BoundPlan, costs: Costs, part: PlanPart, src_rank: int, dst_rank: int, runs: SlotRuns
) -> Iterator[LinkCost]:
    records = {c.name: c.record for c in bound.plan.dst.spec.components}
    alike: dict[int, list[str]] = {}
    for name in part.components:
        alike.setdefault(id(records[name]), []).append(name)
    for names in alike.values():
        first, *_ = names
        src = _pages(bound.src, part.src_group, first, src_rank)
        dst = _pages(bound.dst, part.dst_group, first, dst_rank)
        num = len(names)
        ways = choose(costs, runs, src, dst, num, STRATEGIES)
        yield LinkCost(
            src_rank,
            dst_rank,
            tuple(names),
            runs.num_tokens,
            runs.num_tokens * dst.record.row_nbytes(runs.dst_heads) * num,
            {s: estimate(costs, s, runs, src, dst, num) for s in STRATEGIES},
            tuple(way for way, _ in ways),
            sum((estimate_way(costs, w, r, src, dst, num) for w, r in ways), Estimate()),
        )


def _pages(binding: Binding, group: str, component: str, rank: int) -> PageGeometry:
    record = binding.layout.local_record(component, rank)
    size = binding.layout.group(group).paging.block_size
    return PageGeometry(record, size, 0, record.page_pitch(size), binding.num_blocks[group])
