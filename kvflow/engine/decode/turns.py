"""A decode group's turns: what the leader decides, and what every rank of the group does about it.

The leader is rank 0 and the only one that hears the front. Each turn it says to all ranks, itself
included, which transfers begin, what the step computes and what can be forgotten; all do it, and
say how far they are.
"""

from typing import Any

import msgspec
from attrs import define
from msgspec import Struct

from kvflow.comm import Comm
from kvflow.comm.blobs import all_gather_blobs, broadcast_blob
from kvflow.engine.decode.worker import DecodeWorker, Pull
from kvflow.engine.messages import Connect, StepItem
from kvflow.engine.sampling import Sampled


class Turn(Struct, frozen=True):
    """From the leader: prefill engines to connect, transfers to begin, the step's items, requests
    that have left, and whether this is the last turn."""

    connect: list[Connect]
    pulls: list[Pull]
    items: list[StepItem]
    forget: list[str]
    stop: bool = False


class PullEnded(Struct, frozen=True):
    """One rank's part of a transfer: its report, or why it failed."""

    request_id: str
    report: dict[str, Any] | None
    error: str | None


class TurnDone(Struct, frozen=True):
    """From every rank: transfers that ended, whether nothing of failed ones can still arrive, the
    tokens it sampled by request, the seconds its step took, and its gauges and totals."""

    ended: list[PullEnded]
    quiesced: bool
    sampled: dict[str, list[Sampled]]
    seconds: float
    gauges: dict[str, float]
    totals: dict[str, float]


_TURN = msgspec.msgpack.Decoder(Turn)
_DONE = msgspec.msgpack.Decoder(TurnDone)


@define(eq=False)
class Crew:
    """All ranks of a decode group, as its leader sees them; a group of one meets nobody."""

    worker: DecodeWorker
    comm: Comm

    def turn(self, turn: Turn) -> list[TurnDone]:
        """On the leader: the turn on every rank; their answers in rank order."""
        if self.comm.size == 1:
            return [perform(self.worker, turn)]
        broadcast_blob(self.comm, msgspec.msgpack.encode(turn))
        return _answers(self.comm, perform(self.worker, turn))


def follow(worker: DecodeWorker, comm: Comm) -> None:
    """On every other rank: the leader's turns, until the last or an error."""
    stop = False
    try:
        while not stop:
            turn = _TURN.decode(broadcast_blob(comm, None))
            _answers(comm, perform(worker, turn))
            stop = turn.stop
    finally:
        worker.close()


def perform(worker: DecodeWorker, turn: Turn) -> TurnDone:
    """One rank's part of a turn."""
    for connect in turn.connect:
        worker.connect(connect)
    for request_id in turn.forget:
        worker.runner.forget(request_id)
    for pull in turn.pulls:
        worker.begin(pull)
    sampled, seconds = worker.step(turn.items) if turn.items else ({}, 0.0)
    ended = [PullEnded(*one) for one in worker.ended()]
    quiesced = worker.endpoint.quiesced()
    return TurnDone(ended, quiesced, sampled, seconds, worker.gauges, worker.totals)


def _answers(comm: Comm, done: TurnDone) -> list[TurnDone]:
    blobs = all_gather_blobs(comm, msgspec.msgpack.encode(done))
    return [_DONE.decode(blob) for blob in blobs]
