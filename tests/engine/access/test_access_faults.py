"""Faults that real systems shipped, tried on every way of reaching cached rows."""

import threading
import time

import numpy as np
import pytest
import torch
from access_world import Chunk, World
from attrs import define, field
from raw_world import DR, SPEC, TOPK, Part, R, Raw, packed
from test_access_exact import check as check_model
from test_access_sweep import check

from kvflow.comm import ThreadComm, run_ranks
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.fresh import FreshRows
from kvflow.engine.access.memory import PageShard
from kvflow.engine.access.whole import WholeRanges
from kvflow.engine.memory import StepRequest
from kvflow.errors import LayoutError
from kvflow.layouts.chunks import BalancedChunks, Contiguous
from kvflow.layouts.layout import Binding
from kvflow.layouts.mesh import Placement
from kvflow.models.partial import attend_part
from kvflow.testing import cells
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.operators.merge import merge_partials

WAYS = [
    AccessOptions("whole", "keys"),
    AccessOptions("union", "queries"),
    AccessOptions("queries", "queries"),
    AccessOptions("queries", "keys", overlap=False),
    AccessOptions("auto", "auto", 9),
]


def ids(options):
    return f"{options.attention}-{options.index}"


every_way = pytest.mark.parametrize("options", WAYS, ids=ids)


@every_way
@pytest.mark.parametrize("lengths", [[1], [2], [2, 9]])
def test_fault_a01_calls_of_all_ranks_are_the_same(options, lengths):
    """Then two tokens more each: a rank without queries or rows makes every call too."""
    first = tuple(Part(i, 0, n) for i, n in enumerate(lengths))
    then = tuple(Part(i, n, n + 2) for i, n in enumerate(lengths))
    check(Raw(2, 1, 2, options=options), (first, then))


@every_way
def test_fault_a01_two_token_prompts_of_the_model(options):
    steps = ((Chunk(0, 0, 2),), (Chunk(0, 2, 4), Chunk(1, 0, 9)))
    check_model(World(2, 2, options=options), steps)


def _bytes(world):
    return {
        (rank, name): view.memory.clone()
        for rank, memory in world.memories.items()
        for name, view in memory.cache.pages.items()
    }


@every_way
def test_fault_a02_a_step_writes_its_own_slots_and_no_other(options):
    """What lies anywhere else is 0xA5 still, or what the first step wrote."""
    world = Raw(2, 1, 2, 3, options=options)
    steps = ((Part(0, 0, 16),), (Part(1, 0, 5),))
    world.run(steps)
    allowed = {}
    for request, stop in ((0, 16), (1, 5)):
        tables = world._tables(steps)[request]
        binding = Binding.of(world.layout, tables, {"kv": world.num_blocks}, stop)
        for cell in cells(world.layout, binding, (0, stop), SPEC.names):
            view = world.memories[cell.rank].cache.pages[cell.component]
            page = view.offset + cell.block_id * view.block_stride
            key = cell.rank, cell.component
            allowed.setdefault(key, []).extend(page + i for i in cell.at)
    for key, memory in _bytes(world).items():
        elsewhere = torch.ones(len(memory), dtype=torch.bool)
        elsewhere[allowed[key]] = False
        assert bool((memory[elsewhere] == 0xA5).all()), key


@pytest.mark.parametrize("options", WAYS[:3], ids=ids)
@pytest.mark.parametrize("length", [1, 2])
def test_fault_a04_fewer_tokens_than_ranks(options, length):
    check(Raw(4, 1, 2, options=options), ((Part(0, 0, length),), (Part(0, length, length + 1),)))


@pytest.mark.parametrize("options", WAYS[:3], ids=ids)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
def test_fault_a10_shards_without_rows(options, length):
    """Block and interleave 16 over 4 ranks; then one more token at one rank, and at all."""
    steps = (
        (Part(0, 0, length),),
        (Part(0, length, length + 1, 3),),
        (Part(0, length + 1, length + 3),),
    )
    check(Raw(4, 1, 4, 16, 16, options=options), steps)


def test_fault_a11_a_part_without_rows_is_the_identity():
    record, queries = SPEC["latent.0"].record, torch.randn(3, 2, R + DR, dtype=torch.float64)
    rows = packed("latent.0", [(0, t) for t in range(4)])
    index, counts = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([4, 0, 1])
    some = attend_part(record, rows, queries, index, counts, TOPK)
    none = attend_part(record, rows[:0], queries, index[:0], torch.zeros(3, dtype=torch.int64), 5)
    assert not none.out.any()
    assert bool((none.lse == -torch.inf).all())
    assert not some.out[1].any()
    assert bool((some.lse[1] == -torch.inf).all())
    for parts in ([some, none], [none, some, none]):
        merged = merge_partials(parts)
        assert torch.equal(merged.out, some.out)
        assert torch.equal(merged.lse, some.lse)
    assert not merge_partials([none, none]).out.any()


def test_fault_a13_ranks_with_other_options_are_told_before_they_collect():
    def rank(comm):
        options = AccessOptions(workspace_tokens=100 - comm.rank // 2)
        layout = Raw(4, 1, 4).layout
        cache = RankCache.allocate(layout, comm.rank, {"kv": 4})
        memory = PagedMemory(layout, cache, comm, options)
        with pytest.raises(LayoutError, match=r"workspace_tokens=100.*workspace_tokens=99|99.*100"):
            memory.open([], frozenset())

    run_ranks(4, rank)


@pytest.mark.parametrize("attention", ["whole", "union"])
def test_fault_a20_rows_travel_as_they_are_stored(attention):
    """fp8 rows, 32 cached tokens and 5 new: exact, and the bytes counted are those of fp8."""
    world = World(2, 2, options=AccessOptions(attention, "keys"))
    check_model(world, ((Chunk(0, 0, 32),), (Chunk(0, 32, 37),)))
    counters = world.memories[0].counters
    spec = world.layout.spec
    latent = [spec[n].record.nbytes for n in spec.select(part="main", kind="latent")]
    key = [spec[n].record.nbytes for n in spec.select(part="main", kind="indexer")]
    assert counters.received_nbytes["index keys"] == 16 * sum(key)
    rows = counters.received_nbytes["attention rows"]
    assert rows == 16 * sum(latent) if attention == "whole" else rows < 16 * sum(latent)


@pytest.mark.parametrize("deal", [BalancedChunks, Contiguous])
def test_fault_a21_row_t_is_that_of_position_t(deal):
    """16 new rows dealt to 4 ranks, and 16 cached rows round-robin, tagged with their positions."""
    world = Raw(4, 1, 4, 2)
    sharding = deal(4, 16, 32)

    def rank(comm):
        request = StepRequest("a", 16, 32, Placement.simple(sharding), {"kv": list(range(4))})
        facts = StepFacts(world.layout, comm.rank, [request], 4)
        cache = RankCache.allocate(world.layout, comm.rank, {"kv": 4})
        shard = PageShard(facts, cache)
        local = np.arange(4)
        cached = world.layout.placement.sharding.token(comm.rank, local)
        shard.write("latent.0", [(0, local)], packed("latent.0", [(0, t) for t in cached]))
        fresh = FreshRows(facts, Counters(), shard)
        mine = [t for t in range(16, 32) if sharding.owner(t) == comm.rank]
        fresh.publish(comm, "latent.0", packed("latent.0", [(0, t) for t in mine]), keep=True)
        new = fresh.rows("latent.0", 0, torch.arange(16, 32))
        assert torch.equal(new, packed("latent.0", [(0, t) for t in range(16, 32)]))
        whole = WholeRanges(facts, shard, "attention rows", [(0, 2, 16)])
        gathered = whole.fetch("latent.0").run(comm)
        old = whole.rows(gathered, 0, torch.tensor([15, 2, 9]))
        assert torch.equal(old, packed("latent.0", [(0, 15), (0, 2), (0, 9)]))

    run_ranks(4, rank)


@every_way
def test_fault_a23_requests_without_context_or_without_tokens(options):
    """Contexts [0, 5, 0]; and a request that has no new token in the step."""
    steps = (
        (Part(1, 0, 5), Part(3, 0, 7)),
        (Part(0, 0, 4), Part(1, 5, 9), Part(2, 0, 1), Part(3, 7, 7)),
    )
    check(Raw(2, 1, 2, options=options), steps)


@pytest.mark.parametrize("options", WAYS[:3], ids=ids)
@pytest.mark.parametrize("kind", ["prefill", "decode", "verify", "mixed"])
def test_fault_b06_every_kind_of_batch(options, kind):
    """One token or four at a request's home, or many at all ranks, or all of these in one step."""
    start = (Part(0, 0, 12), Part(1, 0, 7), Part(2, 0, 9))
    then = {
        "prefill": (Part(0, 12, 20), Part(1, 7, 9), Part(2, 9, 20)),
        "decode": (Part(0, 12, 13, 0), Part(1, 7, 8, 1), Part(2, 9, 10, 1)),
        "verify": (Part(0, 12, 16, 0), Part(1, 7, 11, 1), Part(2, 9, 13, 1)),
        "mixed": (Part(0, 12, 13, 1), Part(1, 7, 11, 0), Part(2, 9, 20), Part(3, 0, 4)),
    }[kind]
    check(Raw(2, 1, 2, options=options), (start, then))


@define(eq=False)
class Watched:
    """A `ShardRows` that notes which rows were written in this step, and who reads them where."""

    inner: PageShard
    main: int = field(factory=threading.get_ident)
    written: set = field(factory=set)
    early: list = field(factory=list)
    num_background_reads: int = 0

    def read(self, component, rows):
        here = {(component, r, int(i)) for r, local in rows for i in local}
        if threading.get_ident() != self.main:
            self.num_background_reads += 1
            starts = [request.start for request in self.inner.facts.requests]
            sharding, shard = self.inner.facts.placement.sharding, self.inner.facts.shard
            self.early += [
                key for key in here if int(sharding.token(shard, key[2])) >= starts[key[1]]
            ]
        return self.inner.read(component, rows)

    def write(self, component, rows, packed_rows):
        self.written |= {(component, r, int(i)) for r, local in rows for i in local}
        self.inner.write(component, rows, packed_rows)


def _watch(monkeypatch):
    seen = []

    def make(facts, cache):
        seen.append(Watched(PageShard(facts, cache)))
        return seen[-1]

    monkeypatch.setattr("kvflow.engine.access.memory.PageShard", make)
    return seen


@pytest.mark.parametrize("options", WAYS[:3], ids=ids)
def test_fault_e01_the_background_reads_nothing_that_this_step_writes(options, monkeypatch):
    """Rows of the step are read by the thread that wrote them, after it has; what runs beside it
    reads rows of earlier steps."""
    seen = _watch(monkeypatch)
    check(Raw(2, 1, 2, options=options), ((Part(0, 0, 20),), (Part(0, 20, 26), Part(1, 0, 9))))
    assert any(watched.written for watched in seen)
    assert all(watched.early == [] for watched in seen)
    background = sum(watched.num_background_reads for watched in seen)
    assert (background > 0) == (options.attention != "queries" or options.index == "keys")


class SlowChannel:
    """A channel whose collectives take a while, another on each rank."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size

    def __getattr__(self, name):
        time.sleep(0.002 * (1 + self.rank))
        return getattr(self.inner, name)


@pytest.mark.parametrize("options", WAYS[:2], ids=ids)
def test_fault_e02_e03_nothing_reads_rows_that_have_not_arrived(options, monkeypatch):
    """Late collectives change nothing: whoever uses rows waits for the job, not for a flag."""
    plain = ThreadComm.channel
    monkeypatch.setattr(ThreadComm, "channel", lambda comm: SlowChannel(plain(comm)))
    world = Raw(2, 1, 2, options=options)
    check(world, ((Part(0, 0, 20),), (Part(0, 20, 26), Part(1, 0, 9))))
    for memory in world.memories.values():
        assert memory.log.fetches
        for fetch in memory.log.fetches:
            assert fetch.times.waited_until >= fetch.times.ended > fetch.times.issued
