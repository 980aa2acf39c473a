"""Any schedule over any layout reads the right rows: hits, copies, shares, evictions, host units,
cancels, preemptions and resets, with rows as words."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_ranks import SymbolicRanks

from kvflow.transfers.executors.plain_files import PlainFiles

EXAMPLES = max(60, settings.default.max_examples)


@st.composite
def worlds(draw):
    pcp = draw(st.sampled_from([1, 2, 4]))
    return {
        "pcp": pcp,
        "dcp": draw(st.sampled_from([d for d in (1, 2, 4) if pcp % d == 0])),
        "interleave": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "block": draw(st.integers(1, 5)),
        "num_blocks": draw(st.sampled_from([24, 60])),
        "mtp": draw(st.booleans()),
        "unit": draw(st.sampled_from([1, 2, 3, 4, 7])),
        "host_units": (host := draw(st.sampled_from([0, 2, 8, 60]))),
        "disk": host > 0 and draw(st.booleans()),
        "max_num_batched_tokens": draw(st.sampled_from([3, 10, 64])),
    }


@st.composite
def scripts(draw):
    """What happens, in order: requests of few different beginnings, and ends of all kinds."""
    stems = [draw(st.lists(st.integers(0, 2), min_size=24, max_size=24)) for _ in range(2)]
    script = []
    for i in range(draw(st.integers(2, 10))):
        stem, keep = draw(st.sampled_from(stems)), draw(st.integers(1, 24))
        tail = draw(st.lists(st.integers(0, 2), max_size=min(4, 24 - keep)))
        salt = draw(st.sampled_from([None, None, None, "x"]))
        script.append(("submit", f"r{i}", tuple(stem[:keep] + tail), salt))
        turns = st.sampled_from([("step",), ("step",), ("step",), ("end",)])
        script += draw(st.lists(turns, max_size=3))
        if draw(st.integers(0, 4)) == 0:
            what = draw(st.sampled_from(["release", "preempt", "reset", "spoil"]))
            script.append((what, f"r{draw(st.integers(0, i))}"))
    return script


def _spoil(ranks):
    """Somebody writes into the host tier's memory: every label is wrong from now on."""
    tiers = ranks.engine.tiers
    if tiers is not None:
        for unit in list(tiers.host._entries):
            tiers.host.memory.labels[unit] += 1


async def run_script(world, script, change=lambda ranks: None):
    """Carries a script out on an engine that was changed first; returns its reuse by tier."""
    with tempfile.TemporaryDirectory() as name:
        disk = {"directory": Path(name), "files": PlainFiles()} if world["disk"] else {}
        sizes = {key: value for key, value in world.items() if key != "disk"}
        ranks = SymbolicRanks(**sizes, **disk)
        change(ranks)
        return await _carry_out(ranks, script)


async def _carry_out(ranks, script):
    tasks = {}
    spoiled = False

    def end_all():
        for name, task in tasks.items():
            if task.done() and not task.cancelled() and name in ranks.engine._held:
                ranks.engine.source(name)
                ranks.engine.acknowledge(name, list(range(ranks.shape[0])))

    for what, *how in [*script, *[("step",), ("end",)] * 400]:
        if what == "submit":
            tasks[how[0]] = ranks.submit(*how)
        elif what == "step" and ranks.is_running:
            ranks.answer()
        elif what == "end":
            end_all()
        elif what == "release":
            ranks.engine.release(how[0])
        elif what == "preempt":
            ranks.engine.preempt(how[0])
        elif what == "reset":
            ranks.engine.reset_prefix_cache()
        elif what == "spoil" and not spoiled:
            spoiled = True
            _spoil(ranks)
        await ranks.settle()
        if not spoiled:
            ranks.engine.audit()
        if (
            what == "end"
            and not ranks.engine._held
            and len(tasks) == sum(1 for one in script if one[0] == "submit")
        ):
            break
    assert all(task.done() for task in tasks.values()), "a request never ended"
    if not spoiled:
        ranks.assert_idle()
    await ranks.close()
    reused = ranks.engine.kv.num_reused
    assert sum(reused.values()) == sum(ranks.told.values())
    return reused


@given(worlds(), scripts())
@settings(max_examples=EXAMPLES)
def test_any_schedule_reads_the_right_rows(world, script):
    asyncio.run(run_script(world, script))


def test_fault_k13_reused_tokens_are_those_that_callers_are_told():
    """Hits on the device, on the host, on both, partly and not at all."""

    async def run():
        ranks, told = SymbolicRanks(2, 2, block=2, num_blocks=12, host_units=40), Counter()
        long, other = list(range(40)), list(range(100, 140))
        for i, prompt in enumerate([long, long, other, long, long[:9], [7], other[:30], long]):
            told["all"] += await ranks.serve(f"r{i}", prompt)
        await ranks.close()
        return ranks.engine.kv.num_reused, told["all"]

    reused, told = asyncio.run(run())
    assert sum(reused.values()) == told > 0
    assert reused["device"] > 0
    assert reused["host"] > 0
