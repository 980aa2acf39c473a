"""What `kvflow explain` finds out about a transfer, as a value."""

from typing import Any

import attrs
import numpy as np
from attrs import frozen

from kvflow.explain.naive import Naive, naive_formulas
from kvflow.explain.prices import Link, price_links
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.text import format_layout, format_members
from kvflow.transfers.cost import STRATEGIES, Costs, Strategy
from kvflow.transfers.plan import Plan
from kvflow.transfers.verify import verify_plan


@frozen
class StrategyTotal:
    """One strategy for the whole transfer. `seconds`: the links into one target one after the
    other, all targets at once. `staging_nbytes`: what the fullest target holds in staging."""

    name: Strategy
    num_descriptors: int
    staging_nbytes: int
    seconds: float


@frozen
class RunLengths:
    """Runs of at least `low` and below `2*low` tokens."""

    low: int
    num_runs: int
    num_tokens: int


@frozen
class Source:
    """What is read from a rank: tokens and bytes, and the ranks that hold the same."""

    rank: int
    replicas: tuple[int, ...]
    num_tokens: int
    nbytes: int


@frozen
class Components:
    """Moved and deliberately absent components as texts, with their bytes of one token."""

    moved: str
    moved_nbytes: int
    absent: str
    absent_nbytes: int


@frozen
class Report:
    """A verified plan, explained: all numbers follow from the plan, the costs and the tokens."""

    src: str
    dst: str
    tokens: tuple[int, int]
    digest: str
    nbytes: int
    link_nbytes: int
    num_runs: int
    links: tuple[Link, ...]
    strategies: tuple[StrategyTotal, ...]
    pick: Strategy
    pick_seconds: float
    run_lengths: tuple[RunLengths, ...]
    sources: tuple[Source, ...]
    components: Components
    naive: tuple[Naive, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as a dict of JSON types; a link has its own `pick`."""
        said = attrs.asdict(self)
        for told, link in zip(said["links"], self.links, strict=True):
            told["pick"] = link.pick
        return said


def explain(plan: Plan, costs: Costs | None = None) -> Report:
    """Verifies a plan and explains it. Raises `PlanError` as `verify_plan` does."""
    verify_plan(plan)
    links = price_links(plan, costs or Costs())
    strategies = tuple(_total(links, s) for s in STRATEGIES)
    best = min(strategies, key=lambda s: s.seconds)
    return Report(
        src=format_layout(plan.src),
        dst=format_layout(plan.dst),
        tokens=plan.tokens,
        digest=plan.digest,
        nbytes=plan.nbytes,
        link_nbytes=plan.link_nbytes,
        num_runs=plan.num_runs,
        links=links,
        strategies=strategies,
        pick=best.name,
        pick_seconds=best.seconds,
        run_lengths=_run_lengths(plan),
        sources=_sources(plan.src, links),
        components=_components(plan),
        naive=naive_formulas(plan.src, plan.dst, plan.tokens),
    )


def _total(links: tuple[Link, ...], strategy: Strategy) -> StrategyTotal:
    seconds: dict[int, float] = {}
    staged: dict[int, int] = {}
    for link in links:
        at = link.dst_rank
        seconds[at] = seconds.get(at, 0.0) + link.seconds[strategy]
        staged[at] = staged.get(at, 0) + link.staged[strategy]
    return StrategyTotal(
        strategy,
        sum(link.num_descriptors[strategy] for link in links),
        max(staged.values(), default=0),
        max(seconds.values(), default=0.0),
    )


def _run_lengths(plan: Plan) -> tuple[RunLengths, ...]:
    """Runs of all parts, those that parts share counted once, by powers of two."""
    distinct = {id(part.runs): part.runs.count for part in plan.parts}
    counts = np.concatenate([*distinct.values(), np.empty(0, np.int64)])
    powers = np.floor(np.log2(np.maximum(counts, 1))).astype(np.int64)
    return tuple(
        RunLengths(2 ** int(p), int((powers == p).sum()), int(counts[powers == p].sum()))
        for p in np.unique(powers)
    )


def _sources(src: KVLayout, links: tuple[Link, ...]) -> tuple[Source, ...]:
    replicas = {rank: group for group in src.placement.ranks for rank in group}
    return tuple(
        Source(
            rank,
            tuple(sorted(replicas[rank])),
            sum(link.num_tokens for link in links if link.src_rank == rank),
            sum(link.nbytes for link in links if link.src_rank == rank),
        )
        for rank in src.ranks
    )


def _components(plan: Plan) -> Components:
    moved = {name for part in plan.parts for name in part.components}
    sides = {c.name: c for side in (plan.src, plan.dst) for c in side.spec.components}
    return Components(
        _named(plan, moved),
        sum(sides[name].record.nbytes for name in moved),
        _named(plan, set(plan.absent)),
        sum(sides[name].record.nbytes for name in plan.absent),
    )


def _named(plan: Plan, names: set[str]) -> str:
    """Components of either side as a text, in the words of the side that knows most of them."""
    spec = max((plan.dst.spec, plan.src.spec), key=lambda s: len(names & set(s.names)))
    known = [name for name in spec.names if name in names]
    foreign = sorted(names - set(known))
    return ",".join(text for text in [format_members(spec, known), *foreign] if text)
