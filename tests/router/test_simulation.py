"""The simulated deployment that rules of routing are compared in, and a small run of it."""

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import prefix_granularity  # noqa: E402
from router_sim.bounds import Search, Work, one_prompt, without_caches  # noqa: E402
from router_sim.caches import Tier, Tiers  # noqa: E402
from router_sim.report import computed, report, sent  # noqa: E402
from router_sim.rules import Kvflow, LeastLoaded, RoundRobin, SessionAffinity  # noqa: E402
from router_sim.setting import Choice, Request, Served, Setting  # noqa: E402
from router_sim.traces import Session, Turn, load, read  # noqa: E402
from router_sim.world import World  # noqa: E402

from kvflow.router.config import RouterConfig  # noqa: E402
from kvflow.router.events import KVEvents  # noqa: E402

TRACES = ROOT / "tests/fixtures/traces/weka_cc_cut.jsonl.gz"


@pytest.fixture(scope="module")
def records():
    """The first 20 sessions, each cut to its first 30 requests."""
    found = read(TRACES)[:20]
    return [{**one, "requests": one["requests"][:30]} for one in found]


@pytest.fixture(scope="module")
def sessions(records):
    return load(records, 2, 20.0, 256)


# --- traces


def test_chains_share_what_the_records_ids_share(records):
    """Against another decoder of the same form, which hits every earlier prompt by a trie."""
    for record in records[:8]:
        (session,) = load([record], 1, 60.0)
        turns = list(session.walk())
        requests = list(prefix_granularity.requests_of(record))
        assert [turn.num_tokens for turn in turns] == [request["in"] for request in requests]
        seen: set[bytes] = set()
        for turn, blocks in zip(turns, prefix_granularity.shared_blocks(requests), strict=True):
            shared = next((k for k, one in enumerate(turn.chain) if one not in seen), None)
            assert (len(turn.chain) if shared is None else shared) == blocks
            assert len(turn.chain) == turn.num_tokens // 64
            seen.update(turn.chain)


def test_sessions_of_a_model_share_their_system_prompt_and_no_more(records):
    pair = [r for r in records if r["models"] == ["claude-opus-4-5-20251101"]][:2]
    first, second = (session.turns[0].chain for session in load(pair, 1, 60.0))
    shared = sum(1 for a, b in zip(first, second, strict=False) if a == b)
    assert shared == min((r["tool_tokens"] + r["system_tokens"]) // 64 for r in pair)
    other = next(r for r in records if r["models"][0] != pair[0]["models"][0])
    assert not set(load([pair[0], other], 1, 60.0)[1].turns[0].chain) & set(first)


# --- the world


def test_a_tier_is_a_least_recently_used_cache():
    draw, told = random.Random(1), []
    tier = Tier("device", 12, told.append, 64)
    order: list[bytes] = []  # the least recently used block first
    held: set[bytes] = set()
    for _ in range(300):
        branch, length = draw.randrange(4), draw.randrange(1, 9)
        chain = [b"%d/%d" % (branch if k > 1 else 0, k) for k in range(length)]
        tier.put(chain)
        for block in reversed(chain):
            if block in order:
                order.remove(block)
            order.append(block)
        del order[: max(0, len(order) - 12)]
        for events in told:
            held -= set(events.removed)
            held |= {block for stored in events.stored for block in stored.hashes}
        told.clear()
        assert held == set(order)
        kept = next((k for k, block in enumerate(chain) if block not in held), length)
        assert tier.num_held(chain) == kept


def test_blocks_count_for_the_fastest_tier_that_has_them():
    chain = [b"%d" % k for k in range(6)]
    fast, slow = Tier("device", 9, KVEvents, 64), Tier("host", 9, KVEvents, 64)
    fast.tell = slow.tell = lambda events: None
    fast.put(chain[:2])
    slow.put(chain[:5])
    assert Tiers([fast, slow]).held(chain) == {"device": 2, "host": 3}


def test_work_is_counted_in_the_windows_it_is_done_in():
    turn = Turn((), 1000, 1, 0.0)
    long = Served(Request("a", 0, turn, 10.0), Choice(0, 0), 600, (30.0, 150.0), 151.0)
    late = Served(Request("b", 0, turn, 100.0), Choice(1, 0), 40, (179.0, 181.0), 181.0)
    local = Served(Request("c", 0, turn, 0.0), Choice(None, 0), 99, (0.0, 1.0), 1.0)
    names = ["prefill-0", "prefill-1"]
    served = [long, late, local]
    assert computed(served, names, 0.0, 180.0).tolist() == [[150, 0], [300, 0], [150, 20]]
    assert computed(served, names, 60.0, 180.0).tolist() == [[300, 0], [150, 20]]
    assert sent(served, names, 0.0, 180.0).tolist() == [[600, 0], [0, 40], [0, 0]]


def test_turns_follow_their_think_time_and_wait_for_sub_agents():
    child = [Turn((), 100, 10, 0.0), Turn((), 100, 10, 3.0)]
    turns = [Turn((), 100, 10, 0.0, [child, child]), Turn((), 100, 10, 5.0)]
    setting = Setting(1, 1, 1, 10**6, prefill_rate=100.0, token_time=0.1, token_time_more=0.0)
    world = World(setting, RoundRobin(), [Session("s", turns)])
    world._begin_session()
    with pytest.raises(ValueError, match="1 sessions are too few"):
        world.clock.run(1000.0)
    times = [one.request.time for one in world.served]
    pull = 100 / setting.pull_rate
    first = 1 + pull + 1  # computed, pulled, 10 tokens
    assert times == pytest.approx(
        [0, first, first, 2 * first + 3, 2 * first + 3 + 1, 3 * first + 4 + 5]
    )


class Deaf(Kvflow):
    def on_events(self, engine: str, events: KVEvents) -> None:
        pass


def settings(tier_tokens: int) -> Setting:
    return Setting(3, 3, 15, tier_tokens, prefill_rate=8000.0, seconds=300.0, warm_up=60.0)


@pytest.mark.parametrize("tier_tokens", [2_000_000, 8_000_000])
def test_hits_with_late_events_are_those_of_exact_state(sessions, tier_tokens):
    setting = settings(tier_tokens)
    rules = {
        "round-robin": RoundRobin(),
        "least-loaded": LeastLoaded(),
        "affinity": SessionAffinity(),
        "late": Kvflow.of(setting, RouterConfig(256), late=True),
        "exact": Kvflow.of(setting, RouterConfig(256), late=False),
    }
    found = {name: report(World(setting, rule, sessions).run()) for name, rule in rules.items()}
    assert found["late"].hit_share == pytest.approx(found["exact"].hit_share, rel=0.03)
    assert found["late"].load_ratio <= 1.3
    assert found["late"].hit_share > found["round-robin"].hit_share
    assert found["late"].hit_share > found["least-loaded"].hit_share
    assert np.percentile(found["late"].ttft, 90) < np.percentile(found["affinity"].ttft, 90)
    router = rules["late"].router
    assert set(router.index.counts) == set()


def test_a_router_that_is_told_nothing_loses_the_hits(sessions):
    """The law above fails where it should: without events nothing is found again."""
    setting = settings(8_000_000)
    deaf = Deaf.of(setting, RouterConfig(256), late=True)
    exact = Kvflow.of(setting, RouterConfig(256), late=False)
    hits = [report(World(setting, rule, sessions).run()).hit_share for rule in (deaf, exact)]
    assert hits[0] < 0.97 * hits[1]


def test_the_same_seed_gives_the_same_world(sessions):
    setting = settings(2_000_000)
    runs = [
        World(setting, Kvflow.of(setting, RouterConfig(256), late=True), sessions).run()
        for _ in range(2)
    ]
    first, second = ([(s.request.name, s.choice, s.first_token) for s in w.served] for w in runs)
    assert first == second


# --- what could have been


def works(*given):
    """(time, tokens, engine), each computed at once at 100 tokens per second."""
    return [Work(t, n, e, t, t + n / 100) for t, n, e in given]


def test_one_prompt_bounds_its_window_whoever_computes_the_rest():
    work = works((0.0, 3000, 0), (1.0, 500, 1), (70.0, 1000, 1), (115.0, 1000, 0))
    assert one_prompt(work, 2, 0.0, 3).tolist() == pytest.approx(
        [3000 / 1750, 1000 / 750, 2.0]  # the last prompt lies half in each window
    )


def test_a_search_that_knows_what_comes_levels_what_can_be_levelled():
    work = works((0.0, 2000, 0), (1.0, 2000, 0), (120.0, 1500, 1), (130.0, 10, 1))
    search = Search(work, 2, 100.0, 0.0, 3)
    assert search.ratios.tolist() == pytest.approx([2.0, 0.0, 2.0])
    level = search.run(200)
    assert level.tolist() == pytest.approx([1.0, 0.0, 1500 / 755])
    assert (level >= one_prompt(work, 2, 0.0, 3) - 1e-9)[2]


@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_never_below_the_best_of_all_choices(seed):
    """Against every choice there is, each played out in steps of 10 tokens."""
    draw = random.Random(seed)
    sizes = (50, 900, 2500)
    given = [(draw.randrange(110), draw.choice(sizes), draw.randrange(2)) for _ in range(6)]
    work = works(*sorted(given))
    best = np.inf
    for homes in itertools.product((0, 1), repeat=len(work)):
        tokens, free = np.zeros((2, 2)), [0, 0]
        for one, home in zip(work, homes, strict=True):
            begin = max(10 * one.time, free[home])
            free[home] = begin + one.num_tokens // 10
            for step in range(begin, min(free[home], 1200)):
                tokens[step // 600, home] += 10
        found = tokens.max(axis=1) / np.maximum(tokens.mean(axis=1), 1.0)
        best = min(best, np.maximum(found - 1.3, 0).sum())
    level = Search(work, 2, 100.0, 0.0, 2).run(400)
    assert np.maximum(level - 1.3, 0).sum() == pytest.approx(best, abs=0.02)


def test_a_rule_that_heeds_no_cache_looks_at_whole_windows():
    """The third prompt: engine 0 is idle but had 3000 in this minute, engine 1 still computes."""
    work = works((0.0, 3000, 1), (20.0, 2400, 1), (40.0, 1000, 1), (200.0, 10, 0))
    homes = [one.engine for one in without_caches(work, 2, 100.0)]
    assert homes == [0, 1, 1, 0]
    assert Search(without_caches(work, 2, 100.0), 2, 100.0, 0.0, 1).ratios[0] < 1.2
