"""Faults of tiers, each by name: order with compute, identity after reading, what is not kept."""

import asyncio

import pytest
from symbolic_ranks import SymbolicRanks, sampled_for

from kvflow.engine.messages import StepDone
from kvflow.engine.sampling import Sampled


def scenario(body):
    """Runs an async test."""

    def run(*args, **kwargs):
        return asyncio.run(asyncio.wait_for(body(*args, **kwargs), 20))

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    return run


@scenario
async def test_fault_e01_e03_a_unit_is_found_only_when_every_rank_has_written_its_rows():
    ranks = SymbolicRanks(4, 4, block=2, num_blocks=8, host_units=20)
    task = ranks.submit("a", range(20))
    await ranks.settle()
    step = ranks.steps[-1]
    assert [r.stop for r in step.items[0].store] == [20]
    ranks.run_step(step)
    chain = ranks.engine._held["a"].kv.chain
    sampled = {"a": Sampled(sampled_for(range(20)), 20)}
    for rank in range(4):
        assert all(ranks.host.find(chain, k, None) is None for k in range(10))
        assert len(ranks.engine.kv.cache.index) == 0
        ranks.engine.on_step_done(StepDone(1, rank, sampled if rank == 2 else {}, 0.0))
    assert all(ranks.host.find(chain, k, None) is not None for k in range(10))
    await task
    await ranks.close()


@scenario
async def test_fault_e02_copies_loads_and_computed_rows_share_no_position():
    """A prompt that begins with shared entries, copied rows, loaded rows and computed ones."""
    ranks = SymbolicRanks(4, 4, 8, block=4, num_blocks=5, host_units=40)
    prompt = tuple(range(60))
    await ranks.serve("a", prompt)
    await ranks.serve("b", range(100, 124))  # takes the last entry of "a"
    task = ranks.submit("c", (*prompt[:57], 7, 8, 9))
    await ranks.settle()
    item = ranks.steps[-1].items[0]
    copied = [t for start, stop in item.copy.spans["kv"] for t in range(start, stop)]
    loaded = list(range(item.load.start, item.load.stop))
    computed = list(range(item.start, item.stop))
    assert copied == list(range(32, 36))
    assert loaded == list(range(36, 56))
    assert computed == list(range(56, 60))
    ranks.answer()
    await task
    ranks.engine.release("c")
    ranks.assert_idle()
    await ranks.close()


@scenario
async def test_fault_e04_blocks_of_a_running_step_are_not_given_away():
    ranks = SymbolicRanks(block=4, num_blocks=3, host_units=20, max_num_batched_tokens=8)
    await ranks.serve("a", range(12))
    first = ranks.submit("b", range(50, 62))
    await ranks.settle()
    held = set(ranks.engine._held["b"].kv.tables["kv"])
    ranks.engine.release("b")  # the step still writes them
    second = ranks.submit("c", range(12))
    await ranks.settle()
    assert ranks.engine.num_waiting == 1
    ranks.answer()
    await ranks.settle()
    item = ranks.steps[-1].items[0]
    assert item.request_id == "c"
    assert item.load.stop == 8  # from the host, into blocks that "b" wrote until a moment ago
    assert set(item.tables["kv"]) == held
    ranks.answer()
    await second
    assert first.cancelled()
    await ranks.close()


@pytest.mark.parametrize("again", [False, True])
def test_fault_h08_rows_of_a_unit_that_was_reused_meanwhile_are_not_served(again):
    """The label says something else after the reading: the request is computed anew, and nothing
    that was computed behind the foreign rows is found later."""

    @scenario
    async def run():
        ranks = SymbolicRanks(2, 2, block=2, num_blocks=12, host_units=40, max_num_batched_tokens=9)
        prompt = range(30)
        await ranks.serve("a", prompt)
        ranks.engine.kv.cache.index.clear()
        task = ranks.submit("b", prompt)
        await ranks.settle()
        step = ranks.steps[-1]
        load = step.items[0].load
        assert load.stop == 28
        for unit in load.units[3:5]:
            ranks.host.memory.set_label(unit, b"y" * 32)
            ranks._words(unit)[:] = 0
        assert ranks.run_step(step) == ["b"]
        ranks.answer()
        while not task.done():
            if again and ranks.is_running:
                ranks.engine.release("b")
            ranks.answer()
            await ranks.settle()
        assert ranks.engine.kv.num_refused_loads == 1
        if not again:
            assert ranks.told["b"] == 0
            assert ranks.engine.kv.num_reused["host"] == 0
            ranks.engine.release("b")
        ranks.assert_idle()
        assert await ranks.serve("c", prompt) == (0 if again else 28) or again
        await ranks.close()

    run()


@scenario
async def test_a_refused_load_gives_up_no_block_of_others():
    """Two requests in one step, one of which has read foreign rows."""
    ranks = SymbolicRanks(block=4, num_blocks=20, host_units=40)
    await ranks.serve("a", range(20))
    ranks.engine.kv.cache.index.clear()
    other = ranks.submit("x", range(200, 230))
    task = ranks.submit("b", range(20))
    await ranks.settle()
    while not ranks.steps[-1].items[-1].load:
        ranks.answer()
        await ranks.settle()
    for unit in ranks.steps[-1].items[-1].load.units:
        ranks.host.memory.set_label(unit, None)
    while not (task.done() and other.done()):
        ranks.answer()
        await ranks.settle()
    assert (await other).token == sampled_for(range(200, 230))
    for name in ("x", "b"):
        ranks.engine.release(name)
    ranks.assert_idle()
    await ranks.close()


@scenario
async def test_fault_h01_rows_of_an_aborted_request_are_known_as_far_as_they_were_computed():
    """Aborted behind its first chunk; its blocks go to another request; the prefix comes again."""
    ranks = SymbolicRanks(2, 2, block=2, num_blocks=10, host_units=40, max_num_batched_tokens=7)
    task = ranks.submit("a", range(40))
    await ranks.settle()
    ranks.engine.release("a")
    ranks.answer()
    await ranks.settle()
    assert task.cancelled()
    assert len(ranks.engine.kv.cache.index) == 3  # 7 tokens
    assert await ranks.serve("b", range(100, 140)) == 0
    assert await ranks.serve("c", range(40)) == 6  # from the host: "b" took every block
    ranks.assert_idle()
    await ranks.close()


@scenario
async def test_a_hit_that_is_cut_for_want_of_room_goes_on_from_the_host():
    """Three blocks of 8, all needed: there is no room for the source of a copy, so the 4 rows of an
    open entry are loaded with what follows them; and where no unit begins there, computed."""
    for unit, reused in ((4, {"device": 8, "host": 12}), (3, {"device": 8})):
        ranks = SymbolicRanks(block=8, unit=unit, num_blocks=3, host_units=40)
        await ranks.serve("a", range(23))
        ranks.engine.kv.cache.index.clear()
        await ranks.serve("b", range(13))
        before = ranks.engine.kv.num_reused.copy()
        assert await ranks.serve("c", range(23)) == sum(reused.values())
        assert dict(ranks.engine.kv.num_reused - before) == reused
        await ranks.close()
