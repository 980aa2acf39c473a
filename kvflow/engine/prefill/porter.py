"""Porter: a prefill rank's messages and moves, on a thread of their own, so that rows move, and
whoever waits for them hears of it, while the rank computes."""

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from attrs import define, field

from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import (
    Connect,
    Connected,
    FromRank,
    PullRows,
    PushRows,
    RowsPulled,
    RowsPushed,
    ToRank,
)
from kvflow.engine.moves import Mover

_POLL_S = 0.01


@define(eq=False)
class Porter:
    """Begins the moves that the front asks for as soon as it does, and answers as soon as they are
    over; the rank `receive`s everything else. While it is entered the mailbox and the mover are
    its own: whatever the rank says goes through `send`."""

    rank: int
    mover: Mover
    mailbox: Mailbox
    _work: "SimpleQueue[ToRank | Exception]" = field(init=False, factory=SimpleQueue)
    _said: "SimpleQueue[FromRank]" = field(init=False, factory=SimpleQueue)
    _leaving: bool = field(init=False, default=False)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self.mover.on_end = self.mailbox.wake
        self._thread = threading.Thread(target=self._serve, name="kvflow-porter", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What was said is sent, then the mailbox is its owner's again."""
        self._leaving = True
        self.mailbox.wake()
        self._thread.join()

    def receive(self) -> ToRank:
        """The next message for the rank; blocks until there is one. Raises what ended the thread,
        if something did."""
        message = self._work.get()
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: FromRank) -> None:
        """From any thread; messages of one thread keep their order."""
        self._said.put(message)
        self.mailbox.wake()

    def _serve(self) -> None:
        try:
            while not self._leaving:
                for message in self.mailbox.receive(_POLL_S if self.mover.is_settling else None):
                    self._take(message)
                self._answer()
            self._answer()  # what was said before the rank left
        except Exception as error:  # the rank's to report
            self._work.put(error)

    def _take(self, message: ToRank) -> None:
        match message:
            case Connect():
                self.mover.connect(message)
                self.mailbox.send(Connected(message.engine))
            case PullRows():
                self.mover.begin(message)
            case PushRows():
                self.mover.begin_push(message)
            case _:
                self._work.put(message)

    def _answer(self) -> None:
        """A move that failed is answered when nothing of it can arrive any more."""
        for name, report, error in self.mover.pulled(settled=True):
            self.mailbox.send(RowsPulled(name, self.rank, report, error))
        for name, report, error in self.mover.pushed():
            self.mailbox.send(RowsPushed(name, self.rank, report, error))
        with suppress(Empty):
            while True:
                self.mailbox.send(self._said.get_nowait())
