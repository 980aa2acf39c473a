"""Triton's interpreter made strict, for tests only.

The interpreter of Triton 3.9 rounds narrow floats wrongly, and it reads and writes anywhere
without a word. `exact_casts` replaces the first, `watch` ends the second. Import this only in a
process that had TRITON_INTERPRET=1 before triton was first imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


class MemoryFaultError(AssertionError):
    """A kernel touched a byte that is not its own."""


def _cast(data, source, target, rounding):
    """What `cvt.rn` does on sm_90, saturating for e4m3 (torch's casts do the same)."""
    in_np, in_torch = _BITS[source.primitive_bitwidth // 8]
    out_np, out_torch = _BITS[target.primitive_bitwidth // 8]
    bits = torch.from_numpy(np.array(data).view(in_np).view(f"i{in_np().itemsize}").ravel())
    bits = bits.view(in_torch)
    cast = bits.view(_TORCH[source]).to(torch.float32).to(_TORCH[target])
    return cast.view(out_torch).numpy().view(out_np).reshape(np.shape(data))


@contextmanager
def exact_casts() -> Iterator[None]:
    """Correct conversions between float32, float16, bfloat16 and e4m3 inside this context."""
    stock = interpreter._convert_float
    interpreter._convert_float = _cast
    try:
        yield
    finally:
        interpreter._convert_float = stock


class _Region:
    """One tensor's bytes with, per byte, the program that last wrote and last read it."""

    def __init__(self, tensor: Tensor, writable: bool) -> None:
        assert tensor.is_contiguous()
        self.start = tensor.data_ptr()
        self.end = self.start + tensor.numel() * tensor.element_size()
        self.writable = writable
        self.writer = np.zeros(self.end - self.start, np.int64)
        self.reader = np.zeros(self.end - self.start, np.int64)


class _Watch:
    def __init__(self, regions: list[_Region]) -> None:
        self.regions = regions

    def touch(self, what: str, pointers, mask) -> None:
        """Check the live lanes of one load or store, then note who touched which byte."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        address = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data)].astype(np.int64)
        if (address % size).any():
            raise MemoryFaultError(f"{what}: address is no multiple of the element's {size} bytes")
        x, y, z = interpreter.interpreter_builder.grid_idx
        _, ny, nz = interpreter.interpreter_builder.grid_dim
        program = (x * ny + y) * nz + z + 1
        left = len(address)
        for region in self.regions:
            mine = address[(address >= region.start) & (address + size <= region.end)]
            left -= len(mine)
            if len(mine):
                at = (mine[:, None] - region.start + np.arange(size)).ravel()
                self._note(what, region, at, program)
        if left:
            raise MemoryFaultError(
                f"{what}: {left} of {len(address)} lanes lie outside every tensor"
            )

    def _note(self, what: str, region: _Region, at, program: int) -> None:
        def others(seen) -> bool:
            return bool(((seen != 0) & (seen != program)).any())

        if others(region.writer[at]):
            raise MemoryFaultError(f"{what}: race with a store of another program")
        if what == "load":
            region.reader[at] = program
            return
        if not region.writable:
            raise MemoryFaultError("store: into a tensor that is only read")
        if others(region.reader[at]):
            raise MemoryFaultError("store: race with a load of another program")
        if len(np.unique(at)) != len(at):
            raise MemoryFaultError("store: two lanes of one store write the same byte")
        region.writer[at] = program


@contextmanager
def watch(*, reads: list[Tensor], writes: list[Tensor]) -> Iterator[None]:
    """Within this context a kernel may load from all, and store to `writes` only; each byte is
    stored by one program, once per store, and not read by another. One launch per context."""
    watcher = _Watch([_Region(t, False) for t in reads] + [_Region(t, True) for t in writes])
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        watcher.touch("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        watcher.touch("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
