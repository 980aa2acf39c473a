"""DiskTraffic: units on their way between host memory and files, beside the steps.

Runs in the front's event loop; the files are read and written on threads of its own. A unit that is
being written to a file is pinned in the host tier, one that is being read into is found by nobody
until it is proven. Nothing here is waited for by a step.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from attrs import define, field

from kvflow.engine.prefix.hashes import Chain
from kvflow.engine.tiers.disk import DiskTier
from kvflow.engine.tiers.host import Entry, HostTier, Place
from kvflow.engine.tiers.unitfile import UnitFile
from kvflow.errors import CapacityError, TransferError


@define(eq=False)
class DiskTraffic:
    """At most half of the host tier's units wait to be written to files; further ones are not
    written, and counted. `on_change` is called when what a tier holds has changed beside a step."""

    host: HostTier
    disk: DiskTier
    on_change: Callable[[], None] = field(default=lambda: None)
    _writing: set["asyncio.Task[None]"] = field(init=False, factory=set)
    _reading: dict[Place, "asyncio.Task[bool]"] = field(init=False, factory=dict)
    _unwanted: set[Place] = field(init=False, factory=set)
    _generation: int = field(init=False, default=0)
    _readers: ThreadPoolExecutor = field(init=False)
    _writer: ThreadPoolExecutor = field(init=False)
    _turn: asyncio.Lock = field(init=False, factory=asyncio.Lock)

    def __attrs_post_init__(self) -> None:
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="tier-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tier-write")

    @property
    def num_under_way(self) -> int:
        """Units being written to or read from files."""
        return len(self._writing) + len(self._reading)

    def spill(self, unit: int, key: bytes) -> None:
        """Writes a published unit behind what else goes on, unless its file is there."""
        place = self.host.entry(unit).place
        if self.disk.has(place):
            return
        if 2 * (len(self._writing) + 1) > self.host.memory.num_units:
            self.disk.num_store_refused += 1
            return
        self.host.pin([unit])
        task = asyncio.get_running_loop().create_task(self._write(unit, key, self.host.entry(unit)))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, unit: int, key: bytes, entry: Entry) -> None:
        data, generation = self.host.memory.units[unit], self._generation
        loop = asyncio.get_running_loop()
        try:
            async with self._turn:
                self.disk.make_room(data.numel())
                file = await loop.run_in_executor(self._writer, self.disk.write, key, entry, data)
        except CapacityError:
            return
        except TransferError:
            self.disk.num_store_refused += 1
            return
        finally:
            unchanged = self.host.memory.label(unit) == entry.label
            self.host.unpin([unit])
        if generation == self._generation and unchanged:
            self.disk.publish(file)
            self.on_change()
        else:
            file.path.unlink(missing_ok=True)

    def knows(self, chain: Chain, k: int) -> bool:
        """Whether block k lies in a file, whatever token its last row was made with."""
        exact = self.disk.find(chain, k, chain.following(k))
        return exact is not None or self.disk.variant(chain, k) is not None

    async def fetch(self, chain: Chain, k: int) -> Place | None:
        """Brings block k of a chain into a host unit, the variant made with the token that follows
        if there is one. Returns its place once it is found there; None if it is in no file, or
        there is no unit to be had."""
        file = self.disk.find(chain, k, chain.following(k)) or self.disk.variant(chain, k)
        if file is None:
            return None
        place = file.entry.place
        task = self._reading.get(place)
        if task is None:
            unit = self.host.begin(place)
            if unit is None:
                return place if self.host.has(place) else None
            task = asyncio.get_running_loop().create_task(self._read(file, unit))
            self._reading[place] = task
            task.add_done_callback(lambda _: self._ended(place))
        await asyncio.wait([task])
        return place if task.result() else None

    async def _read(self, file: UnitFile, unit: int) -> bool:
        generation, loop = self._generation, asyncio.get_running_loop()
        data, entry, proven = self.host.memory.units[unit], file.entry, True
        try:
            await loop.run_in_executor(self._readers, self.disk.read, file, data)
        except TransferError:
            proven = False
        if generation != self._generation or entry.place in self._unwanted:
            self.host.discard(unit)
            return False
        if not proven:
            self.disk.refuse(file)
            self.host.discard(unit)
            self.on_change()
            return False
        came = self.host.publish(unit, entry.place, entry.tokens, entry.label, entry.parent)
        self.on_change()
        return came

    def _ended(self, place: Place) -> None:
        del self._reading[place]
        self._unwanted.discard(place)

    def forget(self, chain: Chain) -> None:
        """No block of a chain lies in a file any more; those under way are found by nobody."""
        for k in range(len(chain)):
            while (file := self.disk.variant(chain, k)) is not None:
                self.disk.drop(file)
        hashes = set(chain.hashes)
        self._unwanted |= {place for place in self._reading if place.hash in hashes}

    def clear(self) -> int:
        """Deletes every file; what is under way is found by nobody. Returns how many there were."""
        self._generation += 1
        return self.disk.clear()

    async def close(self) -> None:
        """Waits until what is under way has ended: no thread may write into memory that is gone."""
        while under_way := [*self._writing, *self._reading.values()]:
            await asyncio.wait(under_way)
        self._readers.shutdown()
        self._writer.shutdown()
