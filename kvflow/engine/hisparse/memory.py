"""HiSparseMemory: a rank's KV cache, its latents on the host and the hot ones on the device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from attrs import define, evolve, field

from kvflow.comm import Comm
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.options import AccessOptions
from kvflow.engine.access.shards import ShardQueries
from kvflow.engine.hisparse.pool import Allocate, LatentPool, zeros
from kvflow.engine.hisparse.reads import Reads, plan_reads
from kvflow.engine.hisparse.request import RequestRows
from kvflow.engine.hisparse.shard import HiSparseShard
from kvflow.engine.hisparse.shared import BlockCopy, Holders
from kvflow.engine.hisparse.sizes import LATENT, HiSparseSizes
from kvflow.engine.hisparse.step import HiSparseStep
from kvflow.engine.hisparse.tail import CLEAN, DIRTY
from kvflow.engine.memory import StepRequest
from kvflow.errors import CapacityError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.transfers.executors.base import RankCache


@define(eq=False)
class HiSparseMemory:
    """A `KVMemory`. A request takes a seat with the first step that names it, and gives it back
    when it is forgotten."""

    pool: LatentPool
    comm: Comm
    options: AccessOptions = field(factory=AccessOptions)
    access: Counters = field(init=False, factory=Counters)
    """Of the collectives that reach other ranks' shards."""
    _reads: dict[tuple[str, ...], list[Reads]] = field(init=False, factory=dict)
    _requests: dict[str, RequestRows] = field(init=False, factory=dict)
    _seats: list[int] = field(init=False)
    _holders: Holders = field(init=False)
    _group: dict[str, tuple[str, ...]] = field(init=False)
    _gone: dict[str, float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seats = list(range(self.pool.sizes.max_requests))[::-1]
        self._holders = Holders(self.pool.num_blocks)
        self._group = {name: group for group in self.pool.groups for name in group}
        self._gone = dict.fromkeys(("hits", "misses", "evictions"), 0.0)

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        comm: Comm,
        num_blocks: Mapping[str, int],
        sizes: HiSparseSizes,
        *,
        allocate_host: Allocate = zeros,
        allocate_device: Allocate = zeros,
        host_access: Callable[[], AbstractContextManager[object]] = nullcontext,
        options: AccessOptions | None = None,
    ) -> "HiSparseMemory":
        """The memory of rank ``comm.rank`` for a `hisparse_layout`; `num_blocks` is by group. Every
        use of host memory by this rank's steps happens inside a `host_access`. Raises before it
        allocates what `HiSparseBytes.of` raises."""
        pool = LatentPool(
            layout, comm.rank, num_blocks, sizes, allocate_host, allocate_device, host_access
        )
        return cls(pool, comm, options or AccessOptions())

    @property
    def layout(self) -> KVLayout:
        return self.pool.layout

    @property
    def cache(self) -> RankCache:
        return self.pool.cache

    @property
    def workspace_nbytes(self) -> int:
        return self.access.workspace_peak_nbytes

    def group_of(self, component: str) -> tuple[str, ...]:
        """The latent components that share a top-k with this one."""
        return self._group[component]

    def open(self, requests: Sequence[StepRequest], write_only: frozenset[str]) -> HiSparseStep:
        """Raises `CapacityError` for a new request when all seats are taken, `KvflowError` for one
        that would write into a block of another request that has a seat."""
        self._settle_reads()
        facts = StepFacts(self.layout, self.comm.rank, requests, self.comm.size)
        shard = HiSparseShard(facts, self, [self._seated(r) for r in requests])
        options = evolve(self.options, attention="queries")
        return HiSparseStep(facts, shard, self.comm, options, self.access, write_only)

    def _seated(self, request: StepRequest) -> RequestRows:
        name, held = request.request_id, self._requests.get(request.request_id)
        if held is None and not self._seats:
            raise CapacityError(
                f"request {name!r} needs a seat, all {self.pool.sizes.max_requests} "
                f"(max_requests) are taken"
            )
        binding = Binding.of(self.layout, request.tables, self.pool.num_blocks, request.stop)
        self._holders.change(held.binding if held else None, binding)
        if held is None:
            held = RequestRows(self._seats.pop(), self.pool, binding)
            self._requests[name] = held
        held.binding = binding
        self._holders.check_exclusive(name, binding, request.start, request.stop)
        return held

    def forget(self, request_id: str) -> None:
        """The request has left; rows that the host has not are lost (see `flush`). A request that
        never had a seat is no error."""
        held = self._requests.pop(request_id, None)
        if held is not None:
            _add(self._gone, held)
            self._holders.change(held.binding, None)
            held.discard()
            self._seats.append(held.seat)

    @property
    def num_free_seats(self) -> int:
        """How many more requests can take part in steps."""
        return len(self._seats)

    @property
    def counters(self) -> dict[str, float]:
        """Since the start, a row of several layers counting once in hits, misses and evictions, and
        once a layer in fetched and mirrored rows."""
        total = self.pool.counters | self._gone
        for held in self._requests.values():
            _add(total, held)
        return total

    @property
    def gauges(self) -> dict[str, float]:
        """Now: seats, pages and rows in use, and bytes as allocated. Pages and rows count once for
        the layers of an index group."""
        held = [rows for r in self._requests.values() for rows in r.groups.values()]
        clean, dirty = (sum(r.tail.count(s) for r in held) for s in (CLEAN, DIRTY))
        nbytes, cap = self.pool.nbytes, self.pool.sizes.device_nbytes
        return {
            "seats": float(self.pool.sizes.max_requests),
            "seats_used": float(len(self._requests)),
            "tail_pages": float(clean + dirty),
            "tail_pages_dirty": float(dirty),
            "hot_rows": float(sum(len(r.hot) for r in held)),
            "host_nbytes": float(nbytes.host),
            "device_index_nbytes": float(nbytes.index_pages),
            "device_latent_nbytes": float(nbytes.latent_pool),
            "device_latent_cap_nbytes": float(nbytes.latent_pool if cap is None else cap),
            **self.access.gauges(),
        }

    @property
    def totals(self) -> Mapping[str, float]:
        """Hits, misses and rows of the pool, and what came from other ranks."""
        return {f"hisparse_{name}": n for name, n in self.counters.items()} | self.access.totals()

    def flush(self, request_id: str) -> None:
        """The request's host pages are complete afterwards, as of its last step; those of one
        without a seat are so already."""
        if (held := self._requests.get(request_id)) is not None:
            held.flush()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Carries out `plan_copies`. Requests with a seat that hold a block which is copied are
        flushed first, so the copy has their newest rows, as of their last step."""
        for copy in copies:
            for held in self._requests.values():
                if copy.group == LATENT and copy.source in held.binding.tables[LATENT]:
                    held.flush()
            self.pool.copy_block(copy.group, copy.source, copy.target)

    def plan_reads(
        self,
        which: ShardQueries,
        requests: Sequence[RequestRows],
        group: tuple[str, ...],
        *,
        alone: bool,
    ) -> Reads:
        """Slots for the rows that queries of a step attend to; see `plan_reads`."""
        reads = plan_reads(which, requests, group, alone=alone)
        self._reads.setdefault(group, []).append(reads)
        return reads

    def _settle_reads(self) -> None:
        """If the layers of an index group do not hold the same rows, because a step was broken off,
        all are fetched anew."""
        for group, planned in self._reads.items():
            if not all(reads.is_complete for reads in planned):
                for held in self._requests.values():
                    held.groups[group].hot.forget(0)
        self._reads = {}


def _add(total: dict[str, float], held: RequestRows) -> None:
    for rows in held.groups.values():
        total["hits"] += rows.hits
        total["misses"] += rows.misses
        total["evictions"] += rows.hot.evictions
