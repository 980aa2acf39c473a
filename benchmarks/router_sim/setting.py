"""What a simulated deployment is made of, and what happens to one request in it."""

from attrs import frozen

from .traces import Turn


@frozen
class Setting:
    """Rates are tokens per second. A prefill engine computes prompts one after the other at
    `prefill_rate`, restores from its host tier at `restore_rate` and borrows at `pull_rate`; a
    decode engine pulls at `pull_rate`, computes prompts of its own at `local_rate`, and generates
    a token of every request it runs each `token_time` + `token_time_more` * (number of them)
    seconds.

    The host tiers of the prefill engines hold `tier_tokens` together, and so do the decode
    engines; a prefill engine's device holds `device_share` of its host tier. The router hears of
    everything, KV events and ends of requests, `delay` seconds later.

    `live` sessions run at a time, for `seconds`; what happens in the first `warm_up` is not
    measured. The first ones are met in the middle, with the prompts before in the tiers."""

    num_prefill: int
    num_decode: int
    live: int
    tier_tokens: int
    prefill_rate: float = 28_000.0
    restore_rate: float = 1_600_000.0
    pull_rate: float = 1_600_000.0
    local_rate: float = 14_000.0
    token_time: float = 0.02
    token_time_more: float = 0.0005
    device_share: float = 0.25
    delay: float = 0.5
    seconds: float = 900.0
    warm_up: float = 240.0
    block_size: int = 256
    seed: int = 0


@frozen(eq=False)
class Request:
    """A turn that has come."""

    name: str
    session: int
    turn: Turn
    time: float


@frozen
class Choice:
    """Where it goes; `prefill` None: `decode` computes it. Loans name their lenders."""

    prefill: int | None
    decode: int
    prefill_lender: int | None = None


@frozen
class Served:
    """What became of a request: `computing` is when the `uncached_tokens` of its prompt were
    computed, `first_token` when its decode engine had all of it."""

    request: Request
    choice: Choice
    uncached_tokens: int
    computing: tuple[float, float]
    first_token: float

    @property
    def engine(self) -> str:
        """Where the prompt was computed."""
        if self.choice.prefill is None:
            return f"decode-{self.choice.decode}"
        return f"prefill-{self.choice.prefill}"
