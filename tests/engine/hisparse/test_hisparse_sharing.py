"""Requests that hold the same full blocks, and transfers that read them while their owner decodes.

What is held against: a memory of pages in which every request has blocks of its own, into which the
shared rows were copied when they were shared.
"""

import numpy as np
import pytest
import torch
from attrs import define, field, frozen
from hisparse_world import bare_step, request_of, small_spec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvflow.comm.threads import run_ranks
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.hisparse import HiSparseMemory, HiSparseSizes, hisparse_layout
from kvflow.kernels.rows import gather_rows, scatter_rows
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.transfers.executors.base import RankCache

torch.set_num_threads(1)
SPEC = small_spec()
LONGEST, TOPK = 40, 4
NAMES = "abc"
OPTIONS = AccessOptions(attention="queries", overlap=False)


@frozen
class Step:
    """Positions [start, start + count) of some requests, by name."""

    parts: dict


@frozen
class Share:
    """`to` begins with the blocks of `of` that hold the first `length` positions."""

    of: str
    to: str
    length: int


@frozen
class Flush:
    name: str


@frozen
class Forget:
    name: str


@frozen
class Read:
    """Somebody reads the first `length` rows of a request from the ranks' pages."""

    name: str
    length: int


@define(eq=False)
class Play:
    """A group of ranks; requests are at home on `home`, a rank of it. Blocks are handed out once:
    no request ever takes those of another but by `Share`."""

    size: int
    interleave: int
    block: int
    hot_rows: int = TOPK
    home: int = 0
    placement: object = field(init=False)

    def __attrs_post_init__(self):
        mesh = Mesh((Axis("all", self.size), Axis("dcp", self.size, over=("all",))))
        self.placement = mesh.place(RoundRobin(self.size, self.interleave), "dcp")

    def is_closed(self, length):
        """Whether the first `length` positions fill whole blocks, on every rank."""
        held = [0] * self.size
        for position in range(length):
            held[position // self.interleave % self.size] += 1
        return len(set(held)) == 1 and held[0] % self.block == 0

    def closed(self, most):
        return [n for n in range(1, most + 1) if self.is_closed(n)]

    def run(self, script, hisparse):
        """By rank, what every step attended to and every read has read."""
        if hisparse:
            layout = hisparse_layout(SPEC, self.placement, self.block)
        else:
            layout = KVLayout.uniform(SPEC, self.placement, Paged(self.block))
        need = layout.num_blocks_for(LONGEST)
        num_blocks = {name: 6 * n for name, n in need.items()}
        sizes = HiSparseSizes(TOPK, len(NAMES), self.hot_rows)

        def body(comm):
            if hisparse:
                memory = HiSparseMemory.allocate(layout, comm, num_blocks, sizes, options=OPTIONS)
            else:
                cache = RankCache.allocate(layout, comm.rank, num_blocks)
                memory = PagedMemory(layout, cache, comm, OPTIONS)
            one = _Rank(memory, num_blocks, need, self.home, shares=hisparse)
            return [one.do(op, seed) for seed, op in enumerate(script)]

        return run_ranks(self.size, body)

    def check(self, script):
        """The script over HiSparse, with shared blocks, against pages, without."""
        pairs = zip(self.run(script, False), self.run(script, True), strict=True)
        for rank, (wanted, found) in enumerate(pairs):
            for op, here, there in zip(script, wanted, found, strict=True):
                assert here.keys() == there.keys()
                for name, rows in here.items():
                    assert torch.equal(rows, there[name]), (rank, op, name)


@define(eq=False)
class _Rank:
    """One rank's memory, and the block tables of its requests."""

    memory: object
    num_blocks: dict
    need: dict
    home: int
    shares: bool
    tables: dict = field(factory=dict)
    num_given: int = 0

    def table(self, name):
        if name not in self.tables:
            i, self.num_given = self.num_given, self.num_given + 1
            self.tables[name] = {g: list(range(i * n, i * n + n)) for g, n in self.need.items()}
        return self.tables[name]

    def do(self, op, seed):
        match op:
            case Step(parts):
                requests = [
                    request_of(name, start, count, self.table(name), (self.home,))
                    for name, (start, count) in parts.items()
                ]
                return bare_step(self.memory, requests, TOPK, seed)
            case Share(of, to, length):
                self.tables.pop(to, None)
                self.share(self.table(of), self.table(to), length)
            case Flush(name):
                self.memory.flush(name)
            case Forget(name):
                self.memory.forget(name)
            case Read(name, length):
                return {c: self.rows(self.table(name), c, length) for c in SPEC.names}
        return {}

    def share(self, old, new, length):
        if self.shares:
            for name, count in self.memory.layout.num_blocks_for(length).items():
                new[name][:count] = old[name][:count]
            return
        for component in SPEC.names:
            slots = self.slots(new, component, length)
            scatter_rows(self.pages(component), slots, self.rows(old, component, length))

    def rows(self, table, component, length):
        return gather_rows(self.pages(component), self.slots(table, component, length))

    def pages(self, component):
        return self.memory.cache.pages[component]

    def slots(self, table, component, length):
        layout, rank = self.memory.layout, self.memory.comm.rank
        binding = Binding.of(layout, table, self.num_blocks, length)
        positions = np.arange(length)
        mine = layout.placement.sharding.owner(positions) == layout.placement.shard_of(rank)
        group = layout.group_of(component).name
        return torch.from_numpy(binding.slots(group, positions[mine], rank))


GROUPS = [(1, 1, 3), (1, 1, 4), (2, 1, 2), (2, 1, 3), (2, 3, 2)]
"""(ranks, interleave, block size)"""


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_full_blocks_of_one_that_has_left_begin_another(group):
    play = Play(*group)
    closed = play.closed(13)[-1]
    script = [
        Step({"a": (0, 9)}),
        *(Step({"a": (n, 1)}) for n in range(9, 14)),
        Flush("a"),
        Forget("a"),
        Read("a", 14),
        Share("a", "b", closed),
        Step({"b": (closed, 3)}),
        *(Step({"b": (n, 1)}) for n in range(closed + 3, closed + 6)),
        Flush("b"),
        Read("b", closed + 6),
    ]
    play.check(script)


@pytest.mark.parametrize("group", [GROUPS[4], *map(slow, GROUPS[:4])])
def test_full_blocks_are_shared_while_their_owner_decodes(group):
    """Both go on, in steps together and apart, the first one right behind what is shared; the
    second is preempted and begins again there; a transfer reads the first one's rows at any time
    after its flush."""
    play = Play(*group)
    closed = play.closed(13)[-1]
    script = [
        Step({"a": (0, closed - 1)}),
        Step({"a": (closed - 1, 1)}),
        Flush("a"),
        Share("a", "b", closed),
        Step({"a": (closed, 1), "b": (closed, 2)}),
        Read("a", closed),
        *(Step({"b": (closed + n, 1), "a": (closed - 1 + n, 1)}) for n in range(2, 4)),
        Forget("b"),
        Step({"a": (closed + 3, 3)}),
        Share("a", "b", closed),
        Step({"b": (closed, 7), "a": (closed + 4, 2)}),
        Read("a", closed),
        Flush("b"),
        Read("b", closed + 7),
        Forget("a"),
        Step({"b": (closed + 7, 1)}),
    ]
    play.check(script)


def test_rows_that_were_not_flushed_are_missed():
    """The checks above are real: without the flush the newest full block is not on the host."""
    play = Play(*GROUPS[1])
    script = [Step({"a": (0, 12)}), Share("a", "b", 12), Step({"b": (12, 2)})]
    with pytest.raises(AssertionError):
        play.check(script)
    play.check([script[0], Flush("a"), *script[1:]])


@st.composite
def plays(draw):
    """A group, and a script: the requests compute, are flushed, leave, and begin with full blocks
    of one another; some rows of a step are written again by the next one."""
    play = Play(
        *draw(st.sampled_from(GROUPS)),
        hot_rows=draw(st.sampled_from([4, 9])),
    )
    play.home = draw(st.integers(0, play.size - 1))
    script, computed, seated = [], {}, set()
    for _ in range(draw(st.integers(4, 10))):
        name = draw(st.sampled_from(NAMES))
        others = [n for n, most in computed.items() if n != name and play.closed(most)]
        what = draw(st.sampled_from(["step", "step", "step", "share", "forget", "read"]))
        if what == "share" and others:
            of = draw(st.sampled_from(others))
            length = draw(st.sampled_from(play.closed(computed[of])))
            script += [
                Forget(name),
                *([Flush(of)] if of in seated else []),
                Share(of, name, length),
            ]
            computed[name] = length
            seated.discard(name)
        elif what == "forget" and name in seated:
            script += [Flush(name), Forget(name)]
            seated.discard(name)
        elif what == "read" and name in computed:
            script += [Flush(name), Read(name, computed[name])]
        else:
            parts = {}
            for one in {name, draw(st.sampled_from(NAMES))}:
                start = computed.get(one, 0)
                count = min(draw(st.integers(1, 9)), LONGEST - start)
                if count:
                    parts[one] = start, count
                    computed[one] = start + draw(st.integers(1, count))
            script.append(Step(parts))
            seated |= parts.keys()
    return play, script


@pytest.mark.slow
@settings(max_examples=60, phases=[Phase.generate])
@given(case=plays())
def test_any_requests_share_with_any_others(case):
    play, script = case
    play.check(script)
