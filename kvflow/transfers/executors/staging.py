"""A staging area: bytes of one registered region, lent out in slices."""

import threading

from attrs import define, field
from torch import Tensor

from kvflow.errors import CapacityError
from kvflow.kernels.region import region_memory

ALIGNMENT = 64


@define(eq=False)
class StagingArea:
    """`capacity` bytes lent first-fit, so that what is used again is warm. Threads may share it."""

    capacity: int
    memory: Tensor = field(init=False, repr=False)
    _used: dict[int, int] = field(init=False, factory=dict)
    _changed: threading.Condition = field(init=False, factory=threading.Condition)

    def __attrs_post_init__(self) -> None:
        if self.capacity < ALIGNMENT:
            raise CapacityError(f"staging of {self.capacity} bytes, must be at least {ALIGNMENT}")
        self.memory = region_memory(self.capacity, fill=None)

    @property
    def num_lent(self) -> int:
        """Slices that are lent out now."""
        with self._changed:
            return len(self._used)

    def lend(self, nbytes: int, alignment: int = ALIGNMENT) -> int | None:
        """Offset of a free slice, a multiple of `alignment`; None if no gap is large enough now.
        Raises `CapacityError` for more than there ever is."""
        if not 0 < nbytes <= self.capacity:
            raise CapacityError(f"a slice of {nbytes} bytes from staging of {self.capacity}")
        with self._changed:
            start = 0
            for offset in sorted(self._used):
                if offset - start >= nbytes:
                    break
                start = -(-(offset + self._used[offset]) // alignment) * alignment
            if self.capacity - start < nbytes:
                return None
            self._used[start] = nbytes
            return start

    def wait_lend(self, nbytes: int, timeout: float, alignment: int = ALIGNMENT) -> int:
        """`lend` as soon as it fits. Raises `CapacityError` after `timeout` seconds."""
        with self._changed:
            offset: int | None = None

            def fits() -> bool:
                nonlocal offset
                offset = self.lend(nbytes, alignment)
                return offset is not None

            self._changed.wait_for(fits, timeout)
            if offset is None:
                raise CapacityError(
                    f"no {nbytes} of {self.capacity} staging bytes became free in {timeout:.3f} s"
                )
            return offset

    def give_back(self, offset: int) -> None:
        """Ends a loan; a second time it does nothing."""
        with self._changed:
            self._used.pop(offset, None)
            self._changed.notify_all()

    def slice(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the area."""
        return self.memory[offset : offset + nbytes]
