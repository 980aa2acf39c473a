"""The memory of the host tier: units of whole token blocks in one canonical layout.

One anonymous mapping, which the front creates and every rank attaches to. It has no name in a file
system, so nothing is left behind however a process ends. First come the labels, 32 bytes a unit,
which say what lies in it, then the units: the pages of all components one behind the other.
"""

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from kvflow.errors import CapacityError, TransferError
from kvflow.kernels.pages import PageView
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.layouts.spec import KVCacheSpec
from kvflow.transfers.executors.base import RankCache

LABEL_NBYTES = 32
_ALIGNMENT = 4096
GROUP = "units"


def unit_layout(spec: KVCacheSpec, unit_size: int, start: int = 0) -> KVLayout:
    """How a tier holds the positions from `start` on: every component once, in units of
    `unit_size` tokens, whatever the engine's own layout is. A table's entry 0 holds `start`."""
    return KVLayout.uniform(spec, Placement.simple(Replicated(start)), Paged(unit_size), GROUP)


def unit_nbytes(spec: KVCacheSpec, unit_size: int) -> int:
    """Bytes of one unit: the page of every component."""
    return sum(component.record.page_pitch(unit_size) for component in spec.components)


def units_that_fit(spec: KVCacheSpec, unit_size: int, nbytes: int) -> int:
    """How many units a mapping of `nbytes` holds beside their labels. Raises `CapacityError` if it
    is none."""
    one = unit_nbytes(spec, unit_size)
    count = (nbytes - _ALIGNMENT) // (one + LABEL_NBYTES)
    if count < 1:
        raise CapacityError(
            f"a host tier of {nbytes} bytes: one unit of {unit_size} tokens has {one} bytes, and "
            f"labels take {_ALIGNMENT}"
        )
    return count


@frozen(eq=False)
class UnitMemory:
    """Units in memory that several processes map. `name` opens it elsewhere while `fd` is open, in
    the process that has created it; `units` uint8 [num_units, unit bytes] and `labels` uint8
    [num_units, 32] are views."""

    spec: KVCacheSpec
    unit_size: int
    num_units: int
    name: str
    fd: int | None
    labels: npt.NDArray[np.uint8]
    units: torch.Tensor
    cache: RankCache

    @classmethod
    def create(cls, spec: KVCacheSpec, unit_size: int, nbytes: int) -> "UnitMemory":
        """As many units as fit into `nbytes`; pages of memory are taken as they are written.
        Raises `CapacityError` if there is no room for one."""
        num_units = units_that_fit(spec, unit_size, nbytes)
        fd = os.memfd_create("kvflow-host-tier", os.MFD_CLOEXEC)
        os.ftruncate(fd, _mapping_nbytes(spec, unit_size, num_units))
        return cls._map(spec, unit_size, num_units, f"/proc/{os.getpid()}/fd/{fd}", fd, fd)

    @classmethod
    def attach(
        cls,
        name: str,
        spec: KVCacheSpec,
        unit_size: int,
        num_units: int,
        *,
        writable: bool = True,
    ) -> "UnitMemory":
        """The memory that another process, or another thread, has created. Where it is not
        `writable` a write ends the process. Raises `TransferError` if it is gone or of another
        size."""
        try:
            fd = os.open(name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the host tier {name} cannot be opened: {error}") from error
        try:
            actual, need = os.fstat(fd).st_size, _mapping_nbytes(spec, unit_size, num_units)
            if actual != need:
                raise TransferError(
                    f"the host tier {name} has {actual} bytes, {num_units} units of {unit_size} "
                    f"tokens need {need}: the two sides describe different rows"
                )
            return cls._map(spec, unit_size, num_units, name, fd, None, writable)
        finally:
            os.close(fd)  # the mapping does without

    @classmethod
    def _map(
        cls,
        spec: KVCacheSpec,
        unit_size: int,
        num_units: int,
        name: str,
        fd: int,
        kept: int | None,
        writable: bool = True,
    ) -> "UnitMemory":
        whole = torch.frombuffer(_mapped(fd, writable), dtype=torch.uint8)
        start, one = _units_start(num_units), unit_nbytes(spec, unit_size)
        labels = whole[: num_units * LABEL_NBYTES].numpy().reshape(num_units, LABEL_NBYTES)
        payload = whole[start : start + num_units * one]
        pages, at = {}, 0
        for component in spec.components:
            record = component.record
            pages[component.name] = PageView(payload, record, unit_size, one, at, num_units)
            at += record.page_pitch(unit_size)
        units = payload.view(num_units, one)
        return cls(spec, unit_size, num_units, name, kept, labels, units, RankCache(0, pages))

    def label(self, unit: int) -> bytes:
        """What lies in a unit, by its writer's word."""
        return bytes(self.labels[unit])

    def set_label(self, unit: int, label: bytes | None) -> None:
        """None says that nothing provable lies in the unit."""
        self.labels[unit] = np.frombuffer(label or bytes(LABEL_NBYTES), np.uint8)

    def close(self) -> None:
        """Nobody can attach any more, if this is its creator; the memory goes with its last
        user."""
        if self.fd is not None:
            os.close(self.fd)


def _mapped(fd: int, writable: bool) -> object:
    """A mapping of a whole file. torch takes no buffer that says it is read-only, so such a mapping
    is shown to it as plain bytes, which keep the mapping."""
    if writable:
        return mmap.mmap(fd, 0)
    bytes_ = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
    shown = (ctypes.c_uint8 * len(bytes_)).from_address(bytes_.ctypes.data)
    shown.mapping = bytes_  # type: ignore[attr-defined]
    return shown


def _units_start(num_units: int) -> int:
    return -(-num_units * LABEL_NBYTES // _ALIGNMENT) * _ALIGNMENT


def _mapping_nbytes(spec: KVCacheSpec, unit_size: int, num_units: int) -> int:
    return _units_start(num_units) + num_units * unit_nbytes(spec, unit_size)
