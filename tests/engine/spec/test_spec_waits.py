"""The host waits for nothing inside a step: not for drafts, not for the target model, not for the
tokens; it reads once, at the end."""

import pytest
from no_waiting import WaitError, no_waiting
from spec_world import drive_all, layout_of, one_rank

from kvflow.engine.api import Request, SamplingParams


def requests(temperature, num_logprobs):
    """Contexts on both sides of the 16 positions that attention chooses."""
    sampling = SamplingParams(
        12, temperature, 0.9, seed=4, ignore_eos=True, num_logprobs=num_logprobs
    )
    return [Request(f"r{n}", [7 + 5 * i for i in range(n)], sampling) for n in (3, 14, 40)]


def started(kv_dtype, wanted, script=None):
    """A runner whose requests have had their prompt and one step more, and the next step's plan."""
    layout = layout_of(one_rank(kv_dtype, 4, {"kv": 1}).memory.layout.spec, 4)
    driven, num_blocks = drive_all(wanted, layout)
    runner = one_rank(kv_dtype, 4, num_blocks, script)
    for _ in range(2):
        items = [d.item(64, 3) for d in driven]
        emitted = runner.run(items)
        for d, item in zip(driven, items, strict=True):
            d.take(item, emitted[d.request.request_id])
    return runner, [d.item(64, k) for d, k in zip(driven, (3, 1, 4), strict=True)]


@pytest.mark.parametrize("kv_dtype", ["float64", "fp8"])
@pytest.mark.parametrize(("temperature", "num_logprobs"), [(0, None), (0.8, None), (0.8, 3)])
def test_a_step_waits_for_nothing(kv_dtype, temperature, num_logprobs):
    runner, items = started(kv_dtype, requests(temperature, num_logprobs))
    plan = runner.plan(items)
    assert [item.num_drafts for item in plan.items] == [3, 1, 4]
    with no_waiting():
        pending = runner.launch(plan)
    with pytest.raises(WaitError), no_waiting():
        pending.read()
    twin, again = started(kv_dtype, requests(temperature, num_logprobs))
    assert pending.read().sampled == twin.run(again)


def test_the_guard_sees_a_drafter_that_reads():
    def script(name, position, place):
        return 5

    runner, items = started("float64", requests(0, None), script)
    draft = runner.drafter.draft

    def read(*args):
        drafts = draft(*args)
        return {i: tokens + int(tokens.sum()) for i, tokens in drafts.items()}

    runner.drafter.draft = read
    with pytest.raises(WaitError), no_waiting():
        runner.launch(runner.plan(items))
