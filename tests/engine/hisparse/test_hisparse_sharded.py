"""HiSparse over contexts that are dealt to several ranks: queries go to the rows."""

import numpy as np
import pytest
import torch
from attrs import define, evolve
from hisparse_world import bare_step, request_of, small_spec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvflow.comm.threads import run_ranks
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.hisparse import HiSparseMemory, HiSparseSizes, hisparse_layout
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.transfers.executors.base import RankCache

torch.set_num_threads(1)
SPEC = small_spec()
LONGEST = 40
OPTIONS = AccessOptions(attention="queries", overlap=False)


def placement_of(ranks, width, interleave):
    """DCP over all ranks of a group; ranks with one coordinate are replicas."""
    mesh = Mesh((Axis("tp", ranks), Axis("dcp", width, over=("tp",))))
    return mesh.place(RoundRobin(width, interleave), "dcp")


@define(eq=False)
class Group:
    """A decode group of several ranks: one memory each, and block tables that all share."""

    placement: Placement
    block: int

    def table(self, name, layout):
        need, i = layout.num_blocks_for(LONGEST), "abc".index(name)
        return {group: list(range(i * n, (i + 1) * n)) for group, n in need.items()}

    def run(self, make, steps, topk, then=lambda memory: None):
        """By rank: the attention of every step, by layer, and what `then` says at the end."""

        def body(comm):
            memory = make(comm)
            outs = []
            for seed, parts in enumerate(steps):
                requests = []
                for name, start, n, home in parts:
                    if start == 0:
                        memory.forget(name)
                    table = self.table(name, memory.layout)
                    requests.append(request_of(name, start, n, table, home))
                outs.append(bare_step(memory, requests, topk, seed))
            return outs, then(memory)

        return run_ranks(len(self.placement.all_ranks), body)

    def paged(self, options=OPTIONS):
        layout = KVLayout.uniform(SPEC, self.placement, Paged(self.block))
        blocks = {g: 3 * n for g, n in layout.num_blocks_for(LONGEST).items()}
        return lambda comm: PagedMemory(
            layout, RankCache.allocate(layout, comm.rank, blocks), comm, options
        )

    def hisparse(self, sizes, options=OPTIONS):
        layout = hisparse_layout(SPEC, self.placement, self.block)
        blocks = {g: 3 * n for g, n in layout.num_blocks_for(LONGEST).items()}
        return lambda comm: HiSparseMemory.allocate(layout, comm, blocks, sizes, options=options)


@st.composite
def scripts(draw):
    """A group, and steps of some of three requests, each at home on one rank or on replicas."""
    ranks, width = draw(st.sampled_from([(2, 2), (3, 3), (4, 2), (2, 1)]))
    placement = placement_of(ranks, width, draw(st.sampled_from([1, 3])))
    homes = [(r,) for r in range(ranks)]
    if ranks > width:
        homes = [tuple(range(r, ranks, width)) for r in range(width)] + homes[:1]
    topk, steps, at, home = 4, [], {}, {}
    for _ in range(draw(st.integers(2, 4))):
        parts = []
        for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
            home.setdefault(name, draw(st.sampled_from(homes)))
            first, stop = at.get(name, (0, 0))
            start = draw(st.integers(min(first + 1, stop), stop))
            count = min(draw(st.one_of(st.integers(1, 5), st.integers(1, 16))), LONGEST - start)
            if count > 0:
                at[name] = (start, start + count)
                parts.append((name, start, count, home[name]))
        if parts:
            steps.append(parts)
    sizes = HiSparseSizes(topk, 3, draw(st.sampled_from([4, 9])))
    # a small workspace: few queries of a rank at a time, so that a layer attends in several calls
    options = evolve(OPTIONS, workspace_tokens=draw(st.sampled_from([250, 1 << 18])))
    return placement, draw(st.sampled_from([2, 5])), sizes, options, steps


@settings(max_examples=8, phases=[Phase.generate])
@given(case=scripts())
def test_shards_attend_as_pages_dealt_alike_do(case):
    placement, block, sizes, options, steps = case
    wanted = Group(placement, block)
    found = Group(placement, block)
    pairs = zip(
        wanted.run(wanted.paged(options), steps, sizes.topk),
        found.run(found.hisparse(sizes, options), steps, sizes.topk),
        strict=True,
    )
    for rank, ((pages, _), (hot, _)) in enumerate(pairs):
        for step, (here, there) in enumerate(zip(pages, hot, strict=True)):
            for name, out in here.items():
                assert torch.equal(out, there[name]), (rank, step, name)


def test_layers_that_attend_in_several_calls_keep_their_rows_apart():
    """Eight queries, four a call; the second call's rows take places of the first one's."""
    options, steps = evolve(OPTIONS, workspace_tokens=250), [[("a", 0, 32, (0,))]]
    steps.append([("a", 32, 8, (0,))])
    wanted, found = (Group(placement_of(2, 2, 1), 2) for _ in range(2))
    hot = found.hisparse(HiSparseSizes(4, 1, 8), options)
    pairs = zip(
        wanted.run(wanted.paged(options), steps, 4),
        found.run(hot, steps, 4, lambda memory: memory.counters["evictions"]),
        strict=True,
    )
    for (pages, _), (rows, evictions) in pairs:
        assert all(torch.equal(out, rows[1][name]) for name, out in pages[1].items())
        assert evictions > 0


def test_each_rank_fetches_rows_of_its_own_alone():
    """30 positions over 2 ranks, 8 of them chosen a query: what the ranks resolve adds up, and rows
    of one rank's shard go nowhere else."""
    placement = placement_of(2, 2, 1)
    group = Group(placement, 4)
    steps = [[("a", 0, 30, (0,))], *([("a", 30 + n, 1, (n % 2,))] for n in range(4))]

    def counts(memory):
        kinds = memory.access.received_nbytes
        return memory.counters, "attention rows" in kinds, memory.pool.nbytes

    ends = [end for _, end in group.run(group.hisparse(HiSparseSizes(8, 1, 8)), steps, 8, counts)]
    assert all(c["hits"] + c["misses"] > 0 for c, _, _ in ends)
    assert not any(moved for _, moved, _ in ends)
    # after the prompt: 4 steps of one query, 3 index groups, 8 rows each, on both ranks together
    prompt = group.run(group.hisparse(HiSparseSizes(8, 1, 8)), steps[:1], 8, counts)
    before = sum(c["hits"] + c["misses"] for _, (c, _, _) in prompt)
    assert sum(c["hits"] + c["misses"] for c, _, _ in ends) - before == 4 * 3 * 8


def test_all_chosen_rows_may_lie_on_one_rank():
    """Interleave 16 and a context of 16: rank 0 holds every row, and has hot rows for them."""
    group = Group(placement_of(2, 2, 16), 4)
    steps = [[("a", 0, 15, (1,))], [("a", 15, 1, (1,))]]
    wanted = group.run(group.paged(), steps, 12)
    other = Group(placement_of(2, 2, 16), 4)
    found = other.run(other.hisparse(HiSparseSizes(12, 1, 12)), steps, 12)
    for (pages, _), (hot, _) in zip(wanted, found, strict=True):
        assert all(torch.equal(out, hot[1][name]) for name, out in pages[1].items())


def test_latent_rows_do_not_leave_the_rank():
    group = Group(placement_of(2, 2, 1), 4)

    def read(memory):
        step = memory.open([], frozenset())
        with pytest.raises(KvflowError, match=r"latent\.0 lies on the host: queries go to it"):
            step.shard.read("latent.0", [(0, np.arange(1))])

    group.run(group.hisparse(HiSparseSizes(4, 1, 4)), [[("a", 0, 3, (0,))]], 4, read)
