"""What the tests of speculative decoding share: drafts by script, requests driven step by step,
and caches compared byte by byte."""

from collections.abc import Callable

import torch
from attrs import define, field
from engine_world import differing_cells, one_rank_tokens, reference_model

from kvflow.comm.local import LocalComm
from kvflow.engine.access import PagedMemory
from kvflow.engine.api import Request
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.engine.spec.draft import Drafter
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.transfers.executors.base import RankCache

VOCAB = 320
Script = Callable[[str, int, int], int]
"""The draft for a position of a request, the step's first one being at place 0."""


class ScriptedDrafter(Drafter):
    """Runs the MTP passes, with all that they write, and then drafts what a script says."""

    script: Script

    def draft(self, items, passes, kept):
        drafts = super().draft(items, passes, kept)
        for i, tokens in drafts.items():
            assert tokens.shape == (items[i].num_drafts,)
            name, stop = items[i].request_id, items[i].stop
            said = [self.script(name, stop + place, place) for place in range(len(tokens))]
            drafts[i] = torch.tensor(said)
        return drafts


def scripted(runner, script):
    """The runner, with drafts by `script`."""
    if script is not None:
        runner.drafter = ScriptedDrafter(runner.model, runner.memory, runner.comm, runner.tp)
        runner.drafter.script = script
    return runner


def at_home(homes, size):
    """A deal: all tokens of a request on the rank that `homes` says."""

    def deal(items):
        return [
            Placement(Replicated(i.start, i.stop), ((homes(i.request_id) % size,),)) for i in items
        ]

    return deal


def scripts(requests, kv_dtype):
    """Named scripts: drafts that all come true, none, one in three, and what the model drafts."""
    truth = {
        r.request_id: list(r.prompt) + one_rank_tokens(r, kv_dtype) + [0] * 8 for r in requests
    }
    return {
        "right": lambda name, p, place: truth[name][p],
        "wrong": lambda name, p, place: (truth[name][p] + 1) % VOCAB,
        "mixed": lambda name, p, place: (truth[name][p] + (p % 3 == 1)) % VOCAB,
        "random": lambda name, p, place: (p * 2654435761 + len(name)) % VOCAB,
        "model": None,
    }


@define(eq=False)
class Driven:
    """One request under way: its tokens, and how many positions have their KV."""

    request: Request
    tables: dict[str, list[int]]
    tokens: list[int] = field(factory=list)
    computed: int = 0
    steps: int = 0

    def __attrs_post_init__(self):
        self.tokens = list(self.request.prompt)

    @property
    def total(self):
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def done(self):
        return len(self.tokens) >= self.total

    @property
    def generated(self):
        return self.tokens[len(self.request.prompt) :]

    def item(self, count, num_drafts):
        """The next tokens, at most `count`; drafts only behind the last one there is."""
        stop = min(self.computed + count, len(self.tokens))
        last = stop == len(self.tokens)
        return StepItem(
            self.request.request_id,
            self.computed,
            self.tokens[self.computed : stop],
            None if last else self.tokens[stop],
            self.tables,
            self.request.sampling if last else None,
            num_drafts=min(num_drafts, max(self.total - len(self.tokens) - 1, 0)) if last else 0,
        )

    def take(self, item, run):
        self.computed = item.stop + max(len(run) - 1, 0)
        assert [s.position for s in run] == list(
            range(len(self.tokens), len(self.tokens) + len(run))
        )
        assert len(run) <= item.num_drafts + 1
        self.tokens += [s.token for s in run]
        self.steps += 1


def layout_of(spec, block, placement=None):
    return KVLayout.uniform(spec, placement or Placement.simple(Replicated()), Paged(block))


def drive_all(requests, layout):
    """Requests to drive, with blocks of their own in a pool, and the pool's size."""
    driven, first = [], 0
    for r in requests:
        # a request never needs more than prompt + max_tokens - 1 positions, drafts included
        n = layout.num_blocks_for(len(r.prompt) + r.sampling.max_tokens - 1)["kv"]
        driven.append(Driven(r, {"kv": list(range(first, first + n))}))
        first += n
    return driven, {"kv": max(first, 1)}


def one_rank(kv_dtype, block, num_blocks, script=None, fill=0xA5):
    """A runner over pages of one rank in float64."""
    model = reference_model(kv_dtype, "float64")
    layout = layout_of(model.spec, block)
    cache = RankCache.allocate(layout, 0, num_blocks, fill=fill)
    comm = LocalComm()
    runner = StepRunner(model, PagedMemory(layout, cache, comm), comm, at_home(lambda _: 0, 1))
    return scripted(runner, script)


def differing(driven, layout, num_blocks, caches, reference):
    """(rank, component, field, token) of cells below the computed length that differ from the
    cache of a run in which every token was computed alone."""
    binding = Binding.of(layout, driven.tables, num_blocks, driven.computed)
    one = layout_of(layout.spec, layout.groups[0].paging.block_size)
    n = one.num_blocks_for(driven.total)["kv"]
    target = Binding.of(one, {"kv": list(range(n))}, {"kv": n}, driven.computed)
    return differing_cells(binding, caches, target, reference)
