"""Lenders: every loan that was asked for ends, whatever happens to those who asked."""

import asyncio

import pytest
from engine_world import request
from test_prefill import SPEC, TARGET, scenario

from kvflow.engine.api import Unavailable
from kvflow.engine.front.lenders import Lenders
from kvflow.engine.messages import EndLoan, Lend, Lent
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.transfers.planner import plan_transfer

SHARDED = KVLayout.uniform(SPEC, Placement.simple(RoundRobin(2)), Paged(4))
ONE = request("a", range(20))


class Said:
    """A hub that remembers."""

    def __init__(self):
        self.sent = []

    def send(self, name, message):
        self.sent.append((name, message))


def lenders():
    layouts = {"prefill-0": SHARDED, "decode-0": TARGET, "decode-1": TARGET}
    return Lenders(Said(), layouts)


async def asked(ours, borrower="prefill-0"):
    """A loan that decode-0 was asked for."""
    task = asyncio.ensure_future(ours.borrow(ONE, "decode-0", borrower))
    await asyncio.sleep(0)
    name, lend = ours.hub.sent[-1]
    assert (name, lend.prompt) == ("decode-0", list(ONE.prompt))
    return task, lend.loan_id


@pytest.mark.parametrize("borrower", ["prefill-0", "decode-1"])
def test_a_loan_says_where_rows_lie_and_how_they_move(borrower):
    @scenario
    async def run():
        ours = lenders()
        task, loan_id = await asked(ours, borrower)
        ours.on_lent(Lent(loan_id, {"kv": [3, 1]}, 12))
        loan = await task
        assert (loan.source.engine, loan.source.tables) == ("decode-0", {"kv": [3, 1]})
        assert (loan.source.start, loan.source.stop) == (0, 12)
        target = ours.layouts[borrower]
        assert loan.source.digest == plan_transfer(TARGET, target, (0, 12)).digest
        assert ours.num_running == 1
        loan.end()
        loan.end()
        assert [m for _, m in ours.hub.sent[1:]] == [EndLoan(loan_id)]
        assert ours.num_running == 0

    run()


@scenario
async def test_a_lender_that_has_nothing_any_more_owes_nothing():
    ours = lenders()
    task, loan_id = await asked(ours)
    ours.on_lent(Lent(loan_id, {}, 0))
    assert await task is None
    assert (ours.num_running, len(ours.hub.sent)) == (0, 1)


@scenario
async def test_a_request_that_goes_while_its_lender_is_asked_ends_the_loan():
    ours = lenders()
    task, loan_id = await asked(ours)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(m) for _, m in ours.hub.sent] == [Lend, EndLoan]  # in this order for the lender
    assert ours.num_running == 0
    ours.on_lent(Lent(loan_id, {"kv": [3]}, 4))  # late: nobody waits
    assert (ours.num_running, len(ours.hub.sent)) == (0, 2)


@scenario
async def test_the_answer_and_the_end_of_the_request_at_once_end_the_loan():
    ours = lenders()
    task, loan_id = await asked(ours)
    ours.on_lent(Lent(loan_id, {"kv": [3]}, 4))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ours.hub.sent[-1] == ("decode-0", EndLoan(loan_id))
    assert ours.num_running == 0


@scenario
async def test_a_rank_that_is_lost_meanwhile_fails_whoever_waits():
    ours = lenders()
    task, _ = await asked(ours)
    ours.fail(Unavailable("decode-0 is gone"))
    with pytest.raises(Unavailable, match="decode-0 is gone"):
        await task
    assert ours.num_running == 0
    assert [type(m) for _, m in ours.hub.sent] == [Lend]


@scenario
async def test_loans_of_one_request_to_two_borrowers_are_two():
    ours = lenders()
    first, one = await asked(ours, "prefill-0")
    second, two = await asked(ours, "decode-1")
    assert one != two
    ours.on_lent(Lent(two, {"kv": [5]}, 8))
    ours.on_lent(Lent(one, {"kv": [4]}, 4))
    assert ((await first).source.stop, (await second).source.stop) == (4, 8)
    (await first).end()
    assert ours.num_running == 1
