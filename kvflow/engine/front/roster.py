"""Roster: the engines of a deployment as their ranks have introduced themselves."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from kvflow.engine.mailbox import Hub
from kvflow.engine.messages import Connect, Connected, FromRank, RankFailed, Ready
from kvflow.errors import KvflowError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.wire import layout_from_wire

Hear = Callable[[str, FromRank], None]


@define(eq=False)
class Roster:
    """`prefill` are the ranks of each prefill engine in rank order, by engine; `decode` are decode
    engines, each heard through its leader, which bears its name."""

    hub: Hub
    prefill: Mapping[str, Sequence[str]]
    decode: Sequence[str]
    ready: dict[str, Ready] = field(init=False, factory=dict)

    def ranks_of(self, engine: str) -> Sequence[str]:
        """Who is heard of an engine."""
        return self.prefill.get(engine, (engine,))

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    @property
    def ranks(self) -> tuple[str, ...]:
        return tuple(rank for engine in self.engines for rank in self.ranks_of(engine))

    async def gather(self, timeout: float) -> None:
        """Waits until every rank is ready. Raises `KvflowError` if a rank fails, is late, or ranks
        of one kind of engine disagree."""
        try:
            await asyncio.wait_for(self._all_ready(), timeout)
        except TimeoutError:
            late = [name for name in self.ranks if name not in self.ready]
            raise KvflowError(f"not every rank was ready within {timeout} s: {late}") from None
        for kind in (tuple(self.prefill), tuple(self.decode)):
            ranks = [rank for engine in kind for rank in self.ranks_of(engine)]
            first = self.ready[ranks[0]]
            for name in ranks:
                mine = self.ready[name]
                if (mine.layout, mine.num_blocks) != (first.layout, first.num_blocks):
                    raise KvflowError(f"rank {name!r} and {ranks[0]!r} describe different caches")

    async def _all_ready(self) -> None:
        while len(self.ready) < len(self.ranks):
            name, message = await self.hub.receive()
            if isinstance(message, RankFailed):
                raise KvflowError(f"rank {name!r} failed: {message.error}")
            if isinstance(message, Ready):
                self.ready[name] = message

    def _first(self, engine: str) -> Ready:
        return self.ready[self.ranks_of(engine)[0]]

    def layout(self, engine: str) -> KVLayout:
        return layout_from_wire(self._first(engine).layout)

    def num_blocks(self, engine: str) -> Mapping[str, int]:
        return self._first(engine).num_blocks

    async def connect(self, pairs: Iterable[tuple[str, str]], timeout: float, hear: Hear) -> None:
        """Waits until all ranks of an engine reach those of another, for each (reader, source).
        `hear` is told what ranks say besides. Raises `KvflowError` if a rank fails or is late."""
        waiting: set[tuple[str, str]] = set()
        for reader, source in pairs:
            self._connect(reader, source)
            waiting |= {(rank, source) for rank in self.ranks_of(reader)}
        try:
            await asyncio.wait_for(self._all_connected(waiting, hear), timeout)
        except TimeoutError:
            late = sorted(waiting)
            raise KvflowError(f"not every rank was connected within {timeout} s: {late}") from None

    async def _all_connected(self, waiting: set[tuple[str, str]], hear: Hear) -> None:
        while waiting:
            name, message = await self.hub.receive()
            if isinstance(message, RankFailed):
                raise KvflowError(f"rank {name!r} failed: {message.error}")
            if isinstance(message, Connected):
                waiting.discard((name, message.engine))
            else:
                hear(name, message)

    def _connect(self, reader: str, source: str) -> None:
        exports: dict[int, bytes] = {}
        for rank in self.ranks_of(source):
            exports |= self.ready[rank].exports
        first = self._first(source)
        for name in self.ranks_of(reader):
            self.hub.send(name, Connect(source, first.layout, first.num_blocks, exports))
