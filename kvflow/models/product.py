"""Products of rows with matrices: a row's bits are the same however many rows come with it.

A matrix product may add up a row's terms in another order when the number of rows changes. So rows
are multiplied in tiles, every one of the same shape. Two other ways are faster, for few rows and
for many: row by row, and larger tiles. They are taken where they were seen, on this machine and for
matrices of that shape, to give the bits of the tiles. Matrices are kept ``[in, out]`` and
contiguous, with `out` padded to whole lanes: other shapes select kernels that look at alignment.
"""

from collections.abc import Sequence
from functools import cache

import torch
from attrs import evolve, field, frozen
from torch import Tensor

ROW_TILE = 8
"""Rows of one tile: costs little over one row in decode, fills the registers in prefill."""

LARGE_TILE = 64
"""Rows of a larger tile, for which a library rearranges the matrix once."""

FEW = 4
"""So many rows, one by one, cost less than a tile."""

LANE = 32
"""Output columns come in multiples of this, two vectors of the widest registers: functions that
treat what is left over differently have nothing left over."""


@frozen(eq=False)
class Matrices:
    """Matrices of one shape: `values` ``[m, a, b]``. `term_block`: row by row in blocks of so many
    terms has the bits of tiles (0: no block was found to). `is_large`: larger tiles have them."""

    values: Tensor
    term_block: int
    is_large: bool
    _rows: Tensor = field(init=False)
    """All of them, one below the other."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_rows", self.values.flatten(0, 1))

    @classmethod
    def of(cls, values: Tensor) -> "Matrices":
        """Of ``[m, a, b]``, or ``[a, b]`` for one; columns are padded to whole lanes."""
        values = pad_to(values.view(-1, *values.shape[-2:]), LANE, dim=2).contiguous()
        threads = torch.get_num_threads()
        return cls(values, *_same_bits(*values.shape[1:], values.dtype, values.device, threads))

    @classmethod
    def none(cls, like: Tensor) -> "Matrices":
        """No matrices, of the dtype and device of another tensor."""
        return cls(like.new_empty(0, 0, 0), 0, False)

    @classmethod
    def stack(cls, others: Sequence["Matrices"]) -> "Matrices":
        """Those of several, which are of one shape, behind each other."""
        return evolve(others[0], values=torch.cat([other.values for other in others]))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: slice) -> "Matrices":
        """Some of the matrices."""
        return evolve(self, values=self.values[which])

    def __call__(self, x: Tensor) -> Tensor:
        """Every product: x ``[m, n, a]``, or ``[n, a]`` for all matrices -> ``[m, n, b]``."""
        num, num_in, num_out = self.values.shape
        num_rows = x.shape[-2]
        if not self._is_few(num_rows):
            return _by_tiles(x, self.values, self.is_large)
        terms = _terms(num, num_rows, num_in, x.device)
        sums = self._row_by_row(x.expand(num, num_rows, num_in), terms)
        return sums.view(num, num_rows, num_out)

    def one(self, x: Tensor) -> Tensor:
        """The product with the only matrix: x ``[n, a] -> [n, b]``."""
        if not self._is_few(x.shape[0]):
            return _by_tiles(x, self.values, self.is_large)[0]
        return self._row_by_row(x, _terms(1, x.shape[0], x.shape[1], x.device))

    def each(self, x: Tensor, which: Tensor) -> Tensor:
        """Row i times matrix ``which[i]``: x ``[r, a]``, which int64 ``[r]`` -> ``[r, b]``."""
        if not self.term_block:
            return _by_tiles(x[:, None], self.values.index_select(0, which), False)[:, 0]
        num, num_in, _ = self.values.shape
        terms = _terms(num, 1, num_in, x.device).view(num, num_in).index_select(0, which)
        return self._row_by_row(x, terms.view(-1))

    def _is_few(self, num_rows: int) -> bool:
        return num_rows <= FEW and self.term_block > 0

    def _row_by_row(self, x: Tensor, terms: Tensor) -> Tensor:
        """Row i of the result ``[r, b]`` is the sum of the rows ``terms[i * a:(i + 1) * a]`` of all
        matrices, times the `x` beside them: x and terms of ``r * a`` values."""
        num_in, num_out = self.values.shape[1:]
        num_rows, num_blocks = terms.shape[0] // num_in, -(-num_in // self.term_block)
        begins = _begins(num_rows, num_in, self.term_block, x.device)
        sums = row_sums(self._rows, terms, begins, x.reshape(-1))
        return sums if num_blocks == 1 else add_in_order(sums.view(num_rows, num_blocks, num_out))


def pad_to(x: Tensor, multiple: int, *, dim: int = 0) -> Tensor:
    """Zeros appended along `dim` up to a multiple; `x` itself when it already is one."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def add_in_order(x: Tensor) -> Tensor:
    """``[n, k, ...] -> [n, ...]``: the sum over axis 1, first to last."""
    total, *others = x.unbind(1)
    for other in others:
        total = total + other
    return total


def _by_tiles(x: Tensor, values: Tensor, is_large: bool) -> Tensor:
    """x ``[m, n, a]`` or ``[n, a]``, values ``[m, a, b]`` -> ``[m, n, b]``."""
    num, num_in, num_out = values.shape
    num_rows = x.shape[-2]
    x = pad_to(x.contiguous(), ROW_TILE, dim=-2)
    padded = x.shape[-2]
    x = x.expand(num, padded, num_in)
    if padded == ROW_TILE:
        return torch.bmm(x, values)[:, :num_rows]
    out = x.new_empty(num, padded, num_out)
    edge = padded - padded % LARGE_TILE if is_large else 0
    for size, rows in ((LARGE_TILE, slice(0, edge)), (ROW_TILE, slice(edge, padded))):
        for i in range(num if rows.start < rows.stop else 0):
            tiles, into = x[i, rows].view(-1, size, num_in), out[i, rows].view(-1, size, num_out)
            torch.bmm(tiles, values[i].expand(tiles.shape[0], num_in, num_out), out=into)
    return out[:, :num_rows]


def row_sums(table: Tensor, rows: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of rows of a table ``[t, d]``, added one after the other: sum i is of
    ``rows[begins[i]:begins[i + 1]]``, int64 ``[k]``, with the weights beside them."""
    return torch.embedding_bag(table, rows, begins, False, 0, False, weights)[0]


@cache
def _terms(num: int, num_rows: int, num_in: int, device: torch.device) -> Tensor:
    """The rows of all matrices, ``[num * num_in]``, that each row of each product sums."""
    rows = torch.arange(num * num_in, device=device).view(num, 1, num_in)
    return rows.expand(num, num_rows, num_in).flatten()


@cache
def _begins(num_rows: int, num_in: int, term_block: int, device: torch.device) -> Tensor:
    """Where the blocks of terms of each row begin."""
    rows = torch.arange(0, num_rows * num_in, num_in, device=device)
    return (rows[:, None] + torch.arange(0, num_in, term_block, device=device)).flatten()


@cache
def _same_bits(
    num_in: int, num_out: int, dtype: torch.dtype, device: torch.device, num_threads: int
) -> tuple[int, bool]:
    """`Matrices.term_block` and `is_large` of a shape, found by trying."""
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randn(1, LARGE_TILE, num_in, generator=generator, dtype=dtype).to(device)
    values = torch.randn(1, num_in, num_out, generator=generator, dtype=dtype).to(device)
    tiles = _by_tiles(x, values, False)
    is_large = torch.equal(tiles, torch.bmm(x, values))
    terms = _terms(1, ROW_TILE, num_in, device)
    for block in (num_in, *range(16, min(num_in, 512), 16)):
        sums = Matrices(values, block, is_large)._row_by_row(x[0, :ROW_TILE], terms)
        if torch.equal(tiles[0, :ROW_TILE], sums):
            return block, is_large
    return 0, is_large
