"""What engines take from each other in whole deployments, by the bytes and tokens they count."""

import asyncio

import pytest
from attrs import evolve
from engine_world import (
    Ranks,
    assert_idle,
    collect,
    config,
    greedy,
    one_rank_tokens,
    request,
    serve_all,
    until,
    world,
)
from test_deployment import Tampering

from kvflow.errors import KvflowError
from kvflow.router.config import Load
from kvflow.transfers.planner import plan_transfer

IDS = tuple((11 * j + j * j) % 320 for j in range(60))


def launch(**changes):
    blocks = {"prefill_block": 4, "decode_block": 4}
    exact = {"kv_dtype": "float64", "dtype": "float64"}
    return config(**(blocks | exact | changes))


def num_blocks(config):
    return config.decode_kv_tokens // config.decode_block


async def right(deployment, one):
    """Serves a request; its outputs."""
    outputs = await collect(deployment, one)
    assert [o.token for o in outputs] == one_rank_tokens(one, "float64")
    return outputs


async def served(deployment, one, decode_blocks=128):
    """(tokens, tokens reused, report of the transfer) of a request that nothing disturbs."""
    outputs = await right(deployment, one)
    (report,) = [o.transfer for o in outputs if o.transfer is not None]
    await until(lambda: not deployment.journeys.live)
    await assert_idle(deployment, decode_blocks)
    return [o.token for o in outputs], outputs[0].cached_tokens, report


def nbytes(deployment, start, stop, source="prefill-0", target="decode-0"):
    layouts = deployment.journeys.lenders.layouts
    return plan_transfer(layouts[source], layouts[target], (start, stop)).nbytes


def reused(deployment):
    return {tier: n for tier, n in deployment.prefill.kv.num_reused.items() if n}


@pytest.mark.parametrize("shape", [{}, {"pcp": 2, "dcp": 2, "decode_dcp": 2}])
def test_k05_k07_a_prefix_that_both_engines_hold_counts_once_and_moves_not_at_all(shape):
    """Prompts of 20, equal in 17: 16 are warm on both."""
    first, second = request("a", IDS[:20]), request("b", (*IDS[:17], 1, 2, 3))

    async def run():
        async with world(launch(**shape)) as deployment:
            decode_blocks = 128 // shape.get("decode_dcp", 1)
            _, cached, report = await served(deployment, first, decode_blocks)
            assert (cached, report["num_held"]) == (0, 0)
            assert report["nbytes"] == nbytes(deployment, 0, 20)
            _, cached, report = await served(deployment, second, decode_blocks)
            assert cached == 16
            assert report["num_held"] == 16
            assert report["nbytes"] == nbytes(deployment, 16, 20)
            assert report["engine"] == "prefill-0"
            assert reused(deployment) == {"device": 16}
            counters = deployment.counters["decode-0"]
            assert counters["transfer_nbytes"] == nbytes(deployment, 0, 20) + report["nbytes"]
            assert (counters["reused_tokens"], counters["transfers"]) == (16, 2)

    asyncio.run(run())


def test_a_next_turn_reuses_what_was_generated():
    """33 tokens are there after the first turn; the prefill engine has computed 24 of them, and
    takes 8 from the decode engine, which then takes only what is new."""

    async def run():
        async with world(launch()) as deployment:
            tokens, _, _ = await served(deployment, request("a", IDS[:24], greedy(9)))
            turn = (*IDS[:24], *tokens, *IDS[24:31])
            assert len(turn) == 40
            _, cached, report = await served(deployment, request("b", turn))
            assert cached == 32
            assert reused(deployment) == {"device": 24, "peer": 8}
            assert report["num_held"] == 32
            assert report["nbytes"] == nbytes(deployment, 32, 40)
            assert deployment.prefill.steps.num_failed_loans == 0
            # what was borrowed is the prefill engine's own from now on
            _, cached, _ = await served(deployment, request("c", (*turn[:33], 5)))
            assert cached == 32
            assert reused(deployment) == {"device": 24 + 32, "peer": 8}

    asyncio.run(run())


def test_a_decode_engine_takes_what_its_sibling_holds_from_there():
    """The next turn goes to the other decode engine: of its 40 tokens 32 come from the sibling,
    8 from the prefill engine; all bytes are counted, and none twice."""

    async def run():
        ranks = Ranks()
        async with world(launch(decode_ranks=2), ranks) as deployment:
            tokens, _, _ = await served(deployment, request("a", IDS[:24], greedy(9)))
            (lender,) = [d for d in ("decode-0", "decode-1") if deployment.counters[d]["transfers"]]
            (other,) = {"decode-0", "decode-1"} - {lender}
            deployment.routing.router.on_load(lender, Load(1 << 41))  # no room
            before, ranks.pulls[:] = dict(deployment.counters[lender]), []
            turn = (*IDS[:24], *tokens, *IDS[24:31])
            _, cached, report = await served(deployment, request("b", turn))
            assert cached == 32
            counters = deployment.counters[other]
            sibling = nbytes(deployment, 0, 32, lender, other)
            rest = nbytes(deployment, 32, 40, "prefill-0", other)
            assert report["nbytes"] == rest
            assert (report["engine"], report["num_held"]) == ("prefill-0", 0)
            assert counters["transfer_nbytes"] == sibling + rest
            assert counters["transfers"] == 2
            assert deployment.counters[lender]["transfers"] == before["transfers"]
            moved = sorted(bound.plan.tokens for bound in ranks.pulls)
            assert (0, 32) in moved  # sibling to sibling
            assert (24, 32) in moved  # sibling to prefill
            for name in (lender, other):
                assert deployment.gauges[name]["pinned_blocks.kv"] == 0

    asyncio.run(run())


def test_a_first_token_that_ends_its_request_leaves_the_rest_where_it_is():
    """The decode engine has read ahead; the last chunk never moves, and all blocks come back."""
    one = launch(max_num_batched_tokens=8)

    async def run():
        ranks = Ranks()
        async with world(one, ranks) as deployment:
            await right(deployment, request("a", IDS[:40], greedy(1)))
            await until(lambda: not deployment.journeys.live)
            await assert_idle(deployment, num_blocks(one))
            stops = [bound.plan.tokens[1] for bound in ranks.pulls if not bound.plan.absent]
            assert all(stop <= 40 for stop in stops)
            counters = deployment.counters["decode-0"]
            assert (counters["transfers"], counters["transfer_failures"]) == (0, 0)
            assert deployment.num_requests["finished"] == 1
            await right(deployment, request("b", IDS[:40]))

    asyncio.run(run())


def test_a_decode_engine_that_refuses_ends_the_prefill_that_still_runs():
    """A digest that is not the decode engine's own, on the way of a prompt of 7 steps."""
    one = launch(max_num_batched_tokens=8)

    async def run():
        async with world(one) as deployment:
            honest = deployment.hub
            deployment.journeys.hub = Tampering(honest)
            with pytest.raises(KvflowError, match="the sender ffff"):
                await collect(deployment, request("a", IDS[:56]))
            deployment.journeys.hub = honest
            await assert_idle(deployment, num_blocks(one))
            assert deployment.num_requests == {"finished": 0, "aborted": 0, "failed": 1}
            assert await deployment.healthy()
            await right(deployment, request("b", IDS[:20]))

    asyncio.run(run())


@pytest.mark.parametrize("prefills", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_prefix_that_many_ask_for_at_once(prefills):
    """10 prompts behind one prefix of 40, in chunks, some of which leave; twice."""
    one = launch(prefill_engines=prefills, decode_ranks=2, max_num_batched_tokens=16)
    asked = [request(f"r{i}", (*IDS[:40], i, i + 1), greedy(3)) for i in range(10)]

    async def run():
        async with world(one) as deployment:
            for again in range(2):
                now = [evolve(r, request_id=f"{r.request_id}.{again}") for r in asked]
                left = [asyncio.create_task(collect(deployment, r)) for r in now[:2]]
                tokens = asyncio.create_task(serve_all(deployment, now[2:]))
                await until(lambda: any(e.num_running for e in deployment.prefills.values()))
                for task in left:
                    task.cancel()
                for r in now[2:]:
                    assert (await tokens)[r.request_id] == one_rank_tokens(r, "float64")
                await asyncio.gather(*left, return_exceptions=True)
                await assert_idle(deployment, num_blocks(one))
            assert deployment.num_requests["failed"] == 0
            held = sum(e.kv.num_reused["device"] for e in deployment.prefills.values())
            assert held >= 8 * 40  # the second time at least

    asyncio.run(run())


def test_after_a_reset_no_next_turn_finds_what_was_there_before():
    """Neither of a request that is over, nor of one that generates meanwhile: a decode engine
    holds nothing of them for its own, and lends nothing."""

    async def run():
        async with world(launch()) as deployment:
            over = request("over", IDS[:24], greedy(9))
            runs = request("runs", (7, *IDS[:20]), greedy(24))
            await served(deployment, over)
            got = 0
            async for _ in deployment.generate(runs):
                got += 1
                if got == 3:
                    (live,) = deployment.journeys.live.values()
                    assert got + live.events.qsize() < 24  # it still generates
                    deployment.reset_prefix_cache()
            assert got == 24
            await until(lambda: not deployment.journeys.live)
            await assert_idle(deployment, 128)
            for before in (over, runs):
                turn = (*before.prompt, *one_rank_tokens(before, "float64"), 3, 4)
                _, cached, report = await served(
                    deployment, request(f"after {before.request_id}", turn)
                )
                assert (cached, report["num_held"]) == (0, 0)
                assert report["nbytes"] == nbytes(deployment, 0, len(turn))
            assert reused(deployment) == {}
            assert deployment.counters["decode-0"]["reused_tokens"] == 0
            # from here on prefixes are kept as before
            _, cached, report = await served(deployment, request("again", (*turn, 5)))
            assert cached == report["num_held"] == len(turn) // 4 * 4

    asyncio.run(run())


def test_a_reset_while_prefixes_are_lent_disturbs_nobody():
    """Next turns begin, and everything is forgotten while they are on their way."""

    async def run():
        one = launch(max_num_batched_tokens=16)
        async with world(one) as deployment:
            firsts = [request(f"a{i}", (i, *IDS[:24]), greedy(9)) for i in range(3)]
            tokens = await serve_all(deployment, firsts)
            await assert_idle(deployment, num_blocks(one))
            turns = [
                request(f"b{r.request_id}", (*r.prompt, *tokens[r.request_id], 3, 4))
                for r in firsts
            ]
            serving = asyncio.create_task(serve_all(deployment, turns))
            await until(lambda: deployment.journeys.lenders.num_running or serving.done())
            deployment.reset_prefix_cache()
            got = await serving
            assert got == {r.request_id: one_rank_tokens(r, "float64") for r in turns}
            await assert_idle(deployment, num_blocks(one))

    asyncio.run(run())
