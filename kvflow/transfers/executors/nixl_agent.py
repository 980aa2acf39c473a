"""One NIXL agent, made safe: every call under one lock, arguments checked, handles guarded.

What NIXL accepts silently is refused here: index arrays that are not int32, lengths that overflow,
a handle used after its release. NIXL cannot stop a transfer: a `Flight` that has not ended keeps
its handle, and its buffers belong to the writer until it has.
"""

import importlib
import os
import threading
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from kvflow.errors import TransferError

Progress = Literal["none", "poll"]
Op = Literal["READ", "WRITE"]
Index = npt.NDArray[np.int32]
LOCAL = "NIXL_INIT_AGENT"
_SLEEP_US = 100_000
_ADDRESS_END = 2**63


def settle_environment() -> None:
    """Quiets the logs of NIXL and UCX unless the user set their levels. Entry points call this
    before anything imports NIXL; the library itself never does."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")


@frozen(eq=False)
class Nixl:
    """The modules of an installed NIXL and the exceptions it raises (they share no base)."""

    api: ModuleType
    bindings: ModuleType
    errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Imports whichever NIXL package is installed. Raises `TransferError` if there is none."""
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ImportError:
            continue
        names = [n for n in dir(bindings) if n.startswith("nixl") and n.endswith("Error")]
        return Nixl(api, bindings, tuple(getattr(bindings, n) for n in names))
    raise TransferError('NIXL is not installed: pip install "kvflow[nixl]"')


_making = threading.Lock()


def _make_agent(nixl: Nixl, name: str, progress: Progress, params: dict[str, str]) -> Any:
    """An agent in STRICT mode. Its progress thread, if any, sleeps until an event arrives: the
    wrapper of NIXL hardcodes a delay of 0, which burns a core, so the value is replaced on its
    way."""
    base = nixl.bindings.nixlAgentConfig

    class SleepyConfig(base):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> Any:  # noqa: N802 - NIXL's name
            return base.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            base.pthrDelay.__set__(self, _SLEEP_US)

    config = nixl.api.nixl_agent_config(
        backends=[],
        enable_prog_thread=progress == "poll",
        sync_mode=nixl.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    with _making:
        nixl.api.nixlBind.nixlAgentConfig = SleepyConfig
        try:
            agent = nixl.api.nixl_agent(name, config)
        finally:
            nixl.api.nixlBind.nixlAgentConfig = base
    agent.create_backend("UCX", dict(params))
    return agent


@define(eq=False)
class Agent:
    """An agent with a name that no other process, nor a restart of this one, will have."""

    label: str
    progress: Progress = "poll"
    params: dict[str, str] = field(factory=dict)
    nixl: Nixl = field(init=False, factory=load_nixl, repr=False)
    name: str = field(init=False)
    _agent: Any = field(init=False, repr=False)
    _lock: threading.RLock = field(init=False, factory=threading.RLock, repr=False)
    _regions: list[Any] = field(init=False, factory=list, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.progress not in ("none", "poll"):
            raise TransferError(f"progress {self.progress!r}, must be 'none' or 'poll'")
        self.name = f"{self.label}.{uuid.uuid4().hex}"
        self._agent = _make_agent(self.nixl, self.name, self.progress, self.params)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return self.nixl.errors

    def register(self, address: int, nbytes: int) -> None:
        """Makes a region reachable for the peers."""
        check_range(address, nbytes, "region")
        with self._lock:
            region = [(address, nbytes, 0, "")]
            self._regions.append(self._agent.register_memory(region, "DRAM"))

    def metadata(self) -> bytes:
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Trusts `metadata` entirely: its seal must have been checked."""
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        with self._lock:
            try:
                self._agent.remove_remote_agent(name)
            except self.errors:
                return

    def prepare(self, owner: str, table: npt.NDArray[np.uint64]) -> Any:
        """A prepared list from rows (address, length, device, stride, count); `owner` is a peer's
        name or `LOCAL`."""
        _check_array("strided list", table, np.uint64, 5)
        with self._lock:
            return self._agent.prep_xfer_dlist(owner, table, "DRAM")

    def move_prepared(self, op: Op, local: Any, here: Index, remote: Any, there: Index) -> "Flight":
        """Posts a READ of the elements `there` of a peer's list into elements `here` of ours, or a
        WRITE the other way."""
        for name, index in (("local", here), ("remote", there)):
            _check_array(f"{name} index", index, np.int32, None)
        with self._lock:
            return self._post(self._agent.make_prepped_xfer(op, local, here, remote, there))

    def move(
        self,
        op: Op,
        peer: str,
        there: npt.NDArray[np.int64],
        here: npt.NDArray[np.int64],
        nbytes: Any,
    ) -> "Flight":
        """Posts a READ of ``nbytes[i]`` bytes from ``there[i]`` at the peer to ``here[i]``, or a
        WRITE the other way."""
        sides = []
        for at in (here, there):
            table = np.zeros((len(at), 3), np.uint64)
            table[:, 0], table[:, 1] = at, nbytes
            sides.append(table)
        with self._lock:
            local, remote = (self._agent.get_xfer_descs(t, "DRAM") for t in sides)
            if local is None or remote is None:
                raise TransferError(f"NIXL refused {len(there)} descriptors")
            return self._post(self._agent.initialize_xfer(op, local, remote, peer))

    def read(
        self, peer: str, src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64], nbytes: Any
    ) -> "Flight":
        """Posts a READ of ``nbytes[i]`` bytes from ``src[i]`` at the peer to ``dst[i]`` here."""
        return self.move("READ", peer, src, dst, nbytes)

    def _post(self, handle: Any) -> "Flight":
        flight = Flight(self, handle)
        flight.post()
        return flight

    def notify(self, peer: str, message: bytes) -> None:
        with self._lock:
            self._agent.send_notif(peer, message)

    def take_notifs(self) -> list[tuple[str, bytes]]:
        """(sender, message) pairs that have arrived; nothing while another thread is in a call."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            arrived = self._agent.get_new_notifs()
        finally:
            self._lock.release()
        return [(sender, bytes(m)) for sender, messages in arrived.items() for m in messages]

    def close(self) -> None:
        """Deregisters everything and drops the agent. No flight may be under way."""
        with self._lock:
            for region in self._regions:
                self._agent.deregister_memory(region)
            self._regions.clear()
            self._agent = None


@define(eq=False)
class Flight:
    """A posted transfer. `on_end` runs once, when no byte of it can arrive any more."""

    _agent: Agent
    _handle: Any
    on_end: Callable[[], None] | None = None
    _ended: bool = field(init=False, default=False)

    def post(self) -> None:
        try:
            self._settle(self._agent._agent.transfer(self._handle))
        except self._agent.errors:
            self._finish()
            raise

    def poll(self) -> bool:
        """True once every byte is here. Raises NIXL's exception if the transfer failed."""
        with self._agent._lock:
            if not self._ended:
                try:
                    self._settle(self._agent._agent.check_xfer_state(self._handle))
                except self._agent.errors:
                    self._finish()
                    raise
            return self._ended

    def has_ended(self) -> bool:
        """True once no byte of it can arrive any more, whether it worked or not."""
        try:
            return self.poll()
        except self._agent.errors:
            return True

    def when_ended(self, action: Callable[[], None]) -> None:
        """Runs `action` at the end, or now if that has passed."""
        with self._agent._lock:
            if not self._ended:
                self.on_end = action
                return
        action()

    def _settle(self, state: str) -> None:
        if state == "DONE":
            self._finish()
        elif state != "PROC":
            raise TransferError(f"NIXL reports transfer state {state!r}")

    def _finish(self) -> None:
        self._ended = True
        self._handle.release()
        self._handle = None
        if self.on_end is not None:
            action, self.on_end = self.on_end, None
            action()


def check_range(address: int, nbytes: int, what: str) -> None:
    """Raises `TransferError` unless ``[address, address + nbytes)`` is a non-empty range of
    addresses; NIXL itself accepts one that overflows."""
    if min(address, nbytes) <= 0 or address + nbytes >= _ADDRESS_END:
        raise TransferError(
            f"{what} of {nbytes} bytes at {address:#x}: must be a range below {_ADDRESS_END:#x}"
        )


def _check_array(what: str, array: Any, dtype: Any, width: int | None) -> None:
    shaped = (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.flags.c_contiguous
        and array.size > 0
        and (array.ndim == 1 if width is None else array.ndim == 2 and array.shape[1] == width)
    )
    if not shaped:
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else repr(array)
        raise TransferError(f"{what} is {got}, must be a contiguous, non-empty {np.dtype(dtype)}")
