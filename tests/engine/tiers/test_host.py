"""The host tier: whose rows lie in which unit, and the memory that several processes map."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from symbolic_ranks import toy_spec

from kvflow.engine.prefix.hashes import PrefixHasher
from kvflow.engine.tiers.host import HostTier, Place
from kvflow.engine.tiers.memory import UnitMemory, unit_nbytes
from kvflow.errors import CapacityError, KvflowError, TransferError

SPEC = toy_spec(True)
CHAIN = PrefixHasher("content", 4, shifted=True).chain(range(40))


def memory(num_units, spec=SPEC, unit_size=4):
    return UnitMemory.create(
        spec, unit_size, num_units * (unit_nbytes(spec, unit_size) + 32) + 4096
    )


@pytest.fixture
def tier():
    made = HostTier(memory(4))
    yield made
    made.memory.close()


def store(tier, k):
    following = CHAIN.following(k)
    unit = tier.begin(Place(CHAIN.hashes[k], following))
    if unit is not None:
        place = Place(CHAIN.hashes[k], following)
        tier.publish(unit, place, CHAIN.block(k), CHAIN.label(k, following))
    return unit


def found(tier):
    return [k for k in range(9) if tier.find(CHAIN, k, CHAIN.following(k)) is not None]


def test_fault_h14_a_full_tier_gives_the_oldest_away_and_refuses_stores(tier):
    """A pool of 4, 9 stores: the oldest unpinned goes, pinned ones never do."""
    for k in range(9):
        assert store(tier, k) is not None
    assert found(tier) == [5, 6, 7, 8]
    assert (tier.num_stored, tier.num_evicted, tier.num_refused) == (9, 5, 0)
    units = [tier.find(CHAIN, k, CHAIN.following(k)) for k in (5, 6, 7, 8)]
    tier.pin(units)
    assert store(tier, 0) is None
    assert tier.num_refused == 1
    tier.unpin(units[1:2])
    assert store(tier, 0) is not None
    assert found(tier) == [0, 5, 7, 8]
    tier.audit(idle=False)


def test_nothing_is_found_before_it_is_published_and_nothing_twice(tier):
    place = Place(CHAIN.hashes[0], 4)
    unit = tier.begin(place)
    assert found(tier) == []
    assert tier.memory.label(unit) == bytes(32)
    assert tier.begin(place) is None  # it is being written
    tier.discard(unit)
    unknown = tier.begin(None)
    store(tier, 0)
    assert not tier.publish(unknown, place, CHAIN.block(0), CHAIN.label(0, 4))
    assert tier.counts() == {"free": 3, "written": 0, "pinned": 0, "published": 1}


def test_a_use_keeps_a_unit(tier):
    for k in range(4):
        store(tier, k)
    assert store(tier, 0) is None  # here already
    store(tier, 4)
    assert found(tier) == [0, 2, 3, 4]


def test_fault_i05_a_unit_is_proven_by_tokens_and_label(tier):
    store(tier, 0)
    other = PrefixHasher("content", 4, shifted=True, digest=lambda data: CHAIN.hashes[0])
    for prompt, salt in (((9, 9, 9, 9, 4), None), ((0, 1, 2, 3, 4), "another tenant")):
        chain = other.chain(prompt, salt)
        assert chain.hashes[0] == CHAIN.hashes[0]
        assert tier.find(chain, 0, 4) is None
        assert tier.variant(chain, 0) is None
    assert tier.find(other.chain(range(5)), 0, 4) is not None


def test_what_is_forgotten_while_it_is_pinned_comes_back_when_it_is_not(tier):
    unit = store(tier, 0)
    tier.pin([unit])
    assert tier.clear() == 1
    assert found(tier) == []
    assert tier.memory.label(unit) != CHAIN.label(0, 4)
    tier.audit(idle=False)
    tier.unpin([unit])
    tier.audit(idle=True)


def test_calls_out_of_turn_are_refused(tier):
    for call, text in (
        (lambda: tier.pin([0]), "unit 0 is not published"),
        (lambda: tier.unpin([0]), "unit 0 is not pinned"),
        (lambda: tier.discard(0), "unit 0 is not being written"),
    ):
        with pytest.raises(KvflowError, match=text):
            call()


class Tier(RuleBasedStateMachine):
    """Stores, pins and clears in any order: no unit is lost, pinned ones stay found."""

    def __init__(self):
        super().__init__()
        self.tier = HostTier(memory(3))
        self.pins = []

    def teardown(self):
        self.tier.memory.close()

    @rule(k=st.integers(0, 8))
    def store(self, k):
        store(self.tier, k)

    @precondition(lambda self: found(self.tier))
    @rule(data=st.data())
    def pin(self, data):
        k = data.draw(st.sampled_from(found(self.tier)))
        unit = self.tier.find(CHAIN, k, CHAIN.following(k))
        self.tier.pin([unit])
        self.pins.append((k, unit))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        self.tier.unpin([pin[1]])

    @rule()
    def clear(self):
        self.tier.clear()
        self.pins = [(None, unit) for _, unit in self.pins]

    @invariant()
    def lawful(self):
        self.tier.audit(idle=not self.pins)
        for k, unit in self.pins:
            assert k is None or self.tier.find(CHAIN, k, CHAIN.following(k)) == unit


TestTier = Tier.TestCase
TestTier.settings = settings(stateful_step_count=20)


@pytest.mark.parametrize("plant", ["lost", "two states", "label", "index"])
def test_audit_sees_a_planted_fault(tier, plant):
    unit = store(tier, 0)
    match plant:
        case "lost":
            tier._free.pop()
        case "two states":
            tier._free[0] = unit
        case "label":
            tier.memory.set_label(unit, None)
        case "index":
            tier._units.clear()
    with pytest.raises(KvflowError):
        tier.audit(idle=True)


# --- memory

ATTACH = """
import sys
from kvflow.engine.tiers.memory import UnitMemory
from kvflow.layouts.spec import KVCacheSpec
sys.path.insert(0, sys.argv[2])
from symbolic_ranks import toy_spec
there = UnitMemory.attach(sys.argv[1], toy_spec(True), 4, 4)
assert bytes(there.units[2].numpy()) == bytes([7]) * there.units.shape[1]
there.units[3] = 9
there.set_label(3, bytes(range(32)))
reader = UnitMemory.attach(sys.argv[1], toy_spec(True), 4, 4, writable=False)
assert (reader.units[3] == 9).all() and reader.label(3) == bytes(range(32))
print("has read", flush=True)
reader.units[3] = 8
print("has written")
"""


def test_another_process_maps_the_same_bytes():
    """One that only reads ends where it writes."""
    made = memory(4)
    made.units[2] = 7
    here = os.path.dirname(os.path.dirname(__file__))
    run = [sys.executable, "-c", ATTACH, made.name, here]
    ended = subprocess.run(run, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, b"has read\n")
    assert (made.units[3] == 9).all()
    assert made.label(3) == bytes(range(32))
    made.close()


def test_no_name_is_left_in_any_file_system():
    before = set(os.listdir("/dev/shm"))
    made = memory(4)
    assert set(os.listdir("/dev/shm")) == before
    other = UnitMemory.attach(made.name, SPEC, 4, 4)
    made.close()
    other.units[0] = 1
    assert (made.units[0] == 1).all()  # the memory lives as long as somebody maps it
    other.close()
    with pytest.raises(TransferError, match="cannot be opened"):
        UnitMemory.attach(made.name, SPEC, 4, 4)


def test_memory_is_taken_as_it_is_written_and_given_back():
    def resident():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(x.split()[1]) for x in file if x.startswith("Pss_Shmem"))

    before = resident()
    made = memory(4000)
    assert resident() - before < 2000
    made.units[:] = 1
    assert resident() - before > made.units.numel() // 2048
    made.close()
    del made
    assert resident() - before < 2000


@pytest.mark.parametrize("other", [toy_spec(False), toy_spec(True, kv_dtype="fp8")])
def test_fault_f12_rows_of_another_size_are_refused_at_attachment(other):
    made = memory(4)
    with pytest.raises(TransferError, match="4 units of 4 tokens need"):
        UnitMemory.attach(made.name, other, 4, 4)
    made.close()


def test_a_size_without_room_for_a_unit_is_refused():
    with pytest.raises(CapacityError, match="one unit of 4 tokens has"):
        UnitMemory.create(SPEC, 4, 4096 + 31)
