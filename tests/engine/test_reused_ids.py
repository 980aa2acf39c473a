"""A client may use an id again when its stream has ended, whatever is still under way inside."""

import asyncio

from engine_world import Ranks, collect, config, greedy, one_rank_tokens, request, until, world
from test_decode import Gate

from kvflow.engine.api import Unavailable
from kvflow.engine.deployment import Deployment
from kvflow.engine.messages import StepDone

A, B, C = (tuple((k * j + j * j) % 320 for j in range(30)) for k in (3, 5, 7))


def test_fault_d14_an_id_used_again_while_its_first_transfer_runs():
    """The first request of the id is cancelled while its blocks are read; the second's blocks are
    its own, and so are its acknowledgements. A third prompt presses for both."""
    gate = Gate(3)

    async def run():
        launch = config(
            decode_block=4, prefill_block=4, prefill_kv_tokens=80, max_model_len=48,
            kv_dtype="float64", dtype="float64",
        )  # fmt: skip
        async with world(launch, Ranks(gate)) as deployment:
            stream = deployment.generate(request("x", A, greedy(4)))
            await anext(stream)
            await asyncio.to_thread(gate.reached.wait, 10)
            await stream.aclose()
            pinned = deployment.prefill.pools["kv"].count("pinned")
            second = asyncio.ensure_future(collect(deployment, request("x", B, greedy(4))))
            third = asyncio.ensure_future(collect(deployment, request("y", C, greedy(4))))
            await asyncio.sleep(0.3)
            assert deployment.prefill.pools["kv"].count("pinned") >= pinned > 0
            gate.hold_at = -1
            gate.open.set()
            outputs = await second, await third
            await until(lambda: deployment.gauges["decode-0"]["used_blocks.kv"] == 0)
            pool = deployment.prefill.pools["kv"]
            await until(lambda: pool.num_available == pool.num_blocks)
            deployment.prefill.audit()
        return outputs

    x, y = asyncio.run(run())
    assert {o.request_id for o in x} == {"x"}
    for prompt, outputs in ((B, x), (C, y)):
        alone = one_rank_tokens(request("alone", prompt, greedy(4)), "float64")
        assert [o.token for o in outputs] == alone


def test_a_rank_that_fails_as_a_prefill_ends_leaves_nobody_waiting(monkeypatch):
    """The step's last answer and the failure arrive before the request's own coroutine resumes."""
    handle = Deployment._handle

    def both(deployment, name, message):
        handle(deployment, name, message)
        if isinstance(message, StepDone):
            deployment.fail("lost")

    async def run():
        monkeypatch.setattr(Deployment, "_handle", both)
        async with world(config()) as deployment:
            try:
                await asyncio.wait_for(collect(deployment, request("a", A, greedy(4))), 10)
            except Unavailable as error:
                return str(error)

    assert asyncio.run(run()) == "lost"
