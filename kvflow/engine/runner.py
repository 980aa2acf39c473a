"""StepRunner: one rank's part of a step, the same for prefill ranks and decode ranks."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from attrs import define, field, frozen
from torch import Tensor

from kvflow.comm import Comm, LocalComm
from kvflow.engine.access import PagedMemory
from kvflow.engine.memory import Deal, KVMemory, StepRequest, balanced_deal
from kvflow.engine.messages import StepItem
from kvflow.engine.sampling import Draws, Sampled, choose
from kvflow.engine.spec.counters import SpecCounters
from kvflow.engine.spec.draft import Drafter
from kvflow.engine.spec.kept import Home, Kept, KeptStates
from kvflow.engine.spec.passes import DraftPass, plan_passes
from kvflow.engine.spec.pending import PendingStep, StepTokens
from kvflow.engine.spec.rows import StepRows
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.sharding import Replicated
from kvflow.models.glm import Glm
from kvflow.models.kvstep import KVStep
from kvflow.transfers.executors.base import RankCache


@frozen(eq=False)
class StepPlan:
    """What the host knows of a step before it. The same on all ranks: each item with the drafts
    that can be tried, its share of the target model's pass, its home, and whether its hidden
    states are kept for the next step. This rank's: the passes that draft, the rows of the target
    model's pass, and how they become tokens."""

    items: tuple[StepItem, ...]
    requests: tuple[StepRequest, ...]
    homes: tuple[Home, ...]
    keeping: tuple[bool, ...]
    passes: tuple[DraftPass, ...]
    rows: StepRows
    draws: Draws


def _unwatched(step: KVStep) -> KVStep:
    return step


@define(eq=False)
class StepRunner:
    """Runs steps of a model over one rank's cache. `deal` says which rank computes which queries;
    everything is derived from the items, which all ranks hold alike. `tp` joins the ranks that
    compute the same tokens for other heads."""

    model: Glm
    memory: KVMemory
    comm: Comm
    deal: Deal
    tp: Comm = field(factory=LocalComm)
    watch: Callable[[KVStep], KVStep] = _unwatched
    """Wraps the cache of each step."""
    counters: SpecCounters = field(init=False, factory=SpecCounters)
    _kept: KeptStates = field(init=False, factory=KeptStates)
    drafter: Drafter = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.drafter = Drafter(self.model, self.memory, self.comm, self.tp)

    @classmethod
    def over(cls, model: Glm, layout: KVLayout, cache: RankCache, comm: Comm) -> "StepRunner":
        """Over pages, with every request's tokens dealt to all ranks of `comm`."""
        deal = balanced_deal([(rank,) for rank in range(comm.size)])
        return cls(model, PagedMemory(layout, cache, comm), comm, deal)

    def step(self, items: Sequence[StepItem]) -> StepTokens:
        """Computes the items' tokens, stores their KV, and samples where an item asks for it.

        Returns the tokens sampled on this rank by request, 1 to ``num_drafts + 1`` of them, or
        fewer of a request that failed: on the ranks that compute the request's last position.
        Whoever forms the next step goes on behind all of them. KV is then valid for every position
        before the last one, in all components; positions up to ``stop + num_drafts`` need slots,
        and those behind hold rows that count for nothing. Drafts are tried from the second step on
        in which an item asks for them. What a failed request has stored may hold no numbers, also
        below its last token: nobody is to read it."""
        plan = self.plan(items)
        tokens = self.launch(plan).read()
        for item, home in zip(plan.items, plan.homes, strict=True):
            run = tokens.sampled.get(item.request_id)
            if run and home[0] == self.comm.rank:
                self.counters.count(item.num_drafts, len(run) - 1)
        return tokens

    def run(self, items: Sequence[StepItem]) -> dict[str, list[Sampled]]:
        """The `step`'s tokens, for callers that end with their requests. Raises `KvflowError` for
        one that failed on this rank."""
        tokens = self.step(items)
        for request_id, why in tokens.failed.items():
            raise KvflowError(f"request {request_id!r}: {why}")
        return tokens.sampled

    def forget(self, request_id: str) -> None:
        """The request has left this rank: finished, aborted or preempted."""
        self._kept.forget(request_id)
        self.memory.forget(request_id)

    def plan(self, items: Sequence[StepItem]) -> StepPlan:
        """Deals the items; those without a hidden state to draft from get no drafts. Raises
        `ConfigError` for tokens outside the vocabulary."""
        able, requests, homes = [], [], []
        for item, queries in zip(items, self.deal(items), strict=True):
            home = queries.ranks[int(queries.sharding.owner(item.stop - 1))]
            num_drafts = item.num_drafts if self._can_draft(item, home) else 0
            stop = item.stop + num_drafts
            if num_drafts:
                queries = Placement(Replicated(item.start, stop), (home,))
            able.append(msgspec.structs.replace(item, num_drafts=num_drafts))
            requests.append(StepRequest(item.request_id, item.start, stop, queries, item.tables))
            homes.append(home)
        rows = StepRows.of(able, requests, self.comm.rank)
        given = [np.array([*item.tokens, item.next_token or 0]) for item in items]
        self.model.check_tokens(np.concatenate(given) if given else [])
        return StepPlan(
            items=tuple(able),
            requests=tuple(requests),
            homes=tuple(homes),
            keeping=tuple(self._kept.wanted(item) for item in items),
            passes=plan_passes(able, homes, self.comm.rank),
            rows=rows,
            draws=Draws.of([(r.sampling, r.position + 1) for r in rows.sampled]),
        )

    def _can_draft(self, item: StepItem, home: Home) -> bool:
        return self.model.mtp is not None and self._kept.can_draft(item, home)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Drafts, computes, chooses tokens and stores KV; waits for none of it."""
        rows = plan.rows
        tokens = rows.tokens(self.drafter.draft(plan.items, plan.passes, self._kept))
        mtp = frozenset(self.memory.layout.spec.select(part="mtp"))
        kv = self.watch(self.memory.open(plan.requests, mtp))
        hidden = self.model.forward(tokens, rows.segments, kv, self.comm, self.tp)
        place = rows.sampled_rows
        ends = hidden.index_select(0, place)
        logits = self.model.logits(ends)
        chosen = choose(logits, plan.draws)
        if mtp:
            followers = rows.followers(chosen.clamp(max=logits.shape[1] - 1))
            self.model.write_mtp(followers, hidden, rows.segments, kv)
        self._keep(plan, ends)
        own = tokens.index_select(0, place)
        return PendingStep.of(plan.items, rows.sampled, own, chosen, logits)

    def _keep(self, plan: StepPlan, hidden: Tensor) -> None:
        """Keeps the sampled rows' hidden states of requests that may draft from them."""
        place: dict[int, int] = {}
        for at, row in enumerate(plan.rows.sampled):
            place.setdefault(row.item_idx, at)
        for i, (item, home) in enumerate(zip(plan.items, plan.homes, strict=True)):
            if plan.keeping[i]:
                count = item.num_drafts + 1
                mine = hidden[place[i] : place[i] + count] if i in place else None
                self._kept.keep(item.request_id, Kept(home, item.stop - 1, count, mine))
