"""What engines hold, as their events tell it: against sets kept the obvious way, and faults."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.router.config import EngineInfo, RouterConfig, RouterError
from kvflow.router.events import EventBuffer, KVEvents, Stored
from kvflow.router.index import ResidencyIndex
from kvflow.router.order import MAX_WAITING, EventOrder
from kvflow.router.policy import Router

BLOCK = 16
TIERS = ("device", "host", "disk")
ENGINES = ("a", "b", "c")


def chain(branch: int, length: int) -> list[bytes]:
    """Chains that part behind block 2: a block's name says its prefix."""
    return [b"%d/%d" % (branch if k > 2 else 0, k) for k in range(length)]


def parent_of(block: bytes, branch: int) -> bytes | None:
    k = int(block.partition(b"/")[2])
    return chain(branch, k)[-1] if k else None


def stored(blocks: list[bytes], parent: bytes | None = None, tier: str = "device") -> KVEvents:
    return KVEvents(tier, (Stored(tuple(blocks), parent, len(blocks) * BLOCK),))


def index_of(*engines: str) -> ResidencyIndex:
    index = ResidencyIndex(BLOCK, TIERS)
    for name in engines:
        index.add_engine(name)
    return index


# --- the law

OPERATION = st.tuples(
    st.sampled_from(("store", "remove", "clear", "restart")),
    st.sampled_from(ENGINES),
    st.sampled_from(TIERS),
    st.integers(0, 2),
    st.integers(0, 7),
)


def slow_hits(held: dict[str, dict[str, set[bytes]]], blocks: list[bytes]) -> dict[str, list[str]]:
    """By engine the fastest tier of every block of its unbroken prefix, block by block."""
    found: dict[str, list[str]] = {}
    for engine, tiers in held.items():
        for block in blocks:
            having = [tier for tier in TIERS if block in tiers[tier]]
            if not having:
                break
            found.setdefault(engine, []).append(having[0])
    return found


@given(operations=st.lists(OPERATION, max_size=60))
def test_hits_are_what_sets_kept_the_slow_way_say(operations):
    """And so is what "a" reaches, which restores from "b" or "c" or an engine that is none."""
    index = ResidencyIndex(BLOCK, TIERS)
    index.add_engine("a", ("b", "c", "gone"))
    for name in ENGINES[1:]:
        index.add_engine(name)
    held = {engine: {tier: set() for tier in TIERS} for engine in ENGINES}
    for what, engine, tier, branch, k in operations:
        block = chain(branch, 8)[k]
        if what == "store":
            index.apply(engine, stored([block], parent_of(block, branch), tier))
            held[engine][tier].add(block)
        elif what == "remove":
            index.apply(engine, KVEvents(tier, removed=(block,)))
            held[engine][tier].discard(block)
        elif what == "clear":
            index.apply(engine, KVEvents(tier, cleared=True))
            held[engine][tier].clear()
        else:
            index.remove_engine(engine)
            index.add_engine(engine, ("b", "c", "gone") if engine == "a" else ())
            held[engine] = {name: set() for name in TIERS}
    by_way = {
        other: {t: held["a"][t] | (held[other][t] if t != "device" else set()) for t in TIERS}
        for other in "bc"
    }
    for branch in range(3):
        blocks = chain(branch, 8)
        best = max(slow_hits(by_way, blocks).values(), key=len, default=[])
        for found, expected in (
            (index.hits(blocks), slow_hits(held, blocks)),
            (index.reach(blocks), {"a": best} if best else {}),
        ):
            assert found.keys() == expected.keys()
            for engine, tiers in expected.items():
                assert found[engine].num_blocks == len(tiers)
                assert found[engine].tiers == {t: tiers.count(t) for t in TIERS if t in tiers}
    for engine, tiers in held.items():
        assert {t: index.num_blocks(engine, t) for t in TIERS} == {t: len(tiers[t]) for t in TIERS}
    assert not index.counts


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(("store", "remove", "clear")), st.integers(0, 7)), max_size=30
    ),
    cuts=st.sets(st.integers(0, 30)),
)
def test_a_buffer_says_what_happened_wherever_it_is_drained(operations, cuts):
    index, buffer, held = index_of("a"), EventBuffer("host", BLOCK), set()
    for i, (what, k) in enumerate(operations):
        block = chain(1, 8)[k]
        if what == "store":
            buffer.stored(block, parent_of(block, 1))
            held.add(block)
        elif what == "remove":
            buffer.removed(block)
            held.discard(block)
        else:
            buffer.cleared()
            held.clear()
        if i in cuts and (events := buffer.drain()):
            index.apply("a", events)
    if events := buffer.drain():
        index.apply("a", events)
    assert buffer.drain() is None
    assert index.num_blocks("a", "host") == len(held)
    expected = slow_hits({"a": {"device": set(), "host": held, "disk": set()}}, chain(1, 8))
    assert {e: h.num_blocks for e, h in index.hits(chain(1, 8)).items()} == {
        e: len(tiers) for e, tiers in expected.items()
    }


# --- faults


def test_fault_k02_another_block_size_is_refused_and_both_are_named():
    router = Router(RouterConfig(block_size=16))
    with pytest.raises(RouterError, match=r"block_size 64, must be the router's: 16"):
        router.register(EngineInfo("decode-0", "decode", 64, 1000))
    assert router.engines == ()


def test_fault_k02_the_parent_of_block_k_is_block_k_minus_1():
    blocks, index = chain(1, 3), index_of("a", "b")
    buffer = EventBuffer("device", BLOCK)
    for k, block in enumerate(blocks):
        buffer.stored(block, blocks[k - 1] if k else None)
    events = buffer.drain()
    assert events == stored(blocks)  # one run, whose first block has no parent
    index.apply("a", events)
    assert [index.parent(block) for block in blocks] == [None, *blocks[:2]]
    for k in range(3):  # block by block it is the same
        index.apply("b", stored([blocks[k]], blocks[k - 1] if k else None))
    assert {e: h.num_blocks for e, h in index.hits(blocks).items()} == {"a": 3, "b": 3}
    # An engine that takes the block before the last for the parent hashes in another way.
    index.remove_engine("b")
    index.add_engine("b")
    index.apply("b", stored([blocks[2]], blocks[0]))
    assert index.counts == {"other parent": 1}
    assert index.num_blocks("b", "device") == 0


def test_fault_k03_one_hash_for_the_tokens_of_four_blocks_is_no_statement_on_the_prefix():
    blocks, index = chain(1, 5), index_of("a")
    index.apply("a", stored(blocks[:2]))
    index.apply("a", KVEvents("device", (Stored((blocks[2],), blocks[1], 4 * BLOCK),)))
    assert index.hits(blocks)["a"].num_blocks == 2  # neither 3 nor 6
    assert index.counts == {"partial blocks": 1}
    index.apply("a", stored(blocks[2:], blocks[1]))  # positions have not moved
    assert index.hits(blocks)["a"].num_blocks == 5


def test_fault_k05_tiers_that_hold_the_same_block_count_it_once():
    blocks, index = chain(1, 5), index_of("a")
    index.apply("a", stored(blocks[:2]))
    index.apply("a", stored(blocks[:4], tier="host"))
    hit = index.hits(blocks)["a"]
    assert (hit.num_blocks, hit.tiers) == (4, {"device": 2, "host": 2})


def test_a_hole_ends_the_prefix_and_storing_it_again_mends_it():
    blocks, index = chain(1, 6), index_of("a")
    index.apply("a", stored(blocks))
    index.apply("a", KVEvents("device", removed=(blocks[2],)))
    assert index.hits(blocks)["a"].num_blocks == 2
    index.apply("a", stored([blocks[2]], blocks[1]))
    assert index.hits(blocks)["a"].num_blocks == 6
    index.apply("a", KVEvents("device", (Stored((blocks[0],), None, BLOCK),), (blocks[0],)))
    assert index.hits(blocks)["a"].num_blocks == 6  # removed, then stored


def test_events_of_unknown_engines_are_counted_and_unknown_tiers_refused():
    index = index_of("a")
    index.apply("ghost", stored(chain(1, 2)))
    index.apply("a", KVEvents("device", removed=(b"never seen",)))
    assert index.hits(chain(1, 2)) == {}
    assert index.counts == {"unknown engine": 1}
    with pytest.raises(RouterError, match="'a' speaks of tier 'tape'"):
        index.apply("a", stored(chain(1, 2), tier="tape"))
    with pytest.raises(RouterError, match="indexed already"):
        index.add_engine("a")


def test_nothing_is_kept_of_what_nobody_holds():
    index = index_of("a", "b")
    for _ in range(3):
        index.apply("a", stored(chain(1, 6)))
        index.apply("b", stored(chain(2, 6), tier="host"))
        index.apply("b", KVEvents("host", cleared=True))
        index.remove_engine("a")
        index.add_engine("a")
    assert not index._holders
    assert not index._parents
    assert len(index._held) == 6  # bits of engines that went are given out again


# --- order


def batches(num: int) -> list[KVEvents]:
    """Stores and removals of one block in turn, and other blocks that stay."""
    blocks = chain(1, 8)
    found = []
    for seq in range(num):
        first = Stored((blocks[0],), None, BLOCK)
        other = Stored((blocks[1 + seq % 7],), blocks[seq % 7], BLOCK)
        removed = () if seq % 2 else (blocks[0],)
        stored = (first, other) if seq % 2 else (other,)
        found.append(KVEvents("device", stored, removed, seq=seq))
    return found


@given(seed=st.integers(0, 2**32), num=st.integers(1, 80))
def test_late_and_repeated_batches_end_where_the_ordered_ones_do(seed, num):
    draw = random.Random(seed)
    sent = batches(num)
    come = sorted(sent * 2, key=lambda events: events.seq + draw.uniform(0, MAX_WAITING / 2))
    order, taken = EventOrder(), []
    for events in come:
        taken += order.accept(events)
    assert taken == sent
    assert (order.num_lost, order.num_repeated) == (0, num)


def test_a_lost_batch_is_waited_for_then_counted_and_the_engine_can_say_all_anew():
    router = Router(RouterConfig(block_size=BLOCK))
    router.register(EngineInfo("a", "both", BLOCK, 1000))
    sent = batches(MAX_WAITING + 3)
    router.on_events("a", sent[0])
    for events in sent[2 : MAX_WAITING + 2]:  # number 1 is lost
        router.on_events("a", events)
    assert router.num_lost("a") == 0
    router.on_events("a", sent[MAX_WAITING + 2])
    assert router.num_lost("a") == 1
    assert router.index.num_blocks("a", "device") == 7  # the last batch removed block 0
    router.on_events("a", sent[1])  # too late
    assert router.index.num_blocks("a", "device") == 7
    everything = Stored(tuple(chain(1, 8)), None, 8 * BLOCK)
    router.on_events("a", KVEvents("device", (everything,), cleared=True, seq=len(sent)))
    assert router.index.hits(chain(1, 8))["a"].num_blocks == 8
    with pytest.raises(RouterError, match="no engine 'ghost'"):
        router.num_lost("ghost")


def test_a_restarted_engine_counts_from_0_again_and_holds_nothing():
    router = Router(RouterConfig(block_size=BLOCK))
    for _ in range(2):
        router.register(EngineInfo("a", "both", BLOCK, 1000))
        assert router.index.hits(chain(1, 8)) == {}
        for events in batches(2):
            router.on_events("a", events)
        assert router.index.hits(chain(1, 8))["a"].num_blocks == 3
        router.unregister("a")
    router.on_events("a", batches(1)[0])
    assert router.index.counts == {"unknown engine": 1}
