"""ThreadComm: all ranks of a group in one process, one thread each.

Each collective is a meeting: every rank brings a header (what it believes it is calling) and a
payload, and takes the payloads of all. Headers must be equal, so a schedule that differs between
ranks raises on all of them. A rank that raises or leaves breaks the meetings it will never join.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm.protocol import (
    CommError,
    PeerError,
    check_all_gather,
    check_all_to_all,
    check_counts,
    check_rank,
    check_received,
)

T = TypeVar("T")
Header = tuple[Any, ...]
Call = tuple[str, tuple[int | None, ...]]
"""An entry of a trace: the operation and its group-wide shape, None for a rank's own count."""


@define(eq=False)
class ThreadGroup:
    """What the ranks of one in-process group share. A meeting waits at most `timeout_s` seconds."""

    size: int
    timeout_s: float = 60.0
    _changed: threading.Condition = field(factory=threading.Condition, init=False, repr=False)
    _meetings: dict[int, dict[int, tuple[Header, Any]]] = field(factory=dict, init=False)
    _taken: dict[int, int] = field(factory=dict, init=False)
    _gone: dict[int, str] = field(factory=dict, init=False)
    _channels: "list[ThreadGroup]" = field(factory=list, init=False)

    def leave(self, rank: int, why: str) -> None:
        """Rank will join no further meeting, of this group or its channels; ranks that wait for it
        raise `PeerError`."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()
            channels = list(self._channels)
        for channel in channels:
            channel.leave(rank, why)

    def channel(self, number: int) -> "ThreadGroup":
        """The group's channel of that number; channels are made in order."""
        with self._changed:
            while len(self._channels) <= number:
                made = ThreadGroup(self.size, self.timeout_s)
                for rank, why in self._gone.items():
                    made.leave(rank, why)
                self._channels.append(made)
            return self._channels[number]

    def meet(self, number: int, rank: int, header: Header, payload: Any) -> list[Any]:
        """The payloads of all ranks at meeting `number`, in rank order.

        Raises `CommError` on every rank when headers differ or after `timeout_s`, `PeerError`
        when a rank that has not come to this meeting is gone."""
        with self._changed:
            seats = self._meetings.setdefault(number, {})
            seats[rank] = header, payload
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: len(seats) == self.size or self._missing_gone(seats), self.timeout_s
            )
            if len(seats) < self.size:
                raise self._broken(number, rank, header, seats, timed_out=not done)
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                del self._meetings[number], self._taken[number]
        headers = {r: seats[r][0] for r in range(self.size)}
        if any(h != header for h in headers.values()):
            raise CommError(f"collective {number} differs between ranks: {headers}")
        return [seats[r][1] for r in range(self.size)]

    def _missing_gone(self, seats: dict[int, tuple[Header, Any]]) -> list[int]:
        return [r for r in self._gone if r not in seats]

    def _broken(
        self, number: int, rank: int, header: Header, seats: dict[int, Any], *, timed_out: bool
    ) -> CommError:
        call = f"rank {rank}, collective {number} {header}"
        if timed_out:
            missing = [r for r in range(self.size) if r not in seats]
            self.leave(rank, f"timed out in collective {number}")
            return CommError(f"{call}: ranks {missing} did not come within {self.timeout_s} s")
        gone = self._missing_gone(seats)[0]
        return PeerError(f"{call}: rank {gone} will not come: {self._gone[gone]}")


@define(eq=False)
class ThreadComm:
    """One rank of a `ThreadGroup`; used by one thread. With a `trace` list every call is noted."""

    group: ThreadGroup
    rank: int
    trace: list[Call] | None = None
    _num_calls: int = field(default=0, init=False)
    _num_channels: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        check_rank(self.rank, self.size)

    @property
    def size(self) -> int:
        return self.group.size

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        check_counts("all_gather", counts, self.size)
        check_all_gather(rows, counts, self.rank)
        row, counts = tuple(rows.shape[1:]), tuple(counts)
        header = ("all_gather", rows.dtype, row, counts)
        return torch.cat(self._meet(header, (sum(counts), *row), rows.clone()))

    def all_to_all(
        self, rows: Tensor, counts: Sequence[int], received: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        check_counts("all_to_all", counts, self.size)
        check_all_to_all(rows, counts)
        row = tuple(rows.shape[1:])
        parts = torch.split(rows.clone(), list(counts))
        header = ("all_to_all", rows.dtype, row, received is not None)
        sent = self._meet(header, (None, *row), parts)
        mine = [parts[self.rank] for parts in sent]
        arrived = [len(part) for part in mine]
        if received is not None:
            check_received(arrived, received)
        return torch.cat(mine), arrived

    def barrier(self) -> None:
        self._meet(("barrier",), (), None)

    def channel(self) -> "ThreadComm":
        """The calls of a channel are noted in no trace: they have an order of their own."""
        self._meet(("channel",), (), None)
        number = self._num_channels
        self._num_channels += 1
        return ThreadComm(self.group.channel(number), self.rank)

    def _meet(self, header: Header, shape: tuple[int | None, ...], payload: Any) -> list[Any]:
        if self.trace is not None:
            self.trace.append((header[0], shape))
        number = self._num_calls
        self._num_calls += 1
        return self.group.meet(number, self.rank, header, payload)


def run_ranks(
    size: int,
    body: Callable[[ThreadComm], T],
    *,
    timeout_s: float = 60.0,
    traces: Sequence[list[Call]] | None = None,
) -> list[T]:
    """Runs ``body(comm)`` on `size` ranks, one thread each, and returns their results by rank.

    When ranks raise, the first error that is not a mere consequence of another rank's is raised
    here, with a note naming its rank; nobody is left waiting."""
    group = ThreadGroup(size, timeout_s)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadComm(group, rank, traces[rank] if traces else None))
            group.leave(rank, "it has returned")
        except BaseException as error:
            errors.append((rank, error))
            group.leave(rank, f"it raised {error!r}")

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        rank, first = next((e for e in errors if not isinstance(e[1], PeerError)), errors[0])
        first.add_note(f"raised on rank {rank} of {size}")
        raise first
    return [results[r] for r in range(size)]
