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
from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.messages import AttachTier, Connect, PullRows, Restore, Restored, StepItem
from kvflow.engine.sampling import Sampled
from kvflow.engine.spec.pending import StepTokens


class Turn(Struct, frozen=True):
    """From the leader: engines to connect, tiers to attach, requests that have left their blocks,
    transfers and reads of tiers to begin, the step's items, and whether this is the last turn."""

    connect: list[Connect] = []
    attach: list[AttachTier] = []
    retire: list[str] = []
    pulls: list[PullRows] = []
    restores: list[Restore] = []
    items: list[StepItem] = []
    stop: bool = False


class PullEnded(Struct, frozen=True):
    """One rank's part of a transfer: its report, or why it failed."""

    request_id: str
    report: dict[str, Any] | None
    error: str | None


class TurnDone(Struct, frozen=True):
    """From every rank: transfers that ended, whether nothing of failed ones can still arrive, the
    tokens it sampled by request, why no token follows those of some, the seconds its step took,
    its gauges and totals, and reads of tiers that ended."""

    ended: list[PullEnded]
    quiesced: bool
    sampled: dict[str, list[Sampled]]
    failed: dict[str, str]
    seconds: float
    gauges: dict[str, float]
    totals: dict[str, float]
    restored: list[Restored] = []


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


def gather_exports(worker: DecodeWorker, comm: Comm) -> dict[int, bytes]:
    """The exports of all ranks of the group, by rank. A collective, and the first of a group."""
    return dict(enumerate(all_gather_blobs(comm, worker.endpoint.export())))


def follow(worker: DecodeWorker, comm: Comm) -> None:
    """On every other rank: the leader's turns, until the last or an error."""
    stop = False
    try:
        gather_exports(worker, comm)
        while not stop:
            turn = _TURN.decode(broadcast_blob(comm, None))
            _answers(comm, perform(worker, turn))
            stop = turn.stop
    finally:
        worker.close()


def perform(worker: DecodeWorker, turn: Turn) -> TurnDone:
    """One rank's part of a turn. Who leaves goes first: others may get its blocks in this turn."""
    for connect in turn.connect:
        worker.pulls.connect(connect)
    for tier in turn.attach:
        worker.restores.attach(tier)
    for request_id in turn.retire:
        worker.retire(request_id)
    for pull in turn.pulls:
        worker.pulls.begin(pull)
    for restore in turn.restores:
        worker.restores.begin(restore)
    tokens, seconds = worker.step(turn.items) if turn.items else (StepTokens({}, {}), 0.0)
    ended = [PullEnded(*one) for one in worker.pulls.pulled()]
    quiesced = worker.endpoint.quiesced()
    said = tokens.sampled, tokens.failed
    restored = worker.restores.ended()
    return TurnDone(ended, quiesced, *said, seconds, worker.gauges, worker.totals, restored)


def _answers(comm: Comm, done: TurnDone) -> list[TurnDone]:
    blobs = all_gather_blobs(comm, msgspec.msgpack.encode(done))
    return [_DONE.decode(blob) for blob in blobs]
