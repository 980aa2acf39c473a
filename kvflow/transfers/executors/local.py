"""LocalEndpoint: the endpoint protocol between the threads of one process.

Endpoints meet in a `LocalFabric`, a value that whoever builds a world hands to all of them. A
transfer writes on a thread of its own, so it can miss its deadline and go on writing, as a network
would.
"""

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping

from attrs import define, field, frozen

from kvflow.errors import PlanError, TransferError
from kvflow.kernels.rows import PageView
from kvflow.transfers.executors.base import RankCache, TransferReport, check_pages
from kvflow.transfers.executors.seal import digest_rows, seal, unseal
from kvflow.transfers.executors.strided import move_runs
from kvflow.transfers.lower import BoundPlan, SlotRuns
from kvflow.transfers.plan import PlanPart


@define(eq=False)
class LocalFabric:
    """Where endpoints of one process find each other. Whoever made it closes it at the end."""

    _key: bytes = field(init=False, factory=lambda: secrets.token_bytes(32), repr=False)
    _members: dict[str, "LocalEndpoint"] = field(init=False, factory=dict)
    _changed: threading.Condition = field(init=False, factory=threading.Condition, repr=False)
    closed: bool = field(init=False, default=False)

    def join(self, endpoint: "LocalEndpoint") -> bytes:
        """Makes an endpoint known; the blob finds it again."""
        self._members[endpoint.name] = endpoint
        return seal(self._key, endpoint.name.encode())

    def leave(self, name: str) -> None:
        self._members.pop(name, None)

    def find(self, blob: bytes) -> str:
        """The name in a blob. Raises `TransferError` for a bad seal or one that has left."""
        name = unseal(self._key, blob).decode()
        self.cache_of(name)
        return name

    def cache_of(self, name: str) -> RankCache:
        """Raises `TransferError` if the endpoint has left."""
        if self.closed or (member := self._members.get(name)) is None:
            raise TransferError(f"{name} is closed or was never part of this fabric")
        return member.cache

    def end(self, over: threading.Event) -> None:
        """A transfer is over."""
        with self._changed:
            over.set()
            self._changed.notify_all()

    def wait(self, over: threading.Event, timeout: float) -> bool:
        """Whether a transfer is over within `timeout` seconds, or before the fabric closes."""
        with self._changed:
            self._changed.wait_for(lambda: over.is_set() or self.closed, timeout)
        return over.is_set()

    def close(self) -> None:
        """Recalls every transfer: whoever waits for one raises `TransferError` at once, and it
        stops at its next move. Its thread keeps both caches alive until then."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


@frozen(eq=False)
class _Move:
    """One component on one link, between two endpoints by name."""

    component: str
    source: str
    target: str
    runs: SlotRuns


@define(eq=False)
class LocalEndpoint:
    """Implements `Endpoint` for caches that all threads of the process can reach.

    `gate` is called with the number of moves done so far before each move (one component of one
    link), and once more after the last: tests hold a transfer there.
    """

    cache: RankCache
    fabric: LocalFabric
    gate: Callable[[int], None] | None = None
    name: str = field(init=False)
    _peers: set[str] = field(init=False, factory=set)
    _late: tuple[threading.Thread, ...] = field(init=False, default=())
    _closed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.name = f"rank{self.cache.rank}.{uuid.uuid4().hex}"
        self.fabric.join(self)

    def export(self) -> bytes:
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        return self.fabric.join(self)

    def connect(self, blob: bytes) -> str:
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        name = self.fabric.find(blob)
        self._peers.add(name)
        return name

    def pull(
        self,
        bound: BoundPlan,
        dst_rank: int,
        peers: Mapping[int, str],
        *,
        timeout: float,
        verify: bool = False,
    ) -> TransferReport:
        return self._transfer(bound, dst_rank, peers, timeout, verify, pull=True)

    def push(
        self,
        bound: BoundPlan,
        src_rank: int,
        peers: Mapping[int, str],
        *,
        timeout: float,
        verify: bool = False,
    ) -> TransferReport:
        """See `Pusher.push`."""
        return self._transfer(bound, src_rank, peers, timeout, verify, pull=False)

    def _transfer(
        self,
        bound: BoundPlan,
        rank: int,
        peers: Mapping[int, str],
        timeout: float,
        verify: bool,
        *,
        pull: bool,
    ) -> TransferReport:
        begin = time.monotonic()
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        if rank != self.cache.rank:
            word = "pull" if pull else "push"
            raise TransferError(f"a {word} for rank {rank} at the cache of {self.cache.rank}")
        moves, num_links = self._moves(bound, peers, pull=pull)
        if moves:
            self._write(moves, timeout)
        if verify:
            self._verify(moves)
        return TransferReport(
            plan_digest=bound.plan.digest,
            nbytes=sum(map(self._nbytes, moves)),
            num_descriptors=len(moves),
            num_links=num_links,
            strategies=("copy",) if moves else (),
            seconds=time.monotonic() - begin,
            verified=True if verify else None,
        )

    def _moves(
        self, bound: BoundPlan, peers: Mapping[int, str], *, pull: bool
    ) -> tuple[list[_Move], int]:
        """Every move of the plan that begins or ends here, both ends proven to be there."""
        moves, ranks, here = [], set(), self.cache.rank
        for part, rank, runs in bound.links_to(here) if pull else bound.links_from(here):
            if peers.get(rank) not in self._peers:
                word = "read" if pull else "written"
                raise TransferError(
                    f"rank {rank} is {word}, but {peers.get(rank)} is not connected"
                )
            there = self.fabric.cache_of(peers[rank])
            if there.rank != rank:
                raise TransferError(f"{peers[rank]} is named for rank {rank}, it is {there.rank}")
            for name in part.components:
                if name not in there.pages or name not in self.cache.pages:
                    raise TransferError(f"component {name!r} is missing at one side")
                self._check_pages(bound, part, name, there, pull=pull)
                ends = (peers[rank], self.name) if pull else (self.name, peers[rank])
                moves.append(_Move(name, *ends, runs))
            ranks.add(rank)
        return moves, len(ranks)

    def _check_pages(
        self, bound: BoundPlan, part: PlanPart, name: str, there: RankCache, *, pull: bool
    ) -> None:
        source, target = (there, self.cache) if pull else (self.cache, there)
        try:
            for side, cache, binding, group in (
                ("source", source, bound.src, part.src_group),
                ("target", target, bound.dst, part.dst_group),
            ):
                check_pages(cache, binding, group, name, f"the {side}", cache.rank)
        except PlanError as error:
            raise TransferError(str(error)) from error

    def _write(self, moves: list[_Move], timeout: float) -> None:
        failure: list[Exception] = []
        over = threading.Event()

        def work() -> None:
            try:
                for done, move in enumerate(moves):
                    self._pass(done)
                    move_runs(move.runs, *self._ends(move))
                self._pass(len(moves))
            except Exception as e:  # carried to whoever waits
                failure.append(e)
            finally:
                self.fabric.end(over)

        writer = threading.Thread(target=work, name=f"transfer-{self.name}", daemon=True)
        writer.start()
        if not self.fabric.wait(over, timeout):
            # only who waits assigns, `quiesced` is asked on other threads
            self._late = (*(w for w in self._late if w.is_alive()), writer)
            why = "were recalled" if self.fabric.closed else f"did not end within {timeout:.3f} s"
            raise TransferError(f"{len(moves)} moves {why}")
        if failure:
            raise TransferError(f"the transfer stopped: {failure[0]}") from failure[0]

    def _pass(self, num_done: int) -> None:
        if self.gate is not None:
            self.gate(num_done)

    def _verify(self, moves: list[_Move]) -> None:
        for move in moves:
            src, dst = move.runs.expand()
            source, target = self._ends(move)
            theirs = digest_rows(source, src, move.runs.src_heads)
            mine = digest_rows(target, dst, move.runs.dst_heads)
            if theirs != mine:
                raise TransferError(
                    f"{move.component} from {move.source} to {move.target}: source digest "
                    f"{theirs.hex()}, target {mine.hex()}"
                )

    def _nbytes(self, move: _Move) -> int:
        row = self._ends(move)[1].record.row_nbytes(move.runs.dst_heads)
        return move.runs.num_tokens * row

    def _ends(self, move: _Move) -> tuple[PageView, PageView]:
        source, target = (self.fabric.cache_of(name) for name in (move.source, move.target))
        return source.pages[move.component], target.pages[move.component]

    def quiesced(self) -> bool:
        return not any(w.is_alive() for w in self._late)

    def close(self) -> None:
        """A transfer that others still read from this cache fails at its next move."""
        self._closed = True
        self.fabric.leave(self.name)
