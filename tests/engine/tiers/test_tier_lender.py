"""Units that a front keeps for decode engines: of which tier, from where on, until when."""

import asyncio

import pytest
from symbolic_ranks import SymbolicRanks

from kvflow.engine.front.units import TierLender
from kvflow.engine.messages import AskUnits, Units, UnitsRead
from kvflow.errors import KvflowError
from kvflow.transfers.executors.plain_files import PlainFiles

PROMPT = list(range(38))
UNIT = 4


class Said:
    """A hub that remembers."""

    def __init__(self):
        self.sent = []

    def send(self, name, message):
        self.sent.append((name, message))


async def engines(prompts, **changes):
    """Prefill engines that have each computed a prompt."""
    made = []
    for prompt in prompts:
        ranks = SymbolicRanks(2, 2, block=UNIT, num_blocks=20, host_units=24, mtp=True, **changes)
        await ranks.serve("a", prompt)
        made.append(ranks)
    return made


def lender_of(made):
    tiers = tuple(ranks.engine.tiers for ranks in made)
    return TierLender(Said(), made[0].engine.kv.hasher, tiers)


async def answered(lender, ask):
    lender.ask("decode-0", ask)
    while not lender.hub.sent:
        await asyncio.sleep(0)
    ((reader, answer),) = lender.hub.sent
    lender.hub.sent.clear()
    assert (reader, answer.request_id) == ("decode-0", ask.request_id)
    return answer


def scenario(prompts, check, **changes):
    async def run():
        made = await engines(prompts, **changes)
        try:
            await check(made, lender_of(made))
        finally:
            for ranks in made:
                await ranks.close()

    asyncio.run(run())


@pytest.mark.parametrize("start", [0, 3, 4, 18, 35])
def test_rows_behind_what_is_held_are_kept_until_they_are_read(start):
    """Also where the reader holds a part of a unit."""

    async def check(made, lender):
        (ranks,) = made
        answer = await answered(lender, AskUnits("a", PROMPT, start, None))
        rows = answer.rows
        assert answer.tier == ranks.engine.tiers.attachment.name
        assert (rows.start, rows.stop, rows.start - rows.skipped) == (start, 36, start // 4 * 4)
        chain = ranks.engine.kv.hasher.chain(PROMPT)
        for i, (unit, label) in enumerate(zip(rows.units, rows.labels, strict=True)):
            k = start // UNIT + i
            assert unit == ranks.host.find(chain, k, chain.following(k))
            assert label == chain.label(k, chain.following(k))
        assert len(rows.units) == 9 - start // UNIT
        assert ranks.host.counts()["pinned"] == len(rows.units)
        ranks.engine.audit()  # what readers keep is nobody's leak
        lender.read(UnitsRead("a"))
        lender.read(UnitsRead("a"))
        assert ranks.host.counts()["pinned"] == 0
        ranks.assert_idle()

    scenario([PROMPT], check)


@pytest.mark.parametrize(
    ("tokens", "start", "salt"),
    [(PROMPT, 36, None), (PROMPT[:4], 0, None), (PROMPT, 0, "a tenant"), ([7, *PROMPT], 0, None)],
)
def test_nothing_is_kept_where_there_is_nothing(tokens, start, salt):
    async def check(made, lender):
        assert await answered(lender, AskUnits("a", tokens, start, salt)) == Units("a", "", None)
        assert made[0].host.counts()["pinned"] == 0

    scenario([PROMPT], check)


def test_the_last_row_is_left_out_if_it_was_made_with_another_token():
    async def check(made, lender):
        other = [*PROMPT[:20], 99, 98]
        answer = await answered(lender, AskUnits("a", other, 0, None))
        assert (answer.rows.start, answer.rows.stop, len(answer.rows.units)) == (0, 19, 5)
        held = await answered(lender, AskUnits("b", other, 19, None))
        assert held.rows is None

    scenario([PROMPT], check)


@pytest.mark.parametrize("turned", [False, True])
def test_the_tier_that_has_most_is_read(turned):
    async def check(made, lender):
        answer = await answered(lender, AskUnits("a", PROMPT, 0, None))
        tiers = [ranks.engine.tiers.attachment.name for ranks in made]
        assert (answer.tier, answer.rows.stop) == (tiers[not turned], 36)
        lender.read(UnitsRead("a"))
        for ranks in made:
            ranks.assert_idle()

    scenario([PROMPT, PROMPT[:21]][:: 1 if turned else -1], check)


def test_files_are_read_into_the_tier_and_counted(tmp_path):
    """The tier was given away in the meantime, and its files were not."""

    async def check(made, lender):
        (ranks,) = made
        ranks.host.clear()
        answer = await answered(lender, AskUnits("a", PROMPT, 6, None))
        assert (answer.rows.start, answer.rows.stop, answer.num_disk) == (6, 36, 30)
        assert ranks.host.counts()["pinned"] == 8
        lender.read(UnitsRead("a"))
        ranks.host.forget(answer.rows.units[:1])
        answer = await answered(lender, AskUnits("b", PROMPT, 6, None))
        assert (answer.rows.stop, answer.num_disk) == (36, 2)
        lender.read(UnitsRead("b"))
        await ranks.settle()
        ranks.assert_idle()

    scenario([PROMPT], check, directory=tmp_path, files=PlainFiles())


def test_a_reader_that_is_gone_is_no_error():
    class Gone:
        def send(self, name, message):
            raise KvflowError(f"no rank {name!r}")

    async def check(made, lender):
        lender.hub = Gone()
        lender.ask("decode-0", AskUnits("a", PROMPT, 0, None))
        (asking,) = lender._asking
        await asyncio.wait([asking])
        assert asking.exception() is None
        await lender.close()

    scenario([PROMPT], check)
