"""What a router is told: its costs, its engines and their load."""

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen, validators
from msgspec import Struct

from kvflow.errors import KvflowError
from kvflow.layouts.values import integer, not_negative, positive

Role = Literal["prefill", "decode", "both"]
ROLES = ("prefill", "decode", "both")

TIER_COSTS = {"device": 0.0, "host": 0.02, "disk": 0.1}
"""By tier, fastest first: what restoring a token costs where computing one costs 1."""


class RouterError(KvflowError, ValueError):
    """Something the router is told contradicts what it was told before, or breaks a rule."""


class EngineInfo(Struct, frozen=True):
    """An engine as it introduces itself. `role` "both" computes its own prompts and takes no loan.
    `max_kv_tokens` is what its running requests can hold together. `host` names the machine. For
    a prompt that it computes it restores from the slower tiers of `restores_from`, other engines
    by name, as from its own."""

    name: str
    role: Role
    block_size: int
    max_kv_tokens: int
    host: str = ""
    restores_from: tuple[str, ...] = ()


class Load(Struct, frozen=True):
    """What an engine says about itself: tokens that running requests hold, requests that run and
    that wait, and the tokens of prompts that it has yet to compute."""

    kv_tokens_used: int
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0


@frozen
class RouterConfig:
    """Costs are relative to one token of a prompt computed on a prefill engine.

    `block_size`: tokens of a chain block; every engine must have the same.
    `local_prefill_tokens`: a decode engine whose own cache leaves at most this many tokens of a
    prompt may compute them itself; 0 sends every prompt to a prefill engine, since a prompt's last
    token is never cached.
    `local_cost`: a token computed on a decode engine, whose streams wait meanwhile.
    `pull_cost`: a token moved between two engines, with what it displaces in the borrower's cache;
    `sibling_cost`: between two decode engines of one host.
    `tier_costs`: a token restored from a tier.
    `request_cost`: what each request that a decode engine already runs costs one more.
    `queue_cost`: a token to be computed before. It is below 1, for waiting delays one request and
    computing what is cached elsewhere delays all that come after.
    `full_cost`: a token of KV that an engine has no room for until others end.
    `balance_cost`: for each token by which an engine's share of recent work is above the least
    busy one's; recent is the fleet's last `balance_tokens` tokens of work.
    `loans`: decode engines lend KV to prefill engines and to decode engines on their host."""

    block_size: int = field(converter=integer, validator=positive)
    local_prefill_tokens: int = field(default=0, converter=integer, validator=not_negative)
    local_cost: float = field(default=2.0, validator=validators.ge(0))
    pull_cost: float = field(default=0.1, validator=validators.ge(0))
    sibling_cost: float = field(default=0.05, validator=validators.ge(0))
    tier_costs: Mapping[str, float] = field(factory=lambda: dict(TIER_COSTS))
    request_cost: float = field(default=256.0, validator=validators.ge(0))
    full_cost: float = field(default=1.0, validator=validators.ge(0))
    queue_cost: float = field(default=0.25, validator=validators.ge(0))
    balance_cost: float = field(default=0.3, validator=validators.ge(0))
    balance_tokens: int = field(default=1_000_000, converter=integer, validator=positive)
    loans: bool = True
