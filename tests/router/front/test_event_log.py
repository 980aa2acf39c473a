"""KVEventLog against sets: whoever reads a snapshot and what follows knows what is held."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import KvflowError
from kvflow.router.config import Load
from kvflow.router.events import KVEvents, Stored
from kvflow.router.log import ChainScheme, CutOff, KVEventLog

SIZE = 4
TIERS = ("device", "host")


def log_of(**kwargs):
    return KVEventLog(ChainScheme("rule", "model", SIZE), TIERS, 1000, **kwargs)


def block(n):
    return b"block%d" % n


def run_of(first, count):
    """`count` blocks of the one chain there is, from block `first` on."""
    hashes = tuple(block(n) for n in range(first, first + count))
    return Stored(hashes, block(first - 1) if first else None, count * SIZE)


class Reader:
    """Knows blocks by tier from a snapshot and changes, by the obvious rules."""

    def __init__(self, log):
        self.log, (self.seq, held) = log, log.snapshot()
        self.blocks = {tier: {} for tier in TIERS}
        for events in held:
            self.take(events)

    def take(self, events):
        mine = self.blocks[events.tier]
        if events.cleared:
            mine.clear()
        for one in events.removed:
            del mine[one]
        for run in events.stored:
            parent = run.parent
            for one in run.hashes:
                assert one not in mine, "said twice"
                mine[one] = parent
                parent = one

    async def catch_up(self):
        async for seq, events in self.log.follow(self.seq):
            assert seq == self.seq + 1
            self.take(events)
            self.seq = seq
            if seq == self.log.seq:
                return


engines = st.sampled_from(["prefill-0", "prefill-1", "decode-0"])
runs = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=3)
told = st.tuples(
    engines, st.sampled_from(TIERS), st.booleans(), st.lists(st.integers(0, 12), max_size=5), runs
)


@given(st.lists(told, max_size=25), st.integers(0, 25))
def test_a_snapshot_and_what_follows_is_what_is_held(steps, when):
    log, held = log_of(), {}
    late = early = Reader(log)
    for n, (engine, tier, cleared, removed, stored) in enumerate(steps):
        if n == when:
            late = Reader(log)
        stored = [run_of(*one) for one in stored]
        gone = tuple(map(block, removed))
        log.on_events(engine, KVEvents(tier, stored, gone, cleared))
        mine = held.setdefault((engine, tier), set())
        mine.difference_update(set(mine) if cleared else gone)
        mine.update(*(run.hashes for run in stored))
    for reader in (early, late):
        if reader.seq != log.seq:
            asyncio.run(reader.catch_up())
        for tier in TIERS:
            union = set().union(*(each for (_, one), each in held.items() if one == tier))
            assert set(reader.blocks[tier]) == union
            assert all(
                parent == (block(int(one[5:]) - 1) if one != block(0) else None)
                for one, parent in reader.blocks[tier].items()
            )
            assert log.num_blocks()[tier] == len(union)
    assert log.counts["changes"] == log.seq


def test_what_two_engines_hold_is_gone_when_both_lost_it():
    log = log_of()
    for engine in ("a", "b"):
        log.on_events(engine, KVEvents("device", [run_of(0, 2)]))
    assert log.seq == 1
    log.on_events("a", KVEvents("device", removed=[block(1)]))
    assert log.seq == 1
    log.drop_engine("b")
    assert log.num_blocks() == {"device": 1, "host": 0}
    log.drop_engine("a")
    assert log.num_blocks() == {"device": 0, "host": 0}
    assert log.snapshot() == (3, ())


def test_k03_runs_of_something_else_than_whole_blocks_are_ignored():
    log = log_of()
    four_blocks_one_hash = Stored((block(0),), None, 4 * SIZE)
    log.on_events("a", KVEvents("device", [four_blocks_one_hash, run_of(1, 1)]))
    assert log.num_blocks()["device"] == 1
    assert log.counts["ignored_runs"] == 1
    assert Reader(log).blocks["device"] == {block(1): block(0)}


def test_an_unknown_tier_is_refused():
    with pytest.raises(KvflowError, match="tier 'tape'"):
        log_of().on_events("a", KVEvents("tape", [run_of(0, 1)]))


def test_memory_is_bounded_and_a_slow_reader_is_cut_off():
    log = log_of(max_blocks=50)
    slow = Reader(log)
    for n in range(300):
        log.on_events("a", KVEvents("device", [run_of(n, 1)], [block(n - 1)] if n else []))
    assert len(log._changes) == 50 // 2
    with pytest.raises(CutOff, match="change 1 is asked for, the log keeps 276 to 300"):
        asyncio.run(slow.catch_up())
    assert log.counts["cut_off_readers"] == 1
    again = Reader(log)
    assert set(again.blocks["device"]) == {block(299)}
    with pytest.raises(CutOff):  # a reader of another log
        asyncio.run(anext(log.follow(301)))


def test_a_reader_is_cut_off_while_it_reads():
    async def main():
        log = log_of(max_blocks=6)
        changes = log.follow(0)
        log.on_events("a", KVEvents("device", [run_of(0, 1)]))
        log.on_events("a", KVEvents("device", [run_of(1, 1)]))
        assert (await anext(changes)).seq == 1
        for n in range(2, 8):
            log.on_events("a", KVEvents("device", [run_of(n, 1)]))
        with pytest.raises(CutOff):
            await anext(changes)

    asyncio.run(main())


def test_readers_wait_for_news():
    async def main():
        log = log_of()
        waiting = [asyncio.ensure_future(anext(log.follow(0))) for _ in range(3)]
        await asyncio.sleep(0)
        log.on_events("a", KVEvents("host", [run_of(0, 1)]))
        return await asyncio.gather(*waiting)

    assert {change.seq for change in asyncio.run(main())} == {1}


def test_load_is_the_sum():
    log = log_of()
    log.on_load("a", Load(100, 1, 2, 30))
    log.on_load("b", Load(7, num_waiting=1))
    log.on_load("b", Load(8, num_waiting=1))
    assert log.load() == Load(108, 1, 3, 30)
    log.drop_engine("a")
    assert log.load() == Load(8, 0, 1, 0)


def test_load_is_told_when_it_changes_and_blocks_are_not_it():
    async def main():
        log = log_of()
        waiting = asyncio.ensure_future(log.other_load(Load(0)))
        await asyncio.sleep(0)
        log.on_events("a", KVEvents("host", [run_of(0, 1)]))
        log.on_load("a", Load(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        log.on_load("a", Load(5))
        return await waiting

    assert asyncio.run(main()) == Load(5)
