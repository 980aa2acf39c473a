"""Where requests go: faults of routers, bursts, loans, and what is in flight."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import CapacityError
from kvflow.router.config import EngineInfo, Load, RouterConfig, RouterError
from kvflow.router.events import KVEvents, Stored
from kvflow.router.policy import Loan, Router

BLOCK = 64


def chain(name: str, num_blocks: int, shared: int = 0) -> list[bytes]:
    return [f"{'shared' if k < shared else name}/{k}".encode() for k in range(num_blocks)]


def fleet(num_prefill: int, num_decode: int, *, both: int = 0, hosts: int = 0, **config) -> Router:
    """`hosts`: how many the decode engines are dealt to; 0: each has its own."""
    config = {"block_size": BLOCK, **config}
    router = Router(RouterConfig(**config))
    block, room = config["block_size"], 10**7
    for i in range(num_prefill):
        router.register(EngineInfo(f"prefill-{i}", "prefill", block, room, f"p{i}"))
    for i in range(num_decode):
        host = f"d{i % hosts if hosts else i}"
        router.register(EngineInfo(f"decode-{i}", "decode", block, room, host))
    for i in range(both):
        router.register(EngineInfo(f"both-{i}", "both", block, room))
    return router


def warm(router: Router, engine: str, blocks: list[bytes], tier: str = "device") -> None:
    tokens = len(blocks) * router.config.block_size
    router.on_events(engine, KVEvents(tier, (Stored(tuple(blocks), None, tokens),)))


def names(router: Router, role: str) -> list[str]:
    return [info.name for info in router.engines if info.role == role]


# --- tiers that others own


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_decode_engine_that_restores_from_a_tier_computes_the_rest_itself(where):
    """9 of 10 blocks lie with the prefill engine, which is busy; in its slower tiers they are as
    good as the decode engine's own."""
    router = Router(RouterConfig(BLOCK, local_prefill_tokens=BLOCK))
    router.register(EngineInfo("prefill-0", "prefill", BLOCK, 10**7))
    router.register(EngineInfo("decode-0", "decode", BLOCK, 10**7, "", ("prefill-0",)))
    router.register(EngineInfo("decode-1", "decode", BLOCK, 10**7, "elsewhere"))
    router.on_load("prefill-0", Load(0, 1, 0, 10**5))
    blocks = chain("a", 10)
    warm(router, "prefill-0", blocks[:9], where)
    route = router.route("a", blocks, 10 * BLOCK)
    if where == "device":
        assert (route.prefill, route.uncached_tokens) == ("prefill-0", BLOCK)
    else:
        assert (route.prefill, route.decode) == (None, "decode-0")
        assert route.uncached_tokens == BLOCK
    assert route.hit_tokens == {"prefill-0": 9 * BLOCK}


def test_what_an_engine_only_restores_it_cannot_lend():
    router = Router(RouterConfig(BLOCK))
    router.register(EngineInfo("prefill-0", "prefill", BLOCK, 10**7))
    router.register(EngineInfo("prefill-1", "prefill", BLOCK, 10**7))
    router.register(EngineInfo("decode-0", "decode", BLOCK, 10**7, "", ("prefill-0", "prefill-1")))
    router.register(EngineInfo("decode-1", "decode", BLOCK, 10**7, "", ("prefill-0", "prefill-1")))
    blocks = chain("a", 10)
    warm(router, "prefill-0", blocks, "host")
    warm(router, "decode-0", blocks[:2])
    router.on_load("decode-0", Load(1 << 41))
    router.on_load("prefill-0", Load(1 << 41))
    route = router.route("a", blocks, 10 * BLOCK)
    assert (route.prefill, route.decode) == ("prefill-1", "decode-1")
    assert route.prefill_loan == route.decode_loan == Loan("decode-0", 2 * BLOCK)


# --- bursts


@pytest.mark.parametrize("warmed", ["none", "one", "all"])
@pytest.mark.parametrize(("prefills", "decodes", "both"), [(0, 0, 4), (1, 4, 0), (4, 4, 0)])
def test_fault_k01_a_burst_that_shares_a_prefix_spreads(prefills, decodes, both, warmed):
    router = fleet(prefills, decodes, both=both)
    engines = names(router, "both" if both else "decode")
    for name in {"none": [], "one": engines[:1], "all": engines}[warmed]:
        warm(router, name, chain("", 1, shared=1))
    routes = [
        router.route(f"{i}", chain(f"{i}", 1 + i % 2, shared=1), 130 + i % 40) for i in range(40)
    ]
    load = Counter(route.decode for route in routes)
    assert max(load.values()) / (40 / 4) <= 1.5
    assert min(load.values()) >= 5  # and none is starved
    if warmed != "one":  # ties spread: no two of the first four go together
        assert len({route.decode for route in routes[:4]}) == 4
    if prefills == 4:
        computing = Counter(route.prefill for route in routes)
        assert max(computing.values()) / (40 / 4) <= 1.5


def test_fault_k01_a_stale_report_does_not_hide_what_was_just_sent():
    router = fleet(0, 0, both=2)
    for i in range(20):
        for name in names(router, "both"):
            router.on_load(name, Load(0))  # taken before anything arrived
        router.route(f"{i}", (), 1000)
    assert {router.account(n).num_requests for n in names(router, "both")} == {10}


@pytest.mark.parametrize("fleet_of", [(1, 4, 0), (0, 0, 4)])
def test_requests_one_after_the_other_go_round_where_prices_are_equal(fleet_of):
    prefills, decodes, both = fleet_of
    router, given = fleet(prefills, decodes, both=both), Counter()
    for i in range(12):
        given[router.route(f"{i}", (), 50).decode] += 1
        router.ended(f"{i}")
    assert set(given.values()) == {3}


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=30, max_size=60),
    shared=st.integers(0, 4),
    num=st.integers(2, 5),
)
def test_engines_under_one_system_prompt_compute_their_share(lengths, shared, num):
    router = fleet(num, num)
    for name in names(router, "prefill")[:1]:
        warm(router, name, chain("", shared, shared))
    work = Counter()
    for i, more in enumerate(lengths):
        tokens = shared * BLOCK + more
        blocks = chain(f"{i}", tokens // BLOCK, shared)
        route = router.route(f"{i}", blocks, tokens)
        work[route.prefill] += route.uncached_tokens
    # Greedily, nobody is ahead of the least busy by more than a prompt and what a hit is worth.
    slack = max(lengths) + shared * BLOCK * (1 + 1 / router.config.queue_cost)
    # What counts has faded meanwhile, by at most this factor.
    faded = math.exp(work.total() / router.config.balance_tokens)
    slack = slack * faded + (faded - 1) * work.total() / num
    assert max(work.values()) - min(work[n] for n in names(router, "prefill")) <= slack


def test_a_session_stays_where_its_prefix_is_until_the_queue_costs_more():
    router = fleet(2, 1, loans=False)
    blocks = chain("session", 20)
    warm(router, "prefill-1", blocks)
    first = router.route("turn", blocks, 20 * BLOCK + 10)
    assert (first.prefill, first.uncached_tokens) == ("prefill-1", 10)
    router.on_load("prefill-1", Load(0, waiting_tokens=100 * BLOCK))
    assert router.route("next", blocks, 20 * BLOCK + 10).prefill == "prefill-0"


# --- prompts: where they are computed, and what is cached of them


@pytest.mark.parametrize(
    ("threshold", "held", "num_tokens", "local"),
    [
        (0, 0, 10, False),  # 10 tokens are uncached, not 0 blocks
        (9, 0, 10, False),
        (10, 0, 10, True),
        (0, 1, 64, False),  # a full hit still leaves the last token
        (1, 1, 64, True),
        (10, 1, 74, True),
        (10, 1, 75, False),
        (10, 1, 138, False),
    ],
)
def test_fault_c09_the_threshold_counts_tokens_not_blocks(threshold, held, num_tokens, local):
    router = fleet(1, 1, local_prefill_tokens=threshold, local_cost=1.0)
    warm(router, "decode-0", chain("", 2)[:held])
    route = router.route("r", chain("", num_tokens // BLOCK), num_tokens)
    assert route.prefill == (None if local else "prefill-0")
    assert route.uncached_tokens == max(1, num_tokens - held * BLOCK)


def test_a_short_extend_is_computed_on_the_decode_engine_only_where_that_is_cheaper():
    router = fleet(1, 2, local_prefill_tokens=512)
    blocks = chain("session", 100)
    warm(router, "decode-1", blocks)
    route = router.route("turn", blocks, 6400 + 300)
    assert (route.prefill, route.decode, route.uncached_tokens) == (None, "decode-1", 300)
    router.ended("turn")
    warm(router, "prefill-0", blocks)  # which computes the same 300 at half the price
    route = router.route("turn", blocks, 6400 + 300)
    assert (route.prefill, route.decode) == ("prefill-0", "decode-1")
    router.ended("turn")
    router.on_load("prefill-0", Load(0, waiting_tokens=10_000))
    assert router.route("turn", blocks, 6400 + 300).prefill is None
    router.ended("turn")
    assert router.route("long", blocks, 6400 + 513).prefill == "prefill-0"


def test_without_prefill_engines_decode_engines_compute():
    router = fleet(0, 2)
    route = router.route("r", chain("", 10), 640)
    assert (route.prefill, route.uncached_tokens) == (None, 640)


def test_fault_k05_a_prefix_that_is_warm_on_both_stages_counts_once():
    router = fleet(1, 1, block_size=16)
    for name in ("prefill-0", "decode-0"):
        warm(router, name, chain("", 1))
        warm(router, name, chain("", 1), tier="host")
    route = router.route("r", chain("", 1), 20)
    assert (route.cached_tokens, route.uncached_tokens) == (16, 4)
    assert route.hit_tokens == {"prefill-0": 16, "decode-0": 16}
    assert route.prefill_loan is route.decode_loan is None
    route = router.route("all of it", chain("", 1), 16)
    assert route.cached_tokens <= 16
    assert route.uncached_tokens == 1


# --- loans


def test_what_a_decode_engine_holds_of_the_last_turn_is_lent_to_prefill():
    router = fleet(2, 2)
    blocks = chain("session", 12)
    warm(router, "prefill-0", blocks[:8])
    warm(router, "decode-1", blocks)  # with the tokens it generated
    route = router.route("turn", blocks, 12 * BLOCK + 20)
    assert (route.prefill, route.decode) == ("prefill-0", "decode-1")
    assert route.prefill_loan == Loan("decode-1", 12 * BLOCK)
    assert route.decode_loan is None
    assert route.uncached_tokens == 20
    assert "decode-1 lends prefill-0 768" in route.reason


def test_a_sibling_on_the_same_host_lends_and_one_elsewhere_does_not():
    router = fleet(1, 4, hosts=2)  # 0 and 2 share a host, 1 and 3 another
    blocks = chain("session", 12)
    warm(router, "decode-0", blocks[:10])
    router.on_load("decode-0", Load(0, num_running=100))
    route = router.route("turn", blocks, 12 * BLOCK)
    assert route.decode == "decode-2"  # it pulls the least of those that are free
    assert route.decode_loan == Loan("decode-0", 10 * BLOCK)
    router.on_load("decode-2", Load(0, num_running=100))
    assert router.route("other", blocks, 12 * BLOCK).decode_loan is None


def test_nobody_lends_where_loans_are_off_or_engines_do_all():
    for router in (fleet(1, 2, hosts=1, loans=False), fleet(0, 0, both=2)):
        blocks = chain("session", 12)
        lender = router.engines[-1].name
        warm(router, lender, blocks)
        router.on_load(lender, Load(0, num_running=10**4))
        route = router.route("turn", blocks, 12 * BLOCK)
        assert route.decode != lender
        assert route.prefill_loan is route.decode_loan is None
        assert route.uncached_tokens == 12 * BLOCK


def test_slower_tiers_cost_more():
    router = fleet(3, 1, loans=False)
    blocks = chain("session", 100)
    for i, tier in enumerate(("disk", "device", "host")):
        warm(router, f"prefill-{i}", blocks, tier)
    assert router.route("0", blocks, 6400 + 1).prefill == "prefill-1"
    router.unregister("prefill-1")
    assert router.route("1", blocks, 6400 + 1).prefill == "prefill-2"


# --- room


def test_an_engine_without_room_is_avoided_and_one_too_small_is_never_taken():
    router = Router(RouterConfig(block_size=BLOCK))
    router.register(EngineInfo("large", "both", BLOCK, 10_000))
    router.register(EngineInfo("small", "both", BLOCK, 1_000))
    warm(router, "small", chain("", 20))
    assert router.route("fits", chain("", 15), 1_000).decode == "small"
    assert router.route("again", chain("", 15), 1_000).decode == "large"  # it would have to wait
    assert router.route("long", chain("", 20), 1_300).decode == "large"
    with pytest.raises(CapacityError, match=r"10001 tokens.*'large': 10000, 'small': 1000"):
        router.route("longer", (), 10_001)
    with pytest.raises(CapacityError, match="no pair of engines"):
        fleet(2, 0).route("r", (), 1)


# --- what is in flight


@given(
    st.lists(
        st.tuples(st.sampled_from(("route", "prefilled", "ended", "restart")), st.integers(0, 9)),
        max_size=60,
    )
)
def test_nothing_is_in_flight_once_all_has_ended(calls):
    router = fleet(2, 2, both=1, local_prefill_tokens=100)
    for what, i in calls:
        match what:
            case "route":
                try:
                    router.route(f"{i}", chain(f"{i}", i), i * BLOCK + 20)
                except RouterError as error:
                    assert "in flight already" in str(error)  # noqa: PT017
            case "prefilled":
                router.prefilled(f"{i}")
            case "ended":
                router.ended(f"{i}")
            case _:
                info = router.engines[i % len(router.engines)]
                router.unregister(info.name)
                router.register(info)
        accounts = [router.account(info.name) for info in router.engines]
        assert all(a.queue_tokens >= 0 and a.kv_tokens >= 0 for a in accounts)
    for i in range(10):
        router.ended(f"{i}")
    for info in router.engines:
        account = router.account(info.name)
        assert (account.queue_tokens, account.kv_tokens, account.num_requests) == (0, 0, 0)


def test_a_request_leaves_the_queue_then_prefill_then_decode():
    router = fleet(1, 1)
    prefill, decode = router.account("prefill-0"), router.account("decode-0")
    router.route("r", (), 50)
    assert (prefill.queue_tokens, prefill.kv_tokens, decode.kv_tokens) == (50, 50, 50)
    assert decode.queue_tokens == 0
    router.prefilled("r")
    router.prefilled("r")
    assert (prefill.queue_tokens, prefill.kv_tokens, decode.kv_tokens) == (0, 0, 50)
    router.ended("r")
    router.ended("r")
    assert decode.kv_tokens == 0


def test_wrong_requests_and_engines_are_refused_with_the_numbers():
    router = fleet(1, 1)
    with pytest.raises(RouterError, match="2 full blocks of 64 tokens, its prompt has 100"):
        router.route("r", chain("", 2), 100)
    with pytest.raises(RouterError, match="its prompt has 0"):
        router.route("r", (), 0)
    router.route("r", (), 1)
    with pytest.raises(RouterError, match="'r' is in flight already"):
        router.route("r", (), 1)
    with pytest.raises(RouterError, match="indexed already"):
        router.register(EngineInfo("decode-0", "decode", BLOCK, 1))
    with pytest.raises(RouterError, match="role 'draft'"):
        router.register(EngineInfo("x", "draft", BLOCK, 1))  # type: ignore[arg-type]
    with pytest.raises(RouterError, match="max_kv_tokens 0"):
        router.register(EngineInfo("x", "decode", BLOCK, 0))
    router.on_load("nobody", Load(1))
    router.unregister("nobody")
