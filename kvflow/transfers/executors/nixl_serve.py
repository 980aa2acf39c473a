"""The owner's side: a thread that packs rows, hashes rows and hears replies.

It sleeps between looks, longer the longer nothing happens. It answers every request it can read,
with a refusal if it must: a reader never waits for an answer that will not come.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from attrs import define, field, frozen

from kvflow.errors import KvflowError, TransferError
from kvflow.kernels.rows import gather_rows
from kvflow.layouts.sharding import Ints
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.nixl_agent import Agent
from kvflow.transfers.executors.nixl_wire import (
    Digest,
    Digested,
    Hello,
    Message,
    Pack,
    Packed,
    Refused,
    Release,
    Reply,
    Welcome,
    decode,
    encode,
    unpack_slots,
)
from kvflow.transfers.executors.seal import digest_rows
from kvflow.transfers.executors.staging import StagingArea

BUSY_SLEEP = 0.0002
IDLE_SLEEP = 0.001
LONGEST_SLEEP = 0.004
_BUSY_FOR = 0.05
_LEASE_LIMIT = 3600.0


@frozen
class _Loan:
    offset: int
    ends: float


@define(eq=False)
class Mailbox:
    """Replies on their way to the threads that asked."""

    _arrived: dict[int, Reply] = field(init=False, factory=dict)
    _expected: set[int] = field(init=False, factory=set)
    _next_id: int = field(init=False, default=0)
    _changed: threading.Condition = field(init=False, factory=threading.Condition)

    def new_id(self) -> int:
        with self._changed:
            self._next_id += 1
            self._expected.add(self._next_id)
            return self._next_id

    def put(self, reply: Reply) -> None:
        """Keeps an expected reply; drops one that nobody waits for any more."""
        with self._changed:
            if reply.id in self._expected:
                self._arrived[reply.id] = reply
                self._changed.notify_all()

    def take(self, request_id: int, seconds: float) -> Reply | None:
        """The reply, or None after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: request_id in self._arrived, seconds)
            reply = self._arrived.pop(request_id, None)
            if reply is not None:
                self._expected.discard(request_id)
            return reply

    def forget(self, request_ids: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        with self._changed:
            for request_id in request_ids:
                self._expected.discard(request_id)
                self._arrived.pop(request_id, None)


@define(eq=False)
class Service:
    """Serves one cache. `on_hello` admits the sender of a `Hello` and returns nothing, or raises.

    Counters: `num_served` requests answered, `num_refused` answered with a refusal, `num_dropped`
    messages that could not be read (bad seal) or came from strangers."""

    agent: Agent
    key: bytes
    cache: RankCache
    staging: StagingArea
    on_hello: Callable[[bytes], object]
    mailbox: Mailbox = field(init=False, factory=Mailbox)
    num_served: int = field(init=False, default=0)
    num_refused: int = field(init=False, default=0)
    num_dropped: int = field(init=False, default=0)
    _queue: deque[tuple[str, Pack, float]] = field(init=False, factory=deque)
    _loans: dict[tuple[str, int], _Loan] = field(init=False, factory=dict)
    _stopped: bool = field(init=False, default=False)
    _wake: threading.Event = field(init=False, factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"serve-{self.agent.name}")
        self._thread.daemon = True
        self._thread.start()

    def expect_traffic(self) -> None:
        """Makes the thread look often for a while: an answer is on its way."""
        self._wake.set()

    def close(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        busy_until, idle = 0.0, IDLE_SLEEP
        while not self._stopped:
            if self._turn() or self._wake.is_set():
                self._wake.clear()
                busy_until, idle = time.monotonic() + _BUSY_FOR, IDLE_SLEEP
            if time.monotonic() < busy_until:
                self._wake.wait(BUSY_SLEEP)
            else:
                self._wake.wait(idle)
                idle = min(idle * 1.25, LONGEST_SLEEP)

    def _turn(self) -> bool:
        """One look at everything; True if anything happened."""
        messages = self.agent.take_notifs()
        for sender, sealed in messages:
            try:
                message = decode(self.key, sealed)
            except TransferError:
                self.num_dropped += 1
                continue
            self._handle(sender, message)
        self._end_leases(time.monotonic())
        return self._pack_waiting() or bool(messages)

    def _handle(self, sender: str, message: Message) -> None:
        match message:
            case Release():
                self._release(sender, message.id)
            case Pack():
                lease = min(max(message.lease, 0.0), _LEASE_LIMIT)
                self._queue.append((sender, message, time.monotonic() + lease))
            case Hello() | Digest():
                self._answer(sender, message.id, lambda: self._reply_to(message))
            case _:
                self.mailbox.put(message)

    def _reply_to(self, message: Hello | Digest) -> Reply:
        if isinstance(message, Hello):
            self.on_hello(message.export)
            return Welcome(message.id)
        slots = unpack_slots(message.runs)
        names, heads = self._known(message, slots), message.heads
        digests = [digest_rows(self.cache.pages[n], slots, heads) for n in names]
        return Digested(message.id, tuple(digests))

    def _known(self, message: Pack | Digest, slots: Ints) -> tuple[str, ...]:
        """The components of a request. Raises `TransferError` for one this cache lacks or a slot
        outside its pages."""
        low, high = int(slots.min()), int(slots.max())
        for name in message.components:
            if name not in self.cache.pages:
                raise TransferError(f"rank {self.cache.rank} has no component {name!r}")
            num_slots = self.cache.pages[name].num_slots
            if low < 0 or high >= num_slots:
                raise TransferError(
                    f"{name}: slots {low}..{high} must be in [0, {num_slots}) of rank "
                    f"{self.cache.rank}"
                )
        return message.components

    def _answer(self, sender: str, request_id: int, work: Callable[[], Reply]) -> None:
        failures: tuple[type[Exception], ...] = (KvflowError, *self.agent.errors)
        try:
            reply = work()
            self.num_served += 1
        except failures as e:
            reply = Refused(request_id, str(e))
            self.num_refused += 1
        try:
            self.agent.notify(sender, encode(self.key, reply))
        except self.agent.errors:  # a stranger, or a reader that has died: nobody to tell
            self._release(sender, request_id)
            self.num_dropped += 1

    def _pack_waiting(self) -> bool:
        """Packs waiting requests in order of arrival while staging has room for the first."""
        packed = False
        while self._queue:
            sender, request, ends = self._queue[0]
            if time.monotonic() < ends and not self._try_pack(sender, request, ends):
                break
            self._queue.popleft()
            packed = True
        return packed

    def _try_pack(self, sender: str, request: Pack, ends: float) -> bool:
        """False if there is no room yet."""
        offset: int | None = None

        def work() -> Reply:
            nonlocal offset
            slots = unpack_slots(request.runs)
            names = self._known(request, slots)
            records = [self.cache.pages[n].record for n in names]
            sizes = [len(slots) * record.row_nbytes(request.heads) for record in records]
            offset = self.staging.lend(sum(sizes))
            if offset is None:
                raise _NoRoomError
            self._loans[sender, request.id] = _Loan(offset, ends)
            at, index = offset, torch.from_numpy(slots)
            for name, size in zip(names, sizes, strict=True):
                rows = self.staging.slice(at, size).view(len(slots), -1)
                gather_rows(self.cache.pages[name], index, rows, request.heads)
                at += size
            return Packed(request.id, offset)

        try:
            self._answer(sender, request.id, work)
        except _NoRoomError:
            return False
        return True

    def _release(self, sender: str, request_id: int) -> None:
        loan = self._loans.pop((sender, request_id), None)
        if loan is not None:
            self.staging.give_back(loan.offset)

    def _end_leases(self, now: float) -> None:
        """A lease outlives its reader's own deadline, so nobody uses what is overwritten next."""
        for (sender, request_id), loan in list(self._loans.items()):
            if now > loan.ends:
                self._release(sender, request_id)


class _NoRoomError(Exception):
    """Staging is full for now."""
