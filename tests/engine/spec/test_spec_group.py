"""Speculation on a group of ranks: requests at home on one rank each, the cache dealt by token."""

import itertools

import pytest
from engine_world import DTYPES, TINY, differing_cells, one_rank_tokens
from spec_world import VOCAB, at_home, drive_all, layout_of, one_rank, scripted

from kvflow.comm.threads import run_ranks
from kvflow.engine.access import PagedMemory
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.runner import StepRunner
from kvflow.layouts.layout import Binding
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.sharding import RoundRobin
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import RankCache

GREEDY = SamplingParams(10, 0, ignore_eos=True)
SEEDED = SamplingParams(7, 1.0, 0.9, seed=3, ignore_eos=True)
REQUESTS = (
    Request("a", [5, 9, 300, 4, 77, 21, 8, 150, 90, 33, 2, 61, 44, 17, 250, 3, 12], GREEDY),
    Request("b", [11, 12], SEEDED),
    Request("c", [200, 7, 45, 46, 47], GREEDY),
)


class Group:
    """Ranks with a model and a cache each; requests at home where `home` says."""

    def __init__(self, size, dcp, interleave, block, requests, script, home):
        self.models = [
            Glm.load(TINY, kv_dtype="float64", dtype=DTYPES["float64"], rank=r, size=size)
            for r in range(size)
        ]
        mesh = Mesh((Axis("pcp", size), Axis("dcp", dcp, over=("pcp",))))
        placement = mesh.place(RoundRobin(dcp, interleave), "dcp")
        self.layout = layout_of(self.models[0].spec, block, placement)
        self.requests = requests
        _, self.num_blocks = drive_all(requests, self.layout)
        self.caches = [RankCache.allocate(self.layout, r, self.num_blocks) for r in range(size)]
        self.script, self.home = script, home

    def run(self, num_drafts, traces=None):
        """Every rank drives the same requests; tokens go to all of them after a step, as the
        leader of a decode group tells its followers. Returns the ranks' requests and counters."""
        size = len(self.models)
        said = []

        def rank(comm):
            memory = PagedMemory(self.layout, self.caches[comm.rank], comm)
            runner = StepRunner(self.models[comm.rank], memory, comm, at_home(self.home, size))
            scripted(runner, self.script)
            driven, _ = drive_all(self.requests, self.layout)
            for step in range(100):
                live = [d for d in driven if not d.done]
                if not live:
                    break
                items = [
                    d.item(6, num_drafts[(step + k) % len(num_drafts)]) for k, d in enumerate(live)
                ]
                mine = runner.run(items)
                assert all(self.home(name) % size == comm.rank for name in mine)
                if len(said) <= step:
                    said.append({})
                said[step] |= mine
                comm.barrier()
                for d, item in zip(live, items, strict=True):
                    d.take(item, said[step].get(d.request.request_id, []))
                comm.barrier()
            return driven, runner.counters

        return run_ranks(size, rank, traces=traces)


def script_for(requests):
    """Two drafts in three come true."""
    truth = {r.request_id: [*r.prompt, *one_rank_tokens(r, "float64"), *[0] * 9] for r in requests}
    return lambda name, p, place: (truth[name][p] + (p % 3 == 2)) % VOCAB


@pytest.mark.parametrize(
    ("size", "dcp", "interleave", "block"), [(2, 1, 1, 4), (2, 2, 1, 4), (3, 3, 2, 5)]
)
def test_tokens_and_kv_of_a_group(size, dcp, interleave, block):
    """Parts of prompts, steps of one token and steps with drafts, alone and mixed (faults B03 and
    B06): every rank makes the same collectives."""
    homes = {"a": 1, "b": 0, "c": 1}
    group = Group(size, dcp, interleave, block, REQUESTS, script_for(REQUESTS), homes.get)
    traces = [[] for _ in range(size)]
    results = group.run([3, 1, 4, 0], traces)
    assert all(trace == traces[0] for trace in traces), "a rank made other collectives"
    for driven, _ in results:
        assert [d.generated for d in driven] == [one_rank_tokens(r, "float64") for r in REQUESTS]
    accepted = [sum(counters.accepted.values()) for _, counters in results]
    assert accepted[0] > 0
    assert accepted[1] > 0
    for d in results[0][0]:
        assert not differing_from_alone(group, d, block)


def differing_from_alone(group, driven, block):
    """Cells below the computed length that differ from a run of the request alone, a token each
    step, without drafts."""
    one = layout_of(group.layout.spec, block)
    (alone,), num_blocks = drive_all([driven.request], one)
    runner = one_rank("float64", block, num_blocks)
    while not alone.done:
        item = alone.item(1, 0)
        alone.take(item, runner.run([item]).get(alone.request.request_id, []))
    here = Binding.of(group.layout, driven.tables, group.num_blocks, driven.computed)
    there = Binding.of(one, alone.tables, num_blocks, driven.computed)
    return differing_cells(here, dict(enumerate(group.caches)), there, runner.memory.cache)


def test_accepting_none_one_and_two_in_turn():
    """faults B04: positions and slots follow the committed count, as without speculation."""
    (request,) = requests = (
        Request("a", REQUESTS[0].prompt[:5], SamplingParams(15, 0, ignore_eos=True)),
    )
    truth = [*request.prompt, *one_rank_tokens(request, "float64"), *[0] * 9]
    steps = itertools.count()
    turn = [0]

    def script(name, p, place):
        """The n-th step with drafts accepts n mod 3 of them."""
        if place == 0:
            turn[0] = next(steps) % 3
        return (truth[p] + (place >= turn[0])) % VOCAB

    group = Group(2, 2, 1, 4, requests, script, lambda name: 1)
    driven, counters = group.run([2])[1]
    assert counters.proposed == {0: 7, 1: 6}  # one of the seven steps has room for one only
    assert counters.accepted == {0: 4, 1: 2}
    assert [d.generated for d in driven] == [one_rank_tokens(request, "float64")]
    assert not differing_from_alone(group, driven[0], 4)
