"""Router: which engine computes a prompt, which one generates, and who lends what to them."""

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from kvflow.errors import CapacityError
from kvflow.router.config import ROLES, EngineInfo, Load, RouterConfig, RouterError
from kvflow.router.events import KVEvents
from kvflow.router.index import ResidencyIndex
from kvflow.router.load import EngineAccount, age
from kvflow.router.order import EventOrder
from kvflow.router.prices import Loan, Pair, Prices, Prompt


@frozen
class Route:
    """Where a request goes. `prefill` None: `decode` computes the prompt itself. `hit_tokens`: by
    engine, the tokens of the prompt that it holds, all tiers together and none counted twice;
    engines that hold none are left out. `prefill_loan` is for `prefill` to take, `decode_loan` for
    `decode`; each is more than its borrower holds. `uncached_tokens` are to be computed: at least
    the prompt's last."""

    request_id: str
    prefill: str | None
    decode: str
    num_tokens: int
    uncached_tokens: int
    hit_tokens: Mapping[str, int]
    prefill_loan: Loan | None = None
    decode_loan: Loan | None = None
    reason: str = ""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that nobody computes."""
        return self.num_tokens - self.uncached_tokens


@define(eq=False)
class Router:
    """Knows what engines hold from their KV events alone, and what is in flight from its own
    routes and the calls that end them. Not thread-safe."""

    config: RouterConfig
    index: ResidencyIndex = field(init=False)
    _accounts: dict[str, EngineAccount] = field(init=False, factory=dict)
    _orders: dict[str, EventOrder] = field(init=False, factory=dict)
    _routes: dict[str, Route] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.index = ResidencyIndex(self.config.block_size, tuple(self.config.tier_costs))

    # --- engines

    def register(self, info: EngineInfo) -> None:
        """Adds an engine that holds nothing. Raises `RouterError` for a name that is taken, an
        unknown role, no room, and a block size that is not the router's: hashes of other blocks
        would never be found."""
        if info.block_size != self.config.block_size:
            raise RouterError(
                f"engine {info.name!r} has block_size {info.block_size}, "
                f"must be the router's: {self.config.block_size}"
            )
        if info.role not in ROLES:
            raise RouterError(f"engine {info.name!r} has role {info.role!r}, must be of {ROLES}")
        if info.max_kv_tokens < 1:
            raise RouterError(
                f"engine {info.name!r} has max_kv_tokens {info.max_kv_tokens}, must be at least 1"
            )
        self.index.add_engine(info.name, info.restores_from)
        self._accounts[info.name] = EngineAccount(info)
        self._orders[info.name] = EventOrder()

    def unregister(self, name: str) -> None:
        """Forgets an engine, what it held and what was in flight on it. An unknown one is forgotten
        already."""
        self.index.remove_engine(name)
        self._accounts.pop(name, None)
        self._orders.pop(name, None)

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        return tuple(account.info for account in self._accounts.values())

    def account(self, name: str) -> EngineAccount:
        """What is in flight on an engine. Raises `RouterError` if it is not registered."""
        if name not in self._accounts:
            raise RouterError(f"no engine {name!r}, there are {sorted(self._accounts)}")
        return self._accounts[name]

    def on_events(self, name: str, events: KVEvents) -> None:
        """What a tier of an engine stored and removed. Events of unknown engines are ignored and
        counted in `index.counts`; numbered ones wait for those before them."""
        order = self._orders.get(name)
        for one in order.accept(events) if order else [events]:
            self.index.apply(name, one)

    def num_lost(self, name: str) -> int:
        """Event batches of an engine that never came: what it holds may differ from what is
        known until it says `cleared` and all it holds. Raises `RouterError` if it is unknown."""
        self.account(name)
        return self._orders[name].num_lost

    def on_load(self, name: str, load: Load) -> None:
        """What an engine reports of itself; an unknown engine's report is ignored."""
        if name in self._accounts:
            self._accounts[name].load = load

    # --- requests

    def route(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> Route:
        """Chooses engines for a prompt of `num_tokens` tokens whose full blocks are `hashes`; it
        is in flight on them until `prefilled` and `ended`.

        Raises `RouterError` for an id in flight, an empty prompt and blocks of more tokens than
        the prompt has, `CapacityError` if no engines could ever hold it."""
        if request_id in self._routes:
            raise RouterError(f"request {request_id!r} is in flight already")
        if num_tokens < 1 or len(hashes) * self.config.block_size > num_tokens:
            raise RouterError(
                f"request {request_id!r} has {len(hashes)} full blocks of {self.config.block_size} "
                f"tokens, its prompt has {num_tokens}, must be at least 1 and all of the blocks"
            )
        hits, reach = self.index.hits(hashes), self.index.reach(hashes)
        prompt = Prompt(num_tokens, self.config.block_size, hits, reach)
        able = [a for a in self._accounts.values() if num_tokens <= a.info.max_kv_tokens]
        pair = Prices(self.config, prompt, able).best()
        if pair is None:
            rooms = {a.info.name: a.info.max_kv_tokens for a in self._accounts.values()}
            raise CapacityError(
                f"request {request_id!r} has {num_tokens} tokens, no pair of engines holds them: "
                f"max_kv_tokens = {rooms}"
            )
        route = _route(request_id, prompt, pair)
        self._begin(route)
        return route

    def _begin(self, route: Route) -> None:
        computer = route.prefill or route.decode
        for name in {route.prefill or route.decode, route.decode}:
            uncached = route.uncached_tokens if name == computer else 0
            self._accounts[name].begin(route.request_id, uncached, route.num_tokens)
        age(self._accounts, {computer: route.uncached_tokens}, self.config.balance_tokens)
        self._routes[route.request_id] = route

    def prefilled(self, request_id: str) -> None:
        """The prompt is computed, and its decode engine has all of it. Does nothing for a request
        that is not in flight."""
        if (route := self._routes.get(request_id)) is None:
            return
        if route.prefill in self._accounts and route.prefill is not None:
            self._accounts[route.prefill].end(request_id)
        elif route.decode in self._accounts:
            self._accounts[route.decode].computed(request_id)

    def ended(self, request_id: str) -> None:
        """The request is finished, aborted or has failed. Does nothing for one that is not in
        flight, so that it can be said on every path."""
        route = self._routes.pop(request_id, None)
        for name in (route.prefill, route.decode) if route else ():
            if name in self._accounts and name is not None:
                self._accounts[name].end(request_id)


def _route(request_id: str, prompt: Prompt, pair: Pair) -> Route:
    prefill, decode = pair.prefill, pair.decode
    computer = prefill or decode
    reason = f"{computer.name} computes {pair.uncached_tokens} of {prompt.num_tokens} tokens"
    if prefill is not None:
        reason += f", {decode.name} holds {prompt.held(decode.name)}"
    for offer in (prefill, decode):
        if offer is not None and offer.loan is not None:
            reason += f"; {offer.loan.lender} lends {offer.name} {offer.loan.num_tokens}"
    return Route(
        request_id,
        prefill.name if prefill else None,
        decode.name,
        prompt.num_tokens,
        pair.uncached_tokens,
        {name: prompt.held(name) for name in prompt.hits},
        prefill.loan if prefill else None,
        decode.loan,
        reason,
    )
