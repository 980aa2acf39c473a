"""What each engine would charge for its part of a request.

The unit is one token of a prompt computed on a prefill engine. Equal prices go to the engine that
had the least work lately. Session affinity is no rule: the engine that holds a session's prefix is
cheap for its next turn, until its queue costs more than the prefix is worth.
"""

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from kvflow.router.config import RouterConfig
from kvflow.router.index import Hit
from kvflow.router.load import EngineAccount


@frozen
class Loan:
    """The first `num_tokens` tokens of a prompt, which `lender` holds: its borrower computes none
    of them, and takes from there those that it does not hold itself."""

    lender: str
    num_tokens: int


@frozen
class Prompt:
    """A prompt of `num_tokens` tokens, and by engine what it holds of it; `reach` is, of engines
    that restore from others too, what they need not compute."""

    num_tokens: int
    block_size: int
    hits: Mapping[str, Hit]
    reach: Mapping[str, Hit] = field(factory=dict)

    def held(self, name: str) -> int:
        """Tokens that an engine need not compute: its unbroken prefix, whatever the tiers, but
        never the prompt's last token."""
        return self._num_in(self.hits.get(name))

    def known(self, name: str) -> Hit | None:
        """What an engine need not compute, if it computes the prompt."""
        return self.reach.get(name) or self.hits.get(name)

    def num_known(self, name: str) -> int:
        """As `held`, of what is `known`."""
        return self._num_in(self.known(name))

    def _num_in(self, hit: Hit | None) -> int:
        return min(hit.num_blocks * self.block_size, self.num_tokens - 1) if hit else 0


@frozen
class Offer:
    """A price: `uncached_tokens` are computed on the engine, after `loan` is taken."""

    account: EngineAccount
    cost: float
    uncached_tokens: int = 0
    loan: Loan | None = None

    @property
    def name(self) -> str:
        return self.account.info.name

    def __lt__(self, other: "Offer") -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, float, int]:
        return self.cost, self.account.recent_tokens, self.account.num_given


@frozen
class Pair:
    """One way to serve a request: `prefill` None means that `decode` computes the prompt."""

    prefill: Offer | None
    decode: Offer

    @property
    def uncached_tokens(self) -> int:
        return (self.prefill or self.decode).uncached_tokens

    def __lt__(self, other: "Pair") -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, float, int]:
        _, recent, given = self.decode._rank
        return self.decode.cost + (self.prefill.cost if self.prefill else 0.0), recent, given


@frozen
class Prices:
    """The prices of one moment for one prompt. `accounts` are the engines with room for it."""

    config: RouterConfig
    prompt: Prompt
    accounts: Sequence[EngineAccount]
    least_recent: Mapping[str, float] = field(init=False)  # by role

    @least_recent.default
    def _least_recent(self) -> dict[str, float]:
        least: dict[str, float] = {}
        for account in self.accounts:
            role, recent = account.info.role, account.recent_tokens
            least[role] = min(recent, least.get(role, recent))
        return least

    def best(self) -> Pair | None:
        """The cheapest pair; None if there is none."""
        prefill = min(map(self.prefill, self._of("prefill")), default=None)
        pairs = [Pair(None, self.compute(account)) for account in self._of("both")]
        for account in self._of("decode"):
            local = self.compute(account, self.config.local_cost)
            if prefill is not None:
                pairs.append(Pair(prefill, self.receive(account)))
            if prefill is None or local.uncached_tokens <= self.config.local_prefill_tokens:
                pairs.append(Pair(None, local))
        return min(pairs, default=None)

    def _of(self, role: str) -> list[EngineAccount]:
        return [account for account in self.accounts if account.info.role == role]

    # --- parts of a request

    def prefill(self, account: EngineAccount) -> Offer:
        """Computing on a prefill engine, which borrows what a decode engine holds beyond its
        own prefix: the turns before, generated tokens included."""
        loan = self._loan(account, self._of("decode"))
        known = loan.num_tokens if loan else self.prompt.held(account.info.name)
        uncached = self.prompt.num_tokens - known
        cost = self._compute(account, uncached) + self._crowd(account)
        cost += self._take(account, loan, self.config.pull_cost)
        return Offer(account, cost, uncached, loan)

    def compute(self, account: EngineAccount, factor: float = 1.0) -> Offer:
        """Computing and generating on one engine, each token of the prompt at `factor`."""
        uncached = self.prompt.num_tokens - self.prompt.num_known(account.info.name)
        cost = factor * self._compute(account, uncached)
        cost += self._restore(self.prompt.known(account.info.name))
        return Offer(account, cost + self._run(account) + self._crowd(account), uncached)

    def receive(self, account: EngineAccount) -> Offer:
        """Generating on a decode engine: what neither it nor a sibling on its host holds comes
        from the prefill engine."""
        siblings = [a for a in self._of("decode") if a.info.host == account.info.host]
        loan = self._loan(account, siblings)
        known = loan.num_tokens if loan else self.prompt.held(account.info.name)
        pulled = self.config.pull_cost * (self.prompt.num_tokens - known)
        cost = pulled + self._take(account, loan, self.config.sibling_cost)
        cost += self._run(account) + self._crowd(account)
        return Offer(account, cost, loan=loan)

    def _loan(self, borrower: EngineAccount, lenders: Sequence[EngineAccount]) -> Loan | None:
        """The most that another engine holds, if that is more than the borrower does."""
        if not self.config.loans:
            return None
        others = [(self.prompt.held(a.info.name), a) for a in lenders if a is not borrower]
        num_tokens, lender = max(others, key=lambda one: one[0], default=(0, borrower))
        if num_tokens <= self.prompt.held(borrower.info.name):
            return None
        return Loan(lender.info.name, num_tokens)

    # --- terms

    def _compute(self, account: EngineAccount, uncached: int) -> float:
        """Computing tokens, and waiting for those ahead."""
        return uncached + self.config.queue_cost * account.queue_tokens

    def _take(self, account: EngineAccount, loan: Loan | None, loan_cost: float) -> float:
        """Restoring what lies in slower tiers, and pulling what is borrowed."""
        name = account.info.name
        borrowed = loan.num_tokens - self.prompt.held(name) if loan else 0
        return self._restore(self.prompt.hits.get(name)) + loan_cost * borrowed

    def _restore(self, hit: Hit | None) -> float:
        """Restoring what lies in slower tiers."""
        tiers = hit.tiers if hit else {}
        restored = sum(self.config.tier_costs[tier] * n for tier, n in tiers.items())
        return restored * self.prompt.block_size

    def _run(self, account: EngineAccount) -> float:
        """What the requests that an engine runs already cost one more."""
        return self.config.request_cost * account.num_requests

    def _crowd(self, account: EngineAccount) -> float:
        """KV that there is no room for yet, and more than its part of recent work."""
        excess = account.recent_tokens - self.least_recent[account.info.role]
        missing = account.missing_tokens(self.prompt.num_tokens)
        return self.config.full_cost * missing + self.config.balance_cost * excess
