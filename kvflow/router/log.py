"""KVEventLog: what an engine, or several behind one front, hold and what changes, for readers who
come when they like.

A reader takes a snapshot and then the changes behind it. Memory is bounded by what the engines hold
and by `max_blocks` of changes: the log keeps one copy of them for all readers, each of which is but
a number, and a reader who falls further behind is cut off and needs a new snapshot.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from uuid import uuid4

from attrs import define, field
from msgspec import Struct

from kvflow.errors import KvflowError
from kvflow.layouts.values import positive
from kvflow.router.config import Load
from kvflow.router.events import KVEvents, stored_runs


class ChainScheme(Struct, frozen=True):
    """How the names of blocks come about; equal schemes name equal prefixes equally. `hashing` is
    the name of the rule, `content` the fingerprint of what rows mean, `block_size` in tokens,
    `salt_field` the field of a request whose value, or whose absence, goes into a chain's root."""

    hashing: str
    content: str
    block_size: int
    salt_field: str = "cache_salt"


class CutOff(KvflowError):  # noqa: N818
    """A reader who is too far behind, or ahead of this log: only a new snapshot helps."""


class Change(NamedTuple):
    """The change number `seq` of a log."""

    seq: int
    events: KVEvents


class Snapshot(NamedTuple):
    """All that is held, tier by tier, when change number `seq` had been taken."""

    seq: int
    events: tuple[KVEvents, ...]


def _num_blocks(events: KVEvents) -> int:
    """The memory that a change needs, in blocks; none needs nothing."""
    return 1 + len(events.removed) + sum(len(one.hashes) for one in events.stored)


@define(eq=False)
class KVEventLog:
    """To be told from one event loop what a `Router` would be told: `on_events` and `on_load`.

    From outside several engines are one: a tier holds what that tier of any engine holds.
    `tiers`: their names, fastest first. `max_kv_tokens`: what running requests can hold together.
    """

    scheme: ChainScheme
    tiers: tuple[str, ...]
    max_kv_tokens: int
    max_blocks: int = field(default=2**17, validator=positive)
    log_id: str = field(init=False, factory=lambda: uuid4().hex)
    counts: dict[str, int] = field(
        init=False, factory=lambda: dict.fromkeys(("changes", "ignored_runs", "cut_off_readers"), 0)
    )
    seq: int = field(init=False, default=0)
    _parents: dict[str, dict[bytes, bytes | None]] = field(init=False)
    _held: dict[tuple[str, str], set[bytes]] = field(init=False, factory=dict)
    _loads: dict[str, Load] = field(init=False, factory=dict)
    _changes: dict[int, KVEvents] = field(init=False, factory=dict)  # the last ones, by number
    _kept: int = field(init=False, default=0)
    _news: asyncio.Event = field(init=False, factory=asyncio.Event)

    def __attrs_post_init__(self) -> None:
        self._parents = {tier: {} for tier in self.tiers}

    # --- what is told

    def on_events(self, engine: str, events: KVEvents) -> None:
        """What a tier of an engine says, taken in the order that `KVEvents` states. Runs whose
        hashes and tokens disagree speak of something else than whole blocks of a prefix: they are
        ignored and counted. Raises `KvflowError` for an unknown tier."""
        if events.tier not in self._parents:
            raise KvflowError(f"{engine!r} speaks of tier {events.tier!r}, must be of {self.tiers}")
        parents = self._parents[events.tier]
        mine = self._held.setdefault((engine, events.tier), set())
        gone = [block for block in (mine if events.cleared else events.removed) if block in mine]
        came = dict(self._lawful(events))
        mine.difference_update(gone)
        mine.update(came)
        lost = [block for block in dict.fromkeys(gone) if not self._is_held(events.tier, block)]
        fresh = {block: parent for block, parent in came.items() if block not in parents}
        if lost or fresh:
            cleared = len(lost) == len(parents) > 0
            for block in lost:
                del parents[block]
            parents.update(fresh)
            stored = stored_runs(fresh.items(), self.scheme.block_size)
            self._publish(KVEvents(events.tier, stored, () if cleared else tuple(lost), cleared))

    def _is_held(self, tier: str, block: bytes) -> bool:
        return any(block in held for (_, one), held in self._held.items() if one == tier)

    def _lawful(self, events: KVEvents) -> list[tuple[bytes, bytes | None]]:
        found = []
        for run in events.stored:
            if run.num_tokens != len(run.hashes) * self.scheme.block_size:
                self.counts["ignored_runs"] += 1
                continue
            found += list(zip(run.hashes, (run.parent, *run.hashes), strict=False))
        return found

    def drop_engine(self, engine: str) -> None:
        """An engine is gone, and with it all that it held and its load."""
        for tier in self.tiers:
            self.on_events(engine, KVEvents(tier, cleared=True))
            del self._held[engine, tier]
        if self._loads.pop(engine, None) is not None:
            self._wake()

    def on_load(self, engine: str, load: Load) -> None:
        """What an engine says of its load; the last word counts."""
        if load != self._loads.get(engine):
            self._loads[engine] = load
            self._wake()

    def _publish(self, events: KVEvents) -> None:
        self.seq += 1
        self.counts["changes"] += 1
        self._changes[self.seq] = events
        self._kept += _num_blocks(events)
        while self._kept > self.max_blocks:
            self._kept -= _num_blocks(self._changes.pop(self._first))
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # --- what is read

    def load(self) -> Load:
        """The sum over all engines."""
        loads = self._loads.values()
        return Load(*(sum(getattr(one, name) for one in loads) for name in Load.__struct_fields__))

    async def other_load(self, known: Load | None) -> Load:
        """The load, as soon as it is another one than `known`."""
        while (load := self.load()) == known:
            await self._news.wait()
        return load

    def num_blocks(self) -> Mapping[str, int]:
        """How many blocks each tier holds."""
        return {tier: len(parents) for tier, parents in self._parents.items()}

    def snapshot(self) -> Snapshot:
        """Everything held now, in runs as they were stored."""
        size = self.scheme.block_size
        return Snapshot(
            self.seq,
            tuple(
                KVEvents(tier, stored_runs(parents.items(), size))
                for tier, parents in self._parents.items()
                if parents
            ),
        )

    @property
    def _first(self) -> int:
        """The number of the oldest change that is kept, or of the next one."""
        return self.seq - len(self._changes) + 1

    async def follow(self, seq: int) -> AsyncIterator[Change]:
        """Every change behind number `seq`, for ever; waits where there is none yet. Raises
        `CutOff` if the next one is not kept any more, or if the log has not come to `seq`."""
        while True:
            if not self._first - 1 <= seq <= self.seq:
                self.counts["cut_off_readers"] += 1
                raise CutOff(
                    f"change {seq + 1} is asked for, the log keeps {self._first} to {self.seq}"
                )
            if seq == self.seq:
                await self._news.wait()
                continue
            seq += 1
            yield Change(seq, self._changes[seq])
