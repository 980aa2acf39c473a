"""Products: right, and the same bits for a row whatever surrounds it, however it is computed."""

import pytest
import torch

from kvflow.models.ops import Linear
from kvflow.models.product import FEW, LARGE_TILE, Matrices, add_in_order, pad_to
from kvflow.models.rope import Rotation

SHAPES = [(64, 320), (48, 7), (1024, 256), (256, 1024), (512, 16), (33, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_linear(dtype: torch.dtype, num_in: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(num_in)
    weight = torch.randn(num_out, num_in, generator=generator, dtype=dtype)
    linear = Linear.from_hf(weight)
    x = torch.randn(LARGE_TILE + 40, num_in, generator=generator, dtype=dtype)
    got = linear(x)
    torch.testing.assert_close(got, x @ weight.t(), rtol=1e-4, atol=1e-3)
    for _ in range(3):
        order = torch.randperm(len(x), generator=generator)
        assert torch.equal(linear(x[order]), got[order])
    for row in (0, 7, 39, len(x) - 1):
        assert torch.equal(linear(x[row : row + 1])[0], got[row])
    for num in range(20):
        assert torch.equal(linear(x[:num]), got[:num])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_several_matrices(dtype: torch.dtype) -> None:
    values = torch.randn(3, 40, 32, dtype=dtype)
    matrices = Matrices.of(values)
    for num in (0, 1, FEW, 8, 16, 48, LARGE_TILE):
        x = torch.randn(3, num, 40, dtype=dtype)
        got = matrices(x)
        torch.testing.assert_close(got, torch.einsum("hna,hab->hnb", x, values))
        assert torch.equal(matrices[1:2](x[1:2]), got[1:2])
        assert torch.equal(matrices(x[:, 1:9]), got[:, 1:9])
        assert torch.equal(matrices(x[0]), matrices(x[:1].expand(3, num, 40)))
        which = torch.arange(num) % 3
        rows = torch.arange(num)
        assert torch.equal(matrices.each(x[which, rows], which), got[which, rows])


def test_other_ways_are_taken_only_where_they_agree() -> None:
    """Two ways that add up the terms otherwise than tiles are found out."""
    values = torch.randn(1, 320, 64)
    found = Matrices.of(values)
    other = Matrices(values, 48, found.is_large)
    x = torch.randn(8, 320)
    assert not torch.equal(other(x[:1])[0], found(x)[0, :1])
    assert torch.equal(found(x[:1])[0], found(x)[0, :1])


def test_padding() -> None:
    x = torch.ones(3, 5)
    assert pad_to(x, 8).shape == (8, 5)
    assert pad_to(x, 8).sum() == 15
    assert pad_to(x, 5, dim=1) is x


def test_sums_are_in_order() -> None:
    x = torch.tensor([[1.0, 2.0**-24, 2.0**-24], [2.0**-24, 2.0**-24, 1.0]])
    assert add_in_order(x).tolist() == [1.0, 1.0 + 2.0**-23]


def test_rotation_is_of_adjacent_pairs() -> None:
    """Against complex multiplication by exp(i * angle)."""
    positions = torch.tensor([0, 1, 9000])
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    got = Rotation.at(positions, 8, 1e4, torch.float64)(x.transpose(0, 1)).transpose(0, 1)
    turn = torch.polar(
        torch.ones(3, 4).double(),
        positions[:, None] * 1e4 ** -(torch.arange(4).double() / 4),
    )
    want = torch.view_as_real(torch.view_as_complex(x.view(3, 2, 4, 2)) * turn[:, None])
    torch.testing.assert_close(got, want.flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rotated_row_has_the_same_bits_whatever_comes_with_it(dtype):
    """Also where three threads divide the rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for dim in (2, 6, 64):
            x = torch.randn(4, 1500, dim, dtype=dtype)
            positions = torch.arange(1500) * 3
            together = Rotation.at(positions, dim, 1e4, dtype)(x)
            for i in (0, 1, 333, 500, 666, 999, 1499):
                alone = Rotation.at(positions[i : i + 1], dim, 1e4, dtype)(x[:, i : i + 1])
                assert torch.equal(alone[:, 0], together[:, i])
    finally:
        torch.set_num_threads(before)
