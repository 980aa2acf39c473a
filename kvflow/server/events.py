"""`GET /kv_events`: what the engine's caches hold, then every change, as server-sent events.

A stream is whole by itself: `Begin` says how blocks are named, `Held` pieces and `SnapshotEnd` are
all that is held at change number `seq`, then each `Changed` follows the one before it. A reader who
connects late, or again, is right once the snapshot has ended. One who misses a number, or is told
`Behind`, asks anew.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from attrs import frozen
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from kvflow.engine.api import Metric, Sample
from kvflow.router.config import Load
from kvflow.router.events import KVEvents, Stored
from kvflow.router.log import ChainScheme, CutOff, KVEventLog
from kvflow.server.errors import ApiError
from kvflow.server.generation import while_wanted
from kvflow.server.sse import EventStream

PIECE_BLOCKS = 1024
"""Blocks in one event of a snapshot, at most."""


@runtime_checkable
class SaysKVEvents(Protocol):
    """An engine that says what its caches hold."""

    def kv_events(self) -> KVEventLog | None:
        """The log of all its tiers; None if it caches nothing."""
        ...


def log_of(engine: object) -> KVEventLog | None:
    """What an engine says it holds; None if it says nothing."""
    return engine.kv_events() if isinstance(engine, SaysKVEvents) else None


class Begin(Struct, frozen=True, tag="begin"):
    """The first event. `log_id` is another one after every start of the engine. `tiers` are names,
    fastest first; `max_kv_tokens` is what running requests can hold together, in tokens."""

    log_id: str
    model: str
    scheme: ChainScheme
    tiers: tuple[str, ...]
    max_kv_tokens: int


class Held(Struct, frozen=True, tag="held"):
    """A part of the snapshot: blocks that a tier holds."""

    events: KVEvents


class SnapshotEnd(Struct, frozen=True, tag="snapshot_end"):
    """The snapshot is whole and stands at change number `seq`."""

    seq: int


class Changed(Struct, frozen=True, tag="change"):
    """Change number `seq`, the one behind `seq - 1`."""

    seq: int
    events: KVEvents


class LoadSaid(Struct, frozen=True, tag="load"):
    """The engine's load. Comes when it changes, and now and then as a sign of life."""

    load: Load


class Behind(Struct, frozen=True, tag="behind"):
    """The last event: this reader is too slow, the change it needs next is not kept any more."""

    reason: str


Message = Begin | Held | SnapshotEnd | Changed | LoadSaid | Behind


@frozen
class EventFeed:
    """The ASGI response of one reader. Load is said when it changes, but not more often than every
    `load_interval_s`, and without a change after `quiet_s`."""

    log: KVEventLog
    model: str
    stopping: asyncio.Event
    load_interval_s: float = 0.02
    quiet_s: float = 5.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speaks until the reader leaves, is too slow, or the server stops."""
        stream = EventStream(send)
        try:
            await while_wanted(self._speak(stream), receive, self.stopping)
        except* CutOff as behind:
            await stream.event(Behind(str(behind.exceptions[0])))
            await stream.done()
        except* ApiError:
            await stream.done()  # the server stops

    async def _speak(self, stream: EventStream) -> None:
        log = self.log
        begin = Begin(log.log_id, self.model, log.scheme, log.tiers, log.max_kv_tokens)
        await stream.event(begin)
        snapshot = log.snapshot()
        for events in snapshot.events:
            for piece in _pieces(events):
                await stream.event(Held(piece))
        await stream.event(SnapshotEnd(snapshot.seq))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._say_load(stream))
            group.create_task(self._say_changes(stream, snapshot.seq))

    async def _say_changes(self, stream: EventStream, seq: int) -> None:
        async for change in self.log.follow(seq):
            await stream.event(Changed(change.seq, change.events))

    async def _say_load(self, stream: EventStream) -> None:
        said: Load | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.log.other_load(said), self.quiet_s)
            said = self.log.load()
            await stream.event(LoadSaid(said))
            await asyncio.sleep(self.load_interval_s)


def log_metrics(log: KVEventLog) -> list[Metric]:
    """What a log holds and has been asked for, over all engines behind it."""
    held = [Sample(float(n), {"tier": tier}) for tier, n in log.num_blocks().items()]
    counts = (
        ("changes", "Changes of what is held, each one event for every reader."),
        ("ignored_runs", "Runs of blocks that say nothing about a prefix."),
        ("cut_off_readers", "Readers that were too slow and needed a new snapshot."),
    )
    return [
        Metric("kvflow_kv_events_held_blocks", "Blocks held, each once a tier.", "gauge", held),
        *(
            Metric(f"kvflow_kv_events_{name}_total", text, "counter", [Sample(log.counts[name])])
            for name, text in counts
        ),
    ]


def _pieces(events: KVEvents) -> Iterator[KVEvents]:
    """The stored runs of a tier, cut so that none of several events is long."""
    piece: list[Stored] = []
    room = PIECE_BLOCKS
    for run in events.stored:
        size = run.num_tokens // len(run.hashes)
        first = 0
        while first < len(run.hashes):
            hashes = run.hashes[first : first + room]
            parent = run.hashes[first - 1] if first else run.parent
            piece.append(Stored(hashes, parent, len(hashes) * size))
            first, room = first + len(hashes), room - len(hashes)
            if not room:
                yield KVEvents(events.tier, tuple(piece))
                piece, room = [], PIECE_BLOCKS
    if piece:
        yield KVEvents(events.tier, tuple(piece))
