"""BlockPool: no id is lost, handed out twice or freed twice, whatever the order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvflow.engine.blocks import BlockPool
from kvflow.errors import CapacityError, KvflowError

SIZE = 8
HOLDINGS = ("used", "pinned", "quarantined")


class Pool(RuleBasedStateMachine):
    """Against a dict of what is held how."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.held = {}

    @rule(n=st.integers(0, SIZE + 1))
    def allocate(self, n):
        room = SIZE - len(self.held)
        if n > room:
            with pytest.raises(CapacityError, match=f"{n} blocks needed, {room} of {SIZE} free"):
                self.pool.allocate(n)
            return
        ids = self.pool.allocate(n)
        assert len(set(ids)) == n
        assert not set(ids) & set(self.held)
        assert all(0 <= i < SIZE for i in ids)
        self.held.update(dict.fromkeys(ids, "used"))

    @rule(block_id=st.integers(0, SIZE), holding=st.sampled_from(HOLDINGS))
    def hold(self, block_id, holding):
        if block_id in self.held:
            self.pool.hold([block_id], holding)
            self.held[block_id] = holding
        else:
            with pytest.raises(KvflowError, match=f"block {block_id} is not held"):
                self.pool.hold([block_id], holding)

    @rule(block_id=st.integers(0, SIZE))
    def free(self, block_id):
        if block_id in self.held:
            self.pool.free([block_id])
            del self.held[block_id]
        else:
            with pytest.raises(KvflowError, match=f"block {block_id} is not held"):
                self.pool.free([block_id])

    @invariant()
    def conserved(self):
        self.pool.audit()
        counts = [self.pool.count(h) for h in HOLDINGS]
        assert counts == [list(self.held.values()).count(h) for h in HOLDINGS]
        assert self.pool.num_free + sum(counts) == SIZE


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=25)


def test_a_failed_call_changes_nothing():
    pool = BlockPool(4)
    ids = pool.allocate(2)
    free = next(i for i in range(4) if i not in ids)
    for call in (
        lambda: pool.free([ids[0], free]),
        lambda: pool.free([ids[0], ids[0]]),
        lambda: pool.hold([ids[0], free], "pinned"),
    ):
        with pytest.raises(KvflowError):
            call()
        assert (pool.num_free, pool.count("used")) == (2, 2)


@pytest.mark.parametrize("plant", ["lost", "free twice", "free and held"])
def test_audit_sees_a_planted_fault(plant):
    pool = BlockPool(4)
    pool.allocate(2)
    if plant == "lost":
        pool._held.pop(next(iter(pool._held)))
    else:
        pool._free.append(pool._free[0] if plant == "free twice" else next(iter(pool._held)))
    with pytest.raises(KvflowError):
        pool.audit()
