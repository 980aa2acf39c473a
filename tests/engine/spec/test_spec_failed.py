"""Logits that are not finite end their own request; ranks agree, and the others go on exactly.

A token's embedding is made NaN: whatever comes to read a position with that token is spoilt, in
every layer, and no reference holds the token.
"""

import functools

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from engine_world import DTYPES, TINY, one_rank_tokens
from spec_world import Driven, at_home, layout_of, scripted

from kvflow.comm.threads import run_ranks
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.hisparse import HiSparseMemory, HiSparseSizes, hisparse_layout
from kvflow.engine.memory import balanced_deal
from kvflow.engine.runner import StepRunner
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.sharding import RoundRobin
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import RankCache

torch.set_num_threads(1)
BAD = 319
TOKENS = [t for t in np.random.default_rng(3).integers(2, 319, 200).tolist() if t != BAD]


@functools.lru_cache
def models(size, kv_dtype, bad):
    """By rank, with a token that is no numbers."""
    found = [
        Glm.load(TINY, kv_dtype=kv_dtype, dtype=DTYPES["float64"], rank=r, size=size)
        for r in range(size)
    ]
    spoilt = found[0].embedding.clone()
    spoilt[bad] = torch.nan
    return [evolve(model, embedding=spoilt) for model in found]


def request(name, prompt, num_tokens=4, **changes):
    sampling = SamplingParams(num_tokens, **({"temperature": 0, "ignore_eos": True} | changes))
    return Request(name, tuple(prompt), sampling)


GOOD = (
    request("long", TOKENS[:27], temperature=0.8, seed=5, num_logprobs=2),
    request("short", TOKENS[40:45]),
    request("middle", TOKENS[50:66]),
)
LATER = request("later", TOKENS[80:101])


@define(eq=False)
class Group:
    """`size` ranks over one context dealt to all of them, and blocks of 4 that requests hold."""

    size: int
    hisparse: bool = False
    options: AccessOptions = field(factory=AccessOptions)
    home: object = None
    script: object = None
    bad: int = BAD
    kv_dtype: str = "float64"
    traces: list = field(init=False)
    counters: list = field(init=False)

    def run(self, requests, num_drafts=0, then=()):
        """(tokens, failures) by request. When one has failed, requests of `then` take its blocks;
        `requests` are (request, how many steps later it comes)."""
        mesh = Mesh((Axis("all", self.size), Axis("dcp", self.size, over=("all",))))
        placement = mesh.place(RoundRobin(self.size), "dcp")
        ranks = models(self.size, self.kv_dtype, self.bad)
        if self.hisparse:
            layout = hisparse_layout(ranks[0].spec, placement, 4)
        else:
            layout = layout_of(ranks[0].spec, 4, placement)
        need = {g.name: layout.num_blocks_for(64)[g.name] for g in layout.groups}
        num_blocks = {name: n * len(requests) for name, n in need.items()}
        said = []
        self.traces = [[] for _ in range(self.size)]

        def tables(i):
            return {name: list(range(i * n, (i + 1) * n)) for name, n in need.items()}

        def rank(comm):
            if self.hisparse:
                sizes = HiSparseSizes.for_drafts(16, 4, 2)
                memory = HiSparseMemory.allocate(
                    layout, comm, num_blocks, sizes, options=self.options
                )
            else:
                cache = RankCache.allocate(layout, comm.rank, num_blocks)
                memory = PagedMemory(layout, cache, comm, self.options)
            deal = balanced_deal([(r,) for r in range(self.size)])
            if self.home is not None:
                deal = at_home(self.home, self.size)
            runner = StepRunner(ranks[comm.rank], memory, comm, deal)
            scripted(runner, self.script)
            driven = [Driven(r, tables(i)) for i, r in enumerate(requests)]
            waiting, failed = list(then), {}
            for step in range(60):
                live = [d for d in driven if not d.done and d.request.request_id not in failed]
                if not live:
                    break
                items = [d.item(11, num_drafts) for d in live]
                mine = runner.step(items)
                if len(said) <= step:
                    said.append([])
                said[step].append(mine)
                comm.barrier()
                sampled = {k: run for tokens in said[step] for k, run in tokens.sampled.items()}
                ended = {k: why for tokens in said[step] for k, why in tokens.failed.items()}
                comm.barrier()
                for d, item in zip(live, items, strict=True):
                    name = d.request.request_id
                    d.take(item, sampled.get(name, []))
                    if name in ended or d.done:
                        runner.forget(name)
                    if name in ended:
                        failed[name] = ended[name]
                        driven += [Driven(r, d.tables) for r in waiting]
                        waiting = []
            return {d.request.request_id: d.generated for d in driven}, failed, runner.counters

        results = run_ranks(self.size, rank, traces=self.traces)
        assert all(result[:2] == results[0][:2] for result in results)
        self.counters = [result[2] for result in results]
        return results[0][:2]


def wanted(requests, kv_dtype="float64"):
    return {r.request_id: one_rank_tokens(r, kv_dtype) for r in requests}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


WAYS = {
    "alone": {"size": 1},
    "whole": {"size": 2, "options": AccessOptions("whole", "keys")},
    "union": {"size": 2, "options": AccessOptions("union", "queries")},
    "queries": {"size": 2, "options": AccessOptions("queries", "queries"), "home": len},
    "fp8": {"size": 2, "options": AccessOptions("queries", "keys"), "kv_dtype": "fp8"},
    "on host": {"size": 1, "hisparse": True},
    "on two hosts": {"size": 2, "hisparse": True, "home": len},
}
QUICK = {("union", 0), ("queries", 0)}


@pytest.mark.parametrize(
    ("way", "at"),
    [(w, at) if (w, at) in QUICK else slow(w, at) for w in WAYS for at in (0, 20)],
)
def test_a_spoilt_request_ends_alone(way, at):
    """Its prompt of 30 holds the token at one position; it is first in every batch. The request
    that takes its blocks, in which its rows still lie, reads none of them."""
    prompt = [*TOKENS[130 : 130 + at], BAD, *TOKENS[130 + at : 159]]
    group = Group(**WAYS[way])
    bad = request("bad", prompt, num_logprobs=3)
    tokens, failed = group.run((bad, *GOOD), num_drafts=2, then=(LATER,))
    assert failed == {"bad": "the logits at position 29 are not finite"}
    assert tokens == {"bad": []} | wanted((*GOOD, LATER), group.kv_dtype)
    assert all(trace == group.traces[0] for trace in group.traces)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tokens_before_the_failure_count(num_drafts):
    """What a request samples third is no numbers as an input: it comes out, and no fourth. With
    drafts that all come true the failure is in the middle of a step's run."""
    one = request("x", TOKENS[10:21], 8)
    truth = one_rank_tokens(one, "float64")
    bad = truth[2]
    assert bad not in [*one.prompt, *truth[:2]]
    told = [*one.prompt, *truth, *[0] * 4]
    group = Group(1, script=lambda name, p, place: told[p], bad=bad)
    tokens, failed = group.run((one,), num_drafts)
    assert tokens == {"x": truth[:3]}
    assert failed == {"x": "the logits at position 13 are not finite"}
    assert group.counters[0].emitted == 3


def test_a_draft_that_is_no_numbers_is_a_wrong_draft():
    """Logits behind a draft that did not come true count for nothing."""
    group = Group(1, script=lambda name, p, place: BAD)
    tokens, failed = group.run(GOOD[:2], num_drafts=2)
    assert (tokens, failed) == (wanted(GOOD[:2]), {})
