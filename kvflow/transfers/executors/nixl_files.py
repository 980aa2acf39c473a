"""NixlFiles: memory to files and back by NIXL's POSIX backend."""

import threading
import time
import uuid
from typing import Any

from attrs import define, field
from torch import Tensor

from kvflow.errors import TransferError
from kvflow.transfers.executors.nixl_agent import Nixl, check_range, load_nixl

_POLL_S = 50e-6


@define(eq=False)
class NixlFiles:
    """Implements `FileMover`. One agent without progress thread; calls of several threads are
    under way at the same time. Raises `TransferError` without NIXL or its POSIX plugin."""

    _nixl: Nixl = field(init=False, factory=load_nixl, repr=False)
    _name: str = field(init=False, factory=lambda: f"files.{uuid.uuid4().hex}")
    _agent: Any = field(init=False, repr=False)
    _lock: threading.Lock = field(init=False, factory=threading.Lock, repr=False)

    def __attrs_post_init__(self) -> None:
        config = self._nixl.api.nixl_agent_config(backends=[], enable_prog_thread=False)
        self._agent = self._nixl.api.nixl_agent(self._name, config)
        try:
            self._agent.create_backend("POSIX", {})
        except self._nixl.errors as error:
            raise TransferError(f"NIXL has no POSIX backend here: {error!r}") from error

    def write(self, fd: int, offset: int, data: Tensor) -> None:
        """See `FileMover.write`."""
        self._move("WRITE", fd, offset, data)

    def read(self, fd: int, offset: int, data: Tensor) -> None:
        """See `FileMover.read`."""
        self._move("READ", fd, offset, data)

    def _move(self, op: str, fd: int, offset: int, data: Tensor) -> None:
        address, nbytes = data.data_ptr(), data.numel()
        check_range(address, nbytes, "memory")
        try:
            with self._lock:
                memory = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
                file = self._agent.register_memory([(offset, nbytes, fd, "")], "FILE")
                here = self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(offset, nbytes, fd)], "FILE")
                handle = self._agent.initialize_xfer(op, here, there, self._name)
            try:
                self._finish(handle)
            finally:
                with self._lock:
                    handle.release()
                    self._agent.deregister_memory(file)
                    self._agent.deregister_memory(memory)
        except self._nixl.errors as error:
            raise TransferError(f"{op} of {nbytes} bytes at {offset} failed: {error!r}") from error

    def _finish(self, handle: Any) -> None:
        """Until no byte can move any more: NIXL cannot stop a transfer."""
        with self._lock:
            state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"NIXL reports transfer state {state!r}")
