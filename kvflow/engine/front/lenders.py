"""Lenders: rows of a prompt that a decode engine keeps for another engine to take."""

import asyncio
from collections.abc import Mapping
from functools import partial

from attrs import define, field

from kvflow.engine.api import Request
from kvflow.engine.mailbox import Hub
from kvflow.engine.messages import EndLoan, Lend, Lent, Source
from kvflow.engine.prefill.requests import Loan
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.handshake import Agreement, agree


def loan_id(request_id: str, borrower: str) -> str:
    """How a loan is known."""
    return f"{request_id}>{borrower}"


@define(eq=False)
class Lenders:
    """`layouts` are those of all engines, by name. A loan is known by its request and borrower."""

    hub: Hub
    layouts: Mapping[str, KVLayout]
    _asked: "dict[str, asyncio.Future[Lent]]" = field(init=False, factory=dict)
    _running: dict[str, str] = field(init=False, factory=dict)
    _terms: dict[tuple[str, str], Agreement] = field(init=False, factory=dict)

    async def borrow(self, request: Request, lender: str, borrower: str) -> Loan | None:
        """What `lender` has of a prompt; None if it has nothing any more."""
        name = loan_id(request.request_id, borrower)
        future: asyncio.Future[Lent] = asyncio.get_running_loop().create_future()
        self._asked[name], self._running[name] = future, lender
        try:
            self.hub.send(lender, Lend(name, list(request.prompt), request.cache_salt))
            lent = await future
        except BaseException:
            self.end(name)
            raise
        finally:
            del self._asked[name]
        if not lent.length:
            del self._running[name]
            return None
        try:
            plan = self._agreement(lender, borrower).plan((0, lent.length))
        except KvflowError:
            self.end(name)
            raise
        source = Source(lender, lent.tables, 0, lent.length, plan.digest)
        return Loan(source, partial(self.end, name))

    def _agreement(self, lender: str, borrower: str) -> Agreement:
        if (lender, borrower) not in self._terms:
            terms = agree(self.layouts[lender], self.layouts[borrower])
            self._terms[lender, borrower] = terms
        return self._terms[lender, borrower]

    def on_lent(self, message: Lent) -> None:
        """A decode engine's answer. Nobody waits for one whose request has gone."""
        if message.loan_id in self._asked and not self._asked[message.loan_id].done():
            self._asked[message.loan_id].set_result(message)

    def end(self, name: str) -> None:
        """The lender of a loan, known by its id, need not keep the rows any more; a second time
        nothing happens."""
        if (lender := self._running.pop(name, None)) is not None:
            self.hub.send(lender, EndLoan(name))

    def fail(self, error: KvflowError) -> None:
        """No lender answers any more."""
        self._running.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)

    @property
    def num_running(self) -> int:
        """Loans that have not ended."""
        return len(self._running)
