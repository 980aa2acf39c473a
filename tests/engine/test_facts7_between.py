"""What systems of today refuse between engines (rows of a comparison), each with a figure."""

import asyncio
from collections import Counter

import pytest
from engine_world import collect, config, greedy, one_rank_tokens, request, until, world

from kvflow.engine.prefix.config import PrefixConfig

VOCAB = 320
UNIT = 8


def words(seed, count):
    return [(seed * 7919 + i * 104729) % VOCAB for i in range(count)]


async def ask(deployment, name, prompt, count=16):
    """The request's tokens, which are those of one rank alone, and its outputs."""
    one = request(name, prompt, greedy(count))
    outputs = await collect(deployment, one)
    tokens = [o.token for o in outputs]
    assert tokens == one_rank_tokens(one, "fp8")
    return tokens, outputs


def reused(deployment):
    """Tokens by tier so far."""
    return Counter(deployment.prefill.kv.num_reused)


def test_row_5_the_way_back_into_pcp():
    """A PCP4 x DCP4 engine with interleave 3 takes from a HiSparse decode engine what that has
    generated: of the next turn only the new tokens, and the rest of a unit, are computed."""
    launch = config(
        pcp=4, dcp=4, interleave=3, prefill_block=4, decode_block=16, dtype="float64",
        kv_dtype="fp8", hisparse=True, num_drafts=2, prefix=PrefixConfig(block_size=UNIT),
    )  # fmt: skip

    async def run():
        async with world(launch) as deployment:
            prompt = words(1, 41)
            said, _ = await ask(deployment, "first", prompt, 20)
            before = reused(deployment)
            following = [*prompt, *said, *words(2, 6)]
            _, outputs = await ask(deployment, "second", following, 4)
            got = reused(deployment) - before
            return len(following), got, outputs[0].cached_tokens

    total, got, cached = asyncio.run(run())
    # the first turn's prompt has 5 units of 8; with its 19 stored tokens 7 and a half are known
    assert got["device"] == 40
    assert got["peer"] == 16
    assert cached == 56
    print(f"row 5: of {total} tokens {got['peer']} come back from decode, {total - 56} computed")


@pytest.mark.parametrize("hisparse", [False, True])
def test_row_9_a_tier_and_another_engine_in_one_request(hisparse):
    """A turn's old prompt comes from the host tier and its generated tokens from the decode engine,
    in one request; and the rows that decode made, HiSparse's too, are in the tier from then on."""
    sizes = {"max_model_len": 96, "prefill_kv_tokens": 96, "decode_kv_tokens": 384}
    launch = config(
        pcp=2, dcp=2, prefill_block=4, decode_block=16, dtype="float64", kv_dtype="fp8",
        hisparse=hisparse, prefix=PrefixConfig(block_size=UNIT, host_nbytes=1 << 21), **sizes,
    )  # fmt: skip

    async def run():
        async with world(launch) as deployment:
            prompt = words(3, 40)
            said, _ = await ask(deployment, "first", prompt, 20)
            await ask(deployment, "other", words(4, 92), 2)  # the pool of 96 forgets the prompt
            second, before = [*prompt, *said, *words(5, 3)], reused(deployment)
            answer, _ = await ask(deployment, "second", second, 8)
            both = reused(deployment) - before
            third = [*second, *answer, *words(7, 2)]
            tier = deployment.prefill.tiers
            await until(lambda: not tier.num_under_way)
            chain = deployment.prefill.kv.hasher.chain(third)
            stored = tier.match(chain, 0, len(third) - 1)
            return both, stored.stop

    both, stored = asyncio.run(run())
    assert both["device"] == 0
    assert both["host"] == 40
    assert both["peer"] == 16
    # of the second turn's 63 prompt tokens all 7 whole units are in the tier: 40 tokens were the
    # client's, the others were generated on the decode engine and never computed by prefill
    assert stored == 56
    print(f"row 9: {both['host']} from the host tier, {both['peer']} from decode; {stored} stored")


@pytest.mark.parametrize("layers", [0, 2])
def test_row_12_what_is_left_when_prefill_ends(layers):
    """Decode reads while a prompt is computed in 7 steps: at the end at most the last is left."""
    launch = config(
        pcp=2, dcp=2, prefill_block=4, dtype="float64", kv_dtype="fp8", stream_layers=layers,
        max_num_batched_tokens=32, prefix=PrefixConfig(enabled=False),
    )  # fmt: skip

    async def run():
        async with world(launch) as deployment:
            _, outputs = await ask(deployment, "first", words(8, 200), 3)
            return next(o.transfer for o in outputs if o.transfer)

    report = asyncio.run(run())
    last = report["nbytes"] * (200 - 6 * 32) / 200
    row = report["nbytes"] // 200
    print(f"row 12: {report['late_nbytes']} of {report['nbytes']} bytes left, {row} a token")
    assert report["nbytes"] % 200 == 0
    assert report["late_nbytes"] <= last + 32 * row  # a busy reader may be one step behind
