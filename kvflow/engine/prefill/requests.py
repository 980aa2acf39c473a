"""A request inside a prefill engine."""

import asyncio
from collections.abc import Awaitable, Callable

from attrs import define, field, frozen

from kvflow.engine.api import Request
from kvflow.engine.messages import RowsPulled, Source
from kvflow.engine.prefill.kv import RequestKV
from kvflow.engine.sampling import Sampled

OnReadable = Callable[[int, int | None], None]
"""Called while a prompt is computed: rows of positions below this one can be read; with a number,
those that the running step computes only in the first so many layers."""


def nobody(stop: int, num_layers: int | None = None) -> None:
    """Nobody reads before the prompt is computed."""


@frozen(eq=False)
class Loan:
    """Rows of a prompt's beginning that another engine keeps until `end` is called."""

    source: Source
    end: Callable[[], None]


Borrow = Callable[[], Awaitable[Loan | None]]
"""Asks for what another engine has of a prompt. It is called when the request has its blocks, so
that rows are never kept for one that waits."""


@define(eq=False)
class Prefilling:
    """One request. done: positions [0, done) are computed or were known. unread: the source ranks
    that its reader has not acknowledged yet; `is_read` once it has begun. missing: ranks whose
    share of what is borrowed has not ended; is_asking: whether it may still be lent something.
    is_over: nobody wants the result any more."""

    request: Request
    kv: RequestKV
    outcome: "asyncio.Future[Sampled]"
    borrow: Borrow | None = None
    on_readable: OnReadable = nobody
    loan: Loan | None = None
    is_asking: bool = False
    done: int = 0
    in_step: bool = False
    is_over: bool = False
    is_read: bool = False
    preempted: bool = False
    missing: int = 0
    borrow_error: str | None = None
    unread: set[int] = field(factory=set)

    @property
    def remaining(self) -> int:
        """Prompt tokens not computed yet."""
        return len(self.request.prompt) - self.done

    @property
    def is_held(self) -> bool:
        """Whether something still writes or reads its blocks."""
        return self.in_step or self.is_asking or bool(self.missing) or bool(self.unread)

    def rows_pulled(self, answer: RowsPulled) -> None:
        """One rank's share of what is borrowed is over."""
        self.missing -= 1
        self.borrow_error = self.borrow_error or answer.error

    def end_loan(self) -> None:
        """Whoever lent is told; a second time nothing happens."""
        if self.loan is not None:
            self.loan.end()
            self.loan = None
