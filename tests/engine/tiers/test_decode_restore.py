"""Decode engines that take from the host tier what they would compute."""

import asyncio
import contextlib
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve
from engine_world import collect, config, greedy, one_rank_tokens, request, until, world
from prefix_world import reference_rows
from test_tier_engine import host_nbytes

from kvflow.engine.messages import RequestFailed
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.tiers.memory import UnitMemory
from kvflow.engine.tiers.rows import UnitPort
from kvflow.errors import KvflowError, TransferError
from kvflow.kernels.rows import gather_rows
from kvflow.layouts.layout import Binding
from kvflow.router.config import Load

BLOCK = 4
NO_ROOM = Load(1 << 41)
SHAPES = {
    "paged": {},
    "HiSparse": {"hisparse": True},
    "DCP": {"decode_dcp": 2, "decode_interleave": 3},
    "DCP and HiSparse": {"decode_dcp": 2, "hisparse": True, "decode_block": 3},
    "TP and drafts": {"decode_tp": 2, "num_drafts": 2},
}


def launch(**changes):
    """PCP 4 x DCP 4 before a decode engine that holds little more than one request."""
    sizes = {"pcp": 4, "dcp": 4, "interleave": 2, "prefill_block": BLOCK, "decode_block": 5}
    sizes |= {"max_model_len": 64, "prefill_kv_tokens": 64, "decode_kv_tokens": 64}
    values = {"kv_dtype": "fp8", "dtype": "float64", "local_prefill_tokens": 9}
    values["prefix"] = PrefixConfig(block_size=BLOCK, host_nbytes=host_nbytes("fp8", BLOCK, 40))
    return config(**(sizes | values | changes))


def words(seed, count):
    return tuple(np.random.default_rng(seed).integers(0, 320, count).tolist())


@contextlib.contextmanager
def checked(one, kv_dtype="fp8"):
    """Every row that a decode rank restores meanwhile is compared with the one that one rank alone
    computes for `one`; yields the positions that each rank restored, and those that differed."""
    reference = reference_rows(one, kv_dtype)
    restored, wrong = [], []
    take = UnitPort.take_proven

    def watched(port, rows, tables):
        proven = take(port, rows, tables)
        if threading.current_thread().name.startswith("kvflow-restore"):
            restored.append((port.cache.rank, rows.start, rows.stop))
            bound = Binding.of(port.layout, tables, port.num_blocks, rows.stop)
            for name in port.layout.spec.names:
                group, rank = port.layout.group_of(name).name, port.cache.rank
                slots = torch.from_numpy(bound.slots(group, np.arange(rows.stop), rank))
                mine = np.flatnonzero(slots[rows.start :] >= 0) + rows.start
                got = gather_rows(port.cache.pages[name], slots[mine])
                wrong.extend(mine[(got != reference[name][mine]).any(1)].tolist())
        return proven

    with mock.patch.object(UnitPort, "take_proven", watched):
        yield restored, wrong


async def idle(deployment):
    """Everything is given back, on both sides and in the tier."""
    await until(lambda: not deployment.journeys.live)
    for engine in deployment.prefills.values():
        await until(lambda e=engine: not e.tiers.num_under_way)
        engine.audit()
        assert engine.tiers.host.counts()["pinned"] == 0


async def asked(deployment, one):
    """The outputs of a request, which are those of one rank."""
    outputs = await collect(deployment, one)
    assert [o.token for o in outputs] == one_rank_tokens(one, "fp8")
    await idle(deployment)
    return outputs


def counters(deployment):
    return deployment.counters["decode-0"]


def _shapes():
    """All; those that every run serves are the least and the most."""
    always = "paged", "DCP and HiSparse"
    return [
        pytest.param(shape, id=name, marks=[] if name in always else pytest.mark.slow)
        for name, shape in SHAPES.items()
    ]


@pytest.mark.parametrize("shape", _shapes())
def test_a_prompt_computed_here_is_restored_from_what_pcp_x_dcp_has_stored(shape):
    """The decode engine had 44 tokens and gave them away but for a few; 40 come back, the rest is
    computed."""
    first, other = request("a", words(1, 43), greedy(6)), request("b", words(2, 50), greedy(9))
    again = request("c", (*words(1, 43)[:41], *words(3, 4)), greedy(6))

    async def run():
        async with world(launch(**shape)) as deployment:
            await asked(deployment, first)
            await asked(deployment, other)
            before = dict(counters(deployment))
            assert before["restored_host_tokens"] == before["local_prefills"] == 0
            deployment.routing.router.on_load("prefill-0", NO_ROOM)
            with checked(again) as (restored, wrong):
                outputs = await asked(deployment, again)
            now = counters(deployment)
            assert now["local_prefills"] == 1
            assert wrong == []
            held = now["reused_tokens"] - before["reused_tokens"]
            size = shape.get("decode_dcp", shape.get("decode_tp", 1))
            assert sorted(restored) == [(rank, held, 40) for rank in range(size)]
            assert now["restored_host_tokens"] == 40 - held > 0
            assert outputs[0].cached_tokens == 40

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_preempted_request_finds_its_prompt_in_the_tier(shape):
    """Two requests, of which one comes to need nearly all blocks; the other keeps a part of its
    first unit."""
    together = [request(f"r{i}", words(i, 24), greedy(40)) for i in (1, 2)]
    sizes = {"decode_kv_tokens": 70, "prefill_kv_tokens": 128, "loans": False}

    async def run():
        async with world(launch(**(shape | sizes))) as deployment:
            got = await asyncio.gather(*(collect(deployment, one) for one in together))
            await idle(deployment)
            return [[o.token for o in outputs] for outputs in got], dict(counters(deployment))

    got, now = asyncio.run(run())
    assert got == [one_rank_tokens(one, "fp8") for one in together]
    assert now["preemptions"] > 0
    assert now["restored_host_tokens"] > 0


def test_what_only_files_know_comes_by_way_of_the_tier(tmp_path):
    """After a restart a decode engine of another layout takes a prompt from the disk."""
    one = request("a", words(1, 41), greedy(4))
    prefix = PrefixConfig(True, BLOCK, host_nbytes("fp8", BLOCK, 40), tmp_path, 1 << 24)

    async def run():
        async with world(launch(prefix=prefix)) as deployment:
            await asked(deployment, one)
        later = launch(prefix=prefix, pcp=1, dcp=1, interleave=1, **SHAPES["DCP and HiSparse"])
        async with world(later) as deployment:
            deployment.routing.router.on_load("prefill-0", NO_ROOM)
            with checked(one) as (restored, wrong):
                outputs = await asked(deployment, one)
            assert sorted(restored) == [(0, 0, 40), (1, 0, 40)]
            assert wrong == []
            assert outputs[0].cached_tokens == 40
            assert counters(deployment)["restored_disk_tokens"] == 40
            assert counters(deployment)["restored_host_tokens"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("num_blind", [1, 2])
def test_ranks_that_may_not_map_a_tier_go_without_it(num_blind, monkeypatch, caplog):
    """Of a group of two, one or both: what the other restores counts for nothing; nobody asks."""
    attach, blind = UnitMemory.attach.__func__, []

    def denied(cls, name, *args, writable=True):
        if not writable and len(blind) < num_blind:
            blind.append(name)
            raise TransferError(f"the host tier {name} cannot be opened: denied")
        return attach(cls, name, *args, writable=writable)

    monkeypatch.setattr(UnitMemory, "attach", classmethod(denied))
    first, other = request("a", words(1, 43), greedy(6)), request("b", words(2, 50), greedy(9))
    again = request("c", (*words(1, 43)[:41], *words(3, 4)), greedy(6))

    async def run():
        async with world(launch(decode_dcp=2, decode_interleave=3)) as deployment:
            await asked(deployment, first)
            await asked(deployment, other)
            deployment.routing.router.on_load("prefill-0", NO_ROOM)
            await asked(deployment, again)
            assert await deployment.healthy()
            now = counters(deployment)
            assert now["local_prefills"] == 1
            assert now["restored_host_tokens"] == 0

    asyncio.run(run())
    assert len(blind) == num_blind
    assert caplog.text.count("restores nothing from a host tier") == num_blind


def test_units_of_which_a_request_fails_are_forgotten():
    """Rows in the tier turn out to be no numbers: the prompt is not restored a second time."""
    first, other = request("a", words(1, 43), greedy(6)), request("b", words(2, 50), greedy(9))
    bad, again = (request(name, (*words(1, 43)[:41], *words(3, 4)), greedy(6)) for name in "cd")

    async def run():
        async with world(launch()) as deployment:
            await asked(deployment, first)
            await asked(deployment, other)
            deployment.prefill.tiers.host.memory.units.fill_(255)
            deployment.routing.router.on_load("prefill-0", NO_ROOM)
            with pytest.raises(KvflowError, match="not finite"):
                await collect(deployment, bad)
            await idle(deployment)
            assert counters(deployment)["restored_host_tokens"] > 0
            engine = deployment.prefill
            assert engine.tiers.match(engine.kv.of(bad).chain, 0, 40) is None
            await asked(deployment, again)

    asyncio.run(run())


def test_what_spoilt_a_request_whose_client_has_left_is_forgotten():
    """Those of its own tokens, of which the prompt is a part only."""
    first = request("a", words(1, 43), greedy(6))
    salted = evolve(request("b", words(2, 43), greedy(6)), cache_salt="x")
    failed = RequestFailed("gone", "why", [*first.prompt[:41], *words(3, 4)])

    async def run():
        async with world(launch()) as deployment:
            kv, tiers = deployment.prefill.kv, deployment.prefill.tiers
            await asked(deployment, first)
            await asked(deployment, salted)
            deployment._handle("decode-0", failed)
            assert tiers.match(kv.of(first).chain, 0, 40) is None
            assert tiers.match(kv.of(salted).chain, 0, 40) is not None
            deployment._handle("decode-0", RequestFailed("gone", "why", list(salted.prompt), "x"))
            assert tiers.match(kv.of(salted).chain, 0, 40) is None

    asyncio.run(run())
