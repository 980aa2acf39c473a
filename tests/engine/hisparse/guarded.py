"""Pools in memory whose pages the system guards: reading where nobody may read ends the process."""

import contextlib
import ctypes
import mmap

import torch
from attrs import define, field

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


def protect(address, nbytes, access):
    """mprotect over whole pages."""
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access):
        raise OSError(ctypes.get_errno(), "mprotect")


@define(eq=False)
class GuardedPool:
    """An anonymous mapping. The bytes handed out end where a page ends, and the next page can be
    neither read nor written: nothing behind the last byte exists."""

    memory: torch.Tensor = field(init=False, default=None)
    nbytes: int = field(init=False, default=0)
    _map: mmap.mmap = field(init=False, default=None)
    _span: int = field(init=False, default=0)

    def allocate(self, nbytes):
        page = mmap.PAGESIZE
        self._span = -(-nbytes // page) * page
        self._map = mmap.mmap(-1, self._span + page)
        self.nbytes = nbytes
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = whole[self._span - nbytes : self._span]
        protect(self.address + self._span, page, NO_ACCESS)
        return self.memory

    @property
    def address(self):
        return self.memory.data_ptr() - (self._span - self.nbytes)

    def close_to_all(self):
        protect(self.address, self._span, NO_ACCESS)

    def open_to_all(self):
        protect(self.address, self._span, READ_WRITE)

    @contextlib.contextmanager
    def window(self):
        """Accessible within."""
        self.open_to_all()
        try:
            yield
        finally:
            self.close_to_all()
