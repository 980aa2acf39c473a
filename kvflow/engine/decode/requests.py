"""A request on a decode rank, and the batch it is in."""

from enum import Enum

from attrs import define, field

from kvflow.engine.messages import Admit, StepItem
from kvflow.transfers.plan import Plan


class Phase(Enum):
    """Where a request stands. QUARANTINED: its transfer failed and may still write."""

    WAITING = "waiting"
    PULLING = "pulling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    QUARANTINED = "quarantined"


@define(eq=False)
class Decoding:
    """One request. tokens: the prompt, the first token from prefill, and those generated here.
    computed: positions [0, computed) have their KV in `tables`; at least one token is always
    without. missing: ranks of the group whose part of the transfer has not ended. order: which
    request came first."""

    admit: Admit
    plan: Plan
    order: int
    tokens: list[int]
    missing: int = 0
    computed: int = 0
    phase: Phase = Phase.WAITING
    tables: dict[str, list[int]] = field(factory=dict)
    reports: list[dict[str, object]] = field(factory=list)
    error: str | None = None
    aborted: bool = False

    @property
    def request_id(self) -> str:
        return self.admit.request_id

    @property
    def src_ranks(self) -> list[int]:
        return sorted({src for src, _ in self.plan.links})

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt, the one from prefill included."""
        return len(self.tokens) - len(self.admit.prompt)

    @property
    def max_len(self) -> int:
        """Positions the request can come to need: its last token is never computed."""
        return len(self.admit.prompt) + self.admit.sampling.max_tokens - 1

    @property
    def catching_up(self) -> bool:
        """Whether more than the newest token lacks its KV: the request was preempted."""
        return len(self.tokens) - self.computed > 1

    def item(self, count: int, num_drafts: int) -> StepItem:
        """The next `count` tokens to compute; with the newest of them a token is sampled, and up
        to `num_drafts` drafts are tried."""
        stop = self.computed + count
        last = stop == len(self.tokens)
        return StepItem(
            self.request_id,
            self.computed,
            self.tokens[self.computed : stop],
            None if last else self.tokens[stop],
            self.tables,
            self.admit.sampling if last else None,
            num_drafts=num_drafts if last else 0,
        )
