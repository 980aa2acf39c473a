"""What every byte of some caches must be, and the comparison with what it is."""

from collections.abc import Mapping

import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.testing.oracle import Cell
from kvflow.transfers.executors.base import RankCache

Caches = Mapping[int, RankCache]


class LawError(AssertionError):
    """An executor moved a wrong byte, left one out, or touched one it did not claim."""


@frozen(eq=False)
class _Region:
    """One memory of one or more caches, and what it must hold."""

    memory: Tensor
    expected: bytearray


@frozen(eq=False)
class Images:
    """Every distinct memory of some caches by its address. It must stay as it is now, but for what
    is `put`."""

    caches: Caches
    _regions: Mapping[int, _Region] = field(init=False)
    _cells: list[Cell] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        views = [v for cache in self.caches.values() for v in cache.pages.values()]
        memories = {v.memory.data_ptr(): v.memory for v in views}
        regions = {at: _Region(m, bytearray(_bytes(m))) for at, m in memories.items()}
        object.__setattr__(self, "_regions", regions)

    def put(self, cell: Cell, data: bytes) -> None:
        """From now on the bytes of `cell` must be `data`."""
        region = self._regions[self._address(cell)]
        for at, value in zip(self._places(cell), data, strict=True):
            region.expected[at] = value
        self._cells.append(cell)

    def write(self) -> None:
        """Makes every byte what it must be."""
        for region in self._regions.values():
            region.memory.copy_(torch.frombuffer(region.expected, dtype=torch.uint8))

    def compare(self, side: str) -> None:
        """Raises `LawError` naming the first byte that is not what it must be."""
        for address, region in self._regions.items():
            actual = _bytes(region.memory)
            if actual == bytes(region.expected):
                continue
            pairs = enumerate(zip(actual, region.expected, strict=True))
            at = next(i for i, (a, b) in pairs if a != b)
            raise LawError(
                f"{side} {self._name(address, at)}: byte is {actual[at]:#04x}, "
                f"must be {region.expected[at]:#04x}"
            )

    def _address(self, cell: Cell) -> int:
        return self.caches[cell.rank].pages[cell.component].memory.data_ptr()

    def _places(self, cell: Cell) -> list[int]:
        view = self.caches[cell.rank].pages[cell.component]
        return [view.offset + cell.block_id * view.block_stride + i for i in cell.at]

    def _name(self, address: int, at: int) -> str:
        for cell in self._cells:
            if self._address(cell) == address and at in (places := self._places(cell)):
                return (
                    f"rank {cell.rank}, component {cell.component}, token {cell.token}, field "
                    f"{cell.field}, head {cell.head}, byte {places.index(at)} of {len(places)}"
                )
        owners = [
            f"rank {cache.rank}, component {name}"
            for cache in self.caches.values()
            for name, view in cache.pages.items()
            if view.memory.data_ptr() == address
        ]
        return f"{' / '.join(owners)}, byte {at} of the region, which no claimed token owns"


def _bytes(memory: Tensor) -> bytes:
    data: bytes = memory.cpu().numpy().tobytes()
    return data
