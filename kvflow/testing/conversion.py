"""What the two sides of a `Quantize` or `Dequantize` hold: values that a seed names, and their
bytes in either form by the reference encoding, one token at a time."""

import torch
from attrs import field, frozen
from torch import Tensor

from kvflow.kernels.codec import (
    decode_index_key,
    decode_latent,
    encode_index_key,
    encode_latent,
)
from kvflow.layouts.record import Record
from kvflow.layouts.spec import KVCacheSpec
from kvflow.testing.oracle import Cell, tag
from kvflow.transfers.operators import Dequantize, Quantize

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@frozen(eq=False)
class ConversionTags:
    """`held` and `wanted` of `check_operator` for a converting stage. Values span many magnitudes;
    some tokens are all zeros, some hold a NaN or an infinity."""

    stage: Quantize | Dequantize
    seed: int = 0
    _rows: dict[tuple[str, str, int], bytes] = field(init=False, factory=dict)

    def held(self, cell: Cell) -> bytes:
        return self._part("source", cell)

    def wanted(self, cell: Cell) -> bytes:
        return self._part("target", cell)

    def _part(self, side: str, cell: Cell) -> bytes:
        record = self._spec(side)[cell.component].record
        at = record.field_offset(cell.field)
        return self._row(side, cell.component, cell.token)[at : at + len(cell.at)]

    def _spec(self, side: str) -> KVCacheSpec:
        return self.stage.source.spec if side == "source" else self.stage.target.spec

    def _row(self, side: str, name: str, token: int) -> bytes:
        key = (side, name, token)
        if key not in self._rows:
            here, there = (self._spec(s)[name].record for s in ("source", "target"))
            if name not in self.stage.components:
                row = _noise(f"{side} {name}", token, self._spec(side)[name].record.nbytes)
            elif side == "source":
                row = _encode(here, _values(here, there, name, token, self.seed))
            else:
                row = _encode(there, _decode(here, there, self._row("source", name, token)))
            self._rows[key] = row
        return self._rows[key]


def _noise(name: str, token: int, nbytes: int) -> bytes:
    return tag(Cell(0, name, "all", 0, token, 0, (0,) * nbytes))


def _plain_dtype(*records: Record) -> torch.dtype:
    return next(_DTYPES[r.fields[0].dtype] for r in records if r.fields[0].dtype in _DTYPES)


def _values(mine: Record, other: Record, name: str, token: int, seed: int) -> Tensor:
    """float64 [1, size]; what one value becomes in the plain dtype is part of the law's input."""
    sizes = {f.name: f.num_elements for f in mine.fields}
    size = sizes["latent"] + sizes["rope"] if "latent" in sizes else sizes["key"]
    noise = torch.Generator().manual_seed(int.from_bytes(_noise(f"{seed} {name}", token, 7)))
    values = torch.randn(1, size, generator=noise, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-12, 12, (1, 1), generator=noise)
    kind = int(torch.randint(0, 12, (1,), generator=noise))
    at = int(torch.randint(0, size, (1,), generator=noise))
    if kind == 0:
        values.zero_()
    elif kind in (1, 2):
        values[0, at] = torch.nan if kind == 1 else torch.inf
    return values.to(_plain_dtype(mine, other))


def _encode(record: Record, values: Tensor) -> bytes:
    sizes = {f.name: f.num_elements for f in record.fields}
    if "latent" in sizes:
        n = sizes["latent"]
        rows = encode_latent(record, values[:, :n], values[:, n:])
    else:
        rows = encode_index_key(record, values)
    data: bytes = rows[0].numpy().tobytes()
    return data


def _decode(record: Record, other: Record, row: bytes) -> Tensor:
    rows, dtype = (
        torch.frombuffer(bytearray(row), dtype=torch.uint8)[None],
        _plain_dtype(record, other),
    )
    if any(f.name == "latent" for f in record.fields):
        return decode_latent(record, rows, dtype)
    return decode_index_key(record, rows, dtype)
