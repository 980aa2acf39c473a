"""Restoring: what a decode engine takes from the host tiers of its host before it computes.

A request that is about to compute its prompt, or after a preemption all its tokens, holds blocks
for them. If whole blocks of its chain are lacking, the front is asked for units that have them;
every rank of the group brings its rows from there, and the request computes the rest. If units
prove to hold something else, all of it is computed.
"""

from collections.abc import Sequence

from attrs import define, field

from kvflow.engine.decode.kv import DecodeKV
from kvflow.engine.decode.requests import Decoding, Phase
from kvflow.engine.mailbox import Mailbox
from kvflow.engine.messages import AskUnits, Restore, Restored, Units, UnitsRead


@define(eq=False)
class _Reading:
    """Units that `missing` ranks still read for a request."""

    work: Decoding
    units: Units
    missing: int
    refused: bool = False


@define(eq=False)
class Restoring:
    """`counters` are the engine's. Nobody is asked until there is a tier (`has_tiers`)."""

    kv: DecodeKV
    mailbox: Mailbox
    counters: dict[str, float]
    has_tiers: bool = False
    _asking: dict[str, Decoding] = field(init=False, factory=dict)
    _reading: dict[str, _Reading] = field(init=False, factory=dict)
    _ready: list[Units] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.counters |= {"restored_host_tokens": 0.0, "restored_disk_tokens": 0.0}
        self.counters |= {"refused_restores": 0.0}

    @property
    def can_begin(self) -> bool:
        """Whether ranks can begin to read."""
        return bool(self._ready)

    @property
    def is_reading(self) -> bool:
        """Whether ranks read units."""
        return bool(self._reading)

    def begin(self, work: Decoding) -> None:
        """The request has its blocks, the first `computed` positions in them: it runs from now on,
        or when it has what tiers hold."""
        work.has_restored = False
        if not self.has_tiers or not self.kv.lacks_a_unit(work):
            self._run(work)
            return
        work.phase = Phase.RESTORING
        self._asking[work.request_id] = work
        salt = work.admit.salt
        self.mailbox.send(AskUnits(work.request_id, list(work.tokens), work.computed, salt))

    def _run(self, work: Decoding) -> None:
        """`was_computed`: what a preempted request lost, and did not find again, is its own."""
        self.counters["recomputed_tokens"] += max(work.was_computed - work.computed, 0)
        work.phase = Phase.RUNNING

    def answered(self, units: Units) -> None:
        """The front's answer; a request that has left gives the units back at once."""
        work = self._asking.pop(units.request_id, None)
        if units.rows is None:
            if work is not None:
                self._run(work)
        elif work is None:
            self.mailbox.send(UnitsRead(units.request_id))
        else:
            self._reading[units.request_id] = _Reading(work, units, 0)
            self._ready.append(units)

    def next(self, num_ranks: int) -> list[Restore]:
        """What so many ranks are to read from now on."""
        ready, self._ready = self._ready, []
        restores = []
        for units in ready:
            reading = self._reading[units.request_id]
            reading.missing = num_ranks
            tables = reading.work.tables
            if units.rows is not None:
                restores.append(Restore(units.request_id, units.tier, units.rows, tables))
        return restores

    def abort(self, request_id: str) -> bool:
        """Nobody listens to a request. Whether it is to leave only when its ranks have read."""
        self._asking.pop(request_id, None)
        reading = self._reading.get(request_id)
        if reading is not None:
            reading.work.aborted = True
        return reading is not None

    def settle(self, answers: Sequence[Sequence[Restored]]) -> list[str]:
        """What has ended on the ranks. A request whose units are read runs behind them; those that
        are to leave are returned by their ids."""
        leaving = []
        for part in (part for answer in answers for part in answer):
            reading = self._reading[part.request_id]
            reading.missing -= 1
            reading.refused |= part.refused
            if not reading.missing:
                del self._reading[part.request_id]
                self._read(reading)
                if reading.work.aborted:
                    leaving.append(part.request_id)
        return leaving

    def _read(self, reading: _Reading) -> None:
        work, rows = reading.work, reading.units.rows
        self.mailbox.send(UnitsRead(work.request_id))
        if reading.refused or rows is None:
            self.counters["refused_restores"] += 1
        else:
            count, disk = rows.stop - rows.start, reading.units.num_disk
            self.counters["restored_host_tokens"] += count - disk
            self.counters["restored_disk_tokens"] += disk
            work.computed, work.has_restored = rows.stop, True
            if not work.was_computed:  # else it was this request's own work
                work.num_cached += count
        self._run(work)
