"""What is in flight: the router's own account of every engine, ahead of what engines report."""

from math import exp

from attrs import define, field

from kvflow.router.config import EngineInfo, Load


@define(eq=False)
class EngineAccount:
    """An engine and the requests sent to it that have not ended. `recent_tokens` is its part of
    the fleet's latest work, `num_given` the requests it ever got."""

    info: EngineInfo
    load: Load = field(factory=lambda: Load(0))
    recent_tokens: float = 0.0
    num_given: int = 0
    _computing: dict[str, int] = field(factory=dict)
    _holding: dict[str, int] = field(factory=dict)
    _computing_tokens: int = 0
    _holding_tokens: int = 0

    @property
    def queue_tokens(self) -> int:
        """Tokens of prompts to compute before a new one's."""
        return max(self._computing_tokens, self.load.waiting_tokens)

    @property
    def kv_tokens(self) -> int:
        """Tokens that requests hold, or will when what was sent has begun."""
        return max(self._holding_tokens, self.load.kv_tokens_used)

    @property
    def num_requests(self) -> int:
        return max(len(self._holding), self.load.num_running + self.load.num_waiting)

    def missing_tokens(self, num_tokens: int) -> int:
        """By how much `num_tokens` more are above what the engine has room for."""
        return max(0, self.kv_tokens + num_tokens - self.info.max_kv_tokens)

    def begin(self, request_id: str, uncached_tokens: int, kv_tokens: int) -> None:
        """A request that computes tokens of its prompt here and holds KV until it ends."""
        self._computing[request_id] = uncached_tokens
        self._holding[request_id] = kv_tokens
        self._computing_tokens += uncached_tokens
        self._holding_tokens += kv_tokens
        self.num_given += 1

    def computed(self, request_id: str) -> None:
        """The prompt is computed; does nothing if it was already."""
        self._computing_tokens -= self._computing.pop(request_id, 0)

    def end(self, request_id: str) -> None:
        """The request holds nothing here any more; does nothing if it did not."""
        self.computed(request_id)
        self._holding_tokens -= self._holding.pop(request_id, 0)


def age(accounts: dict[str, EngineAccount], work: dict[str, int], horizon_tokens: int) -> None:
    """Adds `work` (tokens by engine) to what is recent; older work fades by e for every
    `horizon_tokens` tokens that the fleet was given since."""
    fade = exp(-sum(work.values()) / horizon_tokens)
    for name, account in accounts.items():
        account.recent_tokens = account.recent_tokens * fade + work.get(name, 0)
