"""A request on a decode engine, and where it stands."""

from enum import Enum

from attrs import define, field

from kvflow.engine.decode.incoming import Incoming
from kvflow.engine.messages import Admit, StepItem
from kvflow.engine.prefix.cache import Trail


class Phase(Enum):
    """Where a request stands. RESTORING: it takes rows from a host tier, then runs."""

    WAITING = "waiting"
    RESTORING = "restoring"
    PULLING = "pulling"
    RUNNING = "running"
    PREEMPTED = "preempted"


@define(eq=False)
class Decoding:
    """One request. tokens: the prompt, the first token from prefill, and those generated here.
    computed: positions [0, computed) have their KV in `tables`; at least one token is always
    without. num_cached: how many of the prompt's were here when it began. order: which request
    came first. trail: how far its blocks are known to the engine's cache; may_keep: whether they
    may be. has_restored: whether some of its blocks' rows came from a tier."""

    admit: Admit
    incoming: Incoming
    order: int
    tokens: list[int]
    computed: int = 0
    num_cached: int = 0
    was_computed: int = 0
    phase: Phase = Phase.WAITING
    tables: dict[str, list[int]] = field(factory=dict)
    trail: Trail = field(factory=Trail)
    may_keep: bool = True
    has_restored: bool = False
    aborted: bool = False

    @property
    def request_id(self) -> str:
        return self.admit.request_id

    @property
    def is_local(self) -> bool:
        """Whether this engine computes the prompt itself."""
        return self.admit.source is None

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
        """Whether more than the newest token lacks its KV: the request was preempted, or its
        prompt is computed here."""
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
