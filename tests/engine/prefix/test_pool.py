"""SharedBlockPool: free + used + pinned + quarantined + cached = all, in any order of calls."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.engine.prefix.pool import SharedBlockPool
from kvflow.errors import CapacityError, KvflowError

SIZE = 6
HOLDINGS = ("used", "pinned", "quarantined")
IDS, HOLDS = st.integers(0, SIZE - 1), st.sampled_from(HOLDINGS)


class Pool(RuleBasedStateMachine):
    """Against a counter of holds and a list of what is cached, oldest first."""

    def __init__(self):
        super().__init__()
        self.pool = SharedBlockPool(SIZE, self.evict)
        self.holds = {i: Counter() for i in range(SIZE)}
        self.indexed, self.cached, self.evicted = set(), [], []

    def evict(self, block_id):
        self.evicted.append(block_id)
        self.indexed.discard(block_id)
        self.pool.forget(block_id)

    def is_held(self, i):
        return bool(+self.holds[i])

    @rule(n=st.integers(0, SIZE + 1))
    def allocate(self, n):
        idle = [i for i in range(SIZE) if not self.is_held(i)]
        if n > len(idle):
            with pytest.raises(CapacityError, match=f"{n} blocks needed"):
                self.pool.allocate(n)
            return
        free = len(idle) - len(self.cached)
        expected, self.cached = self.cached[: max(n - free, 0)], self.cached[max(n - free, 0) :]
        self.evicted = []
        ids = self.pool.allocate(n)
        assert self.evicted == expected  # the oldest, and no more than needed
        assert len(set(ids)) == n
        assert set(ids) <= set(idle)
        for i in ids:
            self.holds[i]["used"] += 1

    @rule(i=IDS)
    def share(self, i):
        if self.is_held(i) or i in self.cached:
            self.pool.share([i])
            self.holds[i]["used"] += 1
            if i in self.cached:
                self.cached.remove(i)
        else:
            with pytest.raises(KvflowError, match=f"block {i} is free"):
                self.pool.share([i])

    @rule(i=IDS, before=HOLDS, after=HOLDS)
    def hold(self, i, before, after):
        if self.holds[i][before]:
            self.pool.hold([i], before, after)
            self.holds[i][before] -= 1
            self.holds[i][after] += 1
        else:
            with pytest.raises(KvflowError, match=f"block {i} is not held as {before}"):
                self.pool.hold([i], before, after)

    @rule(i=IDS, holding=HOLDS)
    def free(self, i, holding):
        if self.holds[i][holding]:
            self.pool.free([i], holding)
            self.holds[i][holding] -= 1
            if not self.is_held(i) and i in self.indexed:
                self.cached.append(i)
        else:
            with pytest.raises(KvflowError, match=f"block {i} is not held as {holding}"):
                self.pool.free([i], holding)

    @rule(i=IDS)
    def mark(self, i):
        if self.is_held(i) or i in self.cached:
            self.pool.mark(i)
            self.indexed.add(i)
        else:
            with pytest.raises(KvflowError, match=f"block {i} is free"):
                self.pool.mark(i)

    @precondition(lambda self: self.indexed)
    @rule(data=st.data())
    def forget(self, data):
        i = data.draw(st.sampled_from(sorted(self.indexed)))
        self.pool.forget(i)
        self.indexed.discard(i)
        self.cached = [c for c in self.cached if c != i]

    @invariant()
    def conserved(self):
        self.pool.audit()
        strongest = Counter(
            next(h for h in ("quarantined", "used", "pinned") if self.holds[i][h])
            for i in range(SIZE)
            if self.is_held(i)
        )
        counts = {h: self.pool.count(h) for h in HOLDINGS}
        assert counts == {h: strongest[h] for h in HOLDINGS}
        assert self.pool.count("cached") == len(self.cached)
        assert self.pool.num_free + sum(counts.values()) + len(self.cached) == SIZE
        assert self.pool.num_available == self.pool.num_free + len(self.cached)


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=25)


def test_a_failed_call_changes_nothing():
    pool = SharedBlockPool(4)
    ids = pool.allocate(2)
    free = next(i for i in range(4) if i not in ids)
    for call in (
        lambda: pool.free([ids[0], free]),
        lambda: pool.free([ids[0], ids[0]]),
        lambda: pool.hold([ids[0], free], "used", "pinned"),
        lambda: pool.share([ids[0], free]),
    ):
        with pytest.raises(KvflowError):
            call()
        assert (pool.num_free, pool.count("used")) == (2, 2)


def test_the_first_of_a_list_is_kept_the_longest():
    evicted = []
    pool = SharedBlockPool(3, lambda i: (evicted.append(i), pool.forget(i)))
    ids = pool.allocate(3)
    for i in ids:
        pool.mark(i)
    pool.free(ids)
    pool.allocate(2)
    assert evicted == [ids[2], ids[1]]


def test_an_index_that_does_not_forget_is_heard():
    pool = SharedBlockPool(1, lambda i: None)
    ids = pool.allocate(1)
    pool.mark(ids[0])
    pool.free(ids)
    with pytest.raises(KvflowError, match="still indexed"):
        pool.allocate(1)
    with pytest.raises(KvflowError, match="no index is asked"):
        SharedBlockPool(1).on_evict(0)


@pytest.mark.parametrize("plant", ["lost", "free twice", "two states", "unknown", "nobody"])
def test_audit_sees_a_planted_fault(plant):
    pool = SharedBlockPool(4)
    ids = pool.allocate(3)
    pool.mark(ids[0])
    pool.free(ids[:1])
    match plant:
        case "lost":
            pool._holds.pop(ids[1])
        case "free twice":
            pool._free.append(pool._free[0])
        case "two states":
            pool._free.append(ids[1])
        case "unknown":
            pool._indexed.clear()
        case "nobody":
            pool._holds[ids[1]] = {"used": 0}
    with pytest.raises(KvflowError):
        pool.audit()
