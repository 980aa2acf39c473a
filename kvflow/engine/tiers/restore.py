"""Restorer: one rank's way from host tiers to its blocks, on a thread of its own."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from attrs import define, field

from kvflow.engine.messages import AttachTier, Restore, Restored
from kvflow.engine.tiers.rows import UnitPort
from kvflow.errors import TransferError
from kvflow.layouts.layout import KVLayout
from kvflow.transfers.executors.base import RankCache

_log = logging.getLogger(__name__)


@define(eq=False)
class Restorer:
    """Of a rank that reads tiers and never writes them; `num_blocks` are its blocks by group."""

    layout: KVLayout
    cache: RankCache
    num_blocks: Mapping[str, int]
    _ports: dict[str, UnitPort] = field(init=False, factory=dict)
    _under_way: "dict[str, Future[bool]]" = field(init=False, factory=dict)
    _thread: ThreadPoolExecutor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvflow-restore")

    def attach(self, tier: AttachTier) -> None:
        """Maps a tier's memory. A rank that may not, as of another user, goes without."""
        try:
            port = UnitPort.attach(self.layout, self.cache, self.num_blocks, tier, writes=False)
        except TransferError as error:
            _log.warning("rank %d restores nothing from a host tier: %s", self.cache.rank, error)
        else:
            self._ports[tier.name] = port

    @property
    def has_tiers(self) -> bool:
        """Whether there is a tier to read."""
        return bool(self._ports)

    def begin(self, restore: Restore) -> None:
        """Starts bringing rows into a request's blocks; it ends in `ended`, whatever happens."""
        self._under_way[restore.request_id] = self._thread.submit(self._take, restore)

    def _take(self, restore: Restore) -> bool:
        port = self._ports.get(restore.tier)
        return port is not None and port.take_proven(restore.rows, restore.tables)

    def ended(self) -> list[Restored]:
        """Every part that has ended since the last call. Raises what it could not be done for."""
        done = [(name, part) for name, part in self._under_way.items() if part.done()]
        for name, _ in done:
            del self._under_way[name]
        return [Restored(name, not part.result()) for name, part in done]

    def close(self) -> None:
        """Waits for the part under way: what it writes into is freed afterwards."""
        self._thread.shutdown(wait=True, cancel_futures=True)
