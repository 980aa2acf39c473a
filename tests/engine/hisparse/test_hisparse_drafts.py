"""Which rows drafts write: none below the last computed one, in blocks that two requests hold."""

import numpy as np
import pytest
import torch
from attrs import define, field
from engine_world import one_rank_tokens, reference_model
from hisparse_world import TEXTS, TOPK

from kvflow.comm.local import LocalComm
from kvflow.engine.access import PagedMemory
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.hisparse import HiSparseMemory, HiSparseSizes, hisparse_layout
from kvflow.engine.memory import by_request_deal
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.errors import KvflowError
from kvflow.kernels.rows import gather_rows
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.transfers.executors.base import RankCache

torch.set_num_threads(1)
BLOCK, NUM_DRAFTS = 4, 3
GREEDY = SamplingParams(6, temperature=0, ignore_eos=True)
FIRST = Request("first", tuple(TEXTS[5][:21]), GREEDY)
NUM_BLOCKS = 40


def memory_of(kind):
    spec, alone = reference_model("float64", "float64").spec, Placement.simple(Replicated())
    if kind == "paged":
        layout = KVLayout.uniform(spec, alone, Paged(BLOCK))
        return PagedMemory(layout, RankCache.allocate(layout, 0, {"kv": NUM_BLOCKS}), LocalComm())
    layout = hisparse_layout(spec, alone, BLOCK)
    blocks = {"latent": NUM_BLOCKS, "indexer": NUM_BLOCKS}
    sizes = HiSparseSizes.for_drafts(TOPK, 2, NUM_DRAFTS)
    return HiSparseMemory.allocate(layout, LocalComm(), blocks, sizes)


@define(eq=False)
class Decoding:
    """One request that a runner computes: with drafts, unless told otherwise."""

    runner: StepRunner
    request: Request
    first_block: int
    computed: int = 0
    tokens: list = field(factory=list)
    tables: dict = field(factory=dict)

    def __attrs_post_init__(self):
        self.tokens = list(self.request.prompt)
        ids = list(range(self.first_block, self.first_block + NUM_BLOCKS // 2))
        self.tables = {g.name: list(ids) for g in self.runner.memory.layout.groups}

    @property
    def generated(self):
        return self.tokens[len(self.request.prompt) :]

    def begin_with(self, other, length):
        """The first `length` positions lie in blocks of another request."""
        for name, ids in self.tables.items():
            ids[: length // BLOCK] = other.tables[name][: length // BLOCK]
        self.computed = length

    def item(self, num_drafts=NUM_DRAFTS):
        new = self.tokens[self.computed :]
        sampling = self.request.sampling
        return StepItem(
            self.request.request_id, self.computed, new, None, self.tables, sampling,
            num_drafts=num_drafts,
        )  # fmt: skip

    def take(self, run):
        self.computed = len(self.tokens) + len(run) - 1
        self.tokens += [s.token for s in run]

    def step(self, num_drafts=NUM_DRAFTS):
        self.take(self.runner.run([self.item(num_drafts)])[self.request.request_id])

    def rows(self, length):
        """Packed rows [0, length) of every component, as pages hold them."""
        memory = self.runner.memory
        memory.flush(self.request.request_id)
        num_blocks = dict.fromkeys(self.tables, NUM_BLOCKS)
        binding = Binding.of(memory.layout, self.tables, num_blocks, length)
        found = {}
        for name, pages in memory.cache.pages.items():
            group = memory.layout.group_of(name).name
            slots = torch.from_numpy(binding.slots(group, np.arange(length), 0))
            found[name] = gather_rows(pages, slots)
        return found


def runner_over(kind):
    model, memory = reference_model("float64", "float64"), memory_of(kind)
    return StepRunner(model, memory, LocalComm(), by_request_deal([(0,)]))


@pytest.mark.parametrize("kind", [pytest.param("paged", marks=pytest.mark.slow), "hisparse"])
def test_no_step_changes_a_row_below_what_was_computed(kind):
    """The first pass of the MTP module writes the last computed row again, with its own bytes."""
    one = Decoding(runner_over(kind), FIRST, 0)
    one.step()
    while len(one.generated) < GREEDY.max_tokens:
        length = one.computed
        before = one.rows(length)
        one.step()
        after = one.rows(length)
        assert all(torch.equal(rows, after[name]) for name, rows in before.items())
    assert one.generated[: GREEDY.max_tokens] == one_rank_tokens(FIRST, "float64")


def test_two_requests_with_drafts_share_full_blocks():
    """The second has the first one's prompt and tokens, up to the block before the newest row, and
    then other ones; both decode what they decode alone."""
    runner = runner_over("hisparse")
    first = Decoding(runner, FIRST, 0)
    while first.computed < 25:
        first.step()
    prompt = (*first.tokens[:25], 9, 8, 7)
    second = Decoding(runner, Request("second", prompt, GREEDY), NUM_BLOCKS // 2)
    first.runner.memory.flush("first")
    second.begin_with(first, 24)
    while min(len(first.generated), len(second.generated)) < GREEDY.max_tokens:
        emitted = runner.run([first.item(), second.item()])
        for one in (first, second):
            one.take(emitted[one.request.request_id])
    for one in (first, second):
        wanted = one_rank_tokens(one.request, "float64")
        assert one.generated[: GREEDY.max_tokens] == wanted
    assert runner.counters.proposed


def test_the_block_of_the_newest_row_is_not_shared_while_its_owner_drafts():
    """The last computed row is written again: alone or without drafts that is no harm, in a block
    that another request with a seat holds it is refused."""
    runner = runner_over("hisparse")
    first = Decoding(runner, FIRST, 0)
    first.step(0)
    while first.computed % BLOCK:
        first.step(first.computed % BLOCK == BLOCK - 1)  # what drafts begin with is kept
    prompt = (*first.tokens, 9)
    second = Decoding(runner, Request("second", prompt, GREEDY), NUM_BLOCKS // 2)
    runner.memory.flush("first")
    second.begin_with(first, first.computed)
    second.step()
    with pytest.raises(KvflowError, match=r"request 'first' writes block .* another request holds"):
        first.step()
    runner.forget("second")
    first.step()
    while len(first.generated) < GREEDY.max_tokens:
        first.step()
    assert first.generated[: GREEDY.max_tokens] == one_rank_tokens(FIRST, "float64")
