"""Products on fixed tiles: right, and the same bits for a row whatever surrounds it."""

import pytest
import torch

from kvflow.models.ops import ROW_TILE, Linear, pad_rows, pad_to, per_head
from kvflow.models.rope import Rotation

SHAPES = [(64, 320), (48, 7), (1024, 256), (256, 1024), (512, 16), (33, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_linear(dtype: torch.dtype, num_in: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(num_in)
    weight = torch.randn(num_out, num_in, generator=generator, dtype=dtype)
    linear = Linear.from_hf(weight)
    x = torch.randn(5 * ROW_TILE, num_in, generator=generator, dtype=dtype)
    got = linear(x)
    torch.testing.assert_close(got, x @ weight.t(), rtol=1e-4, atol=1e-3)
    for _ in range(3):
        order = torch.randperm(len(x), generator=generator)
        assert torch.equal(linear(x[order]), got[order])
    for row in (0, 7, 39):
        assert torch.equal(linear(pad_rows(x[row : row + 1]))[0], got[row])
    assert linear(x[:0]).shape == (0, num_out)


def test_per_head() -> None:
    weight = torch.randn(3, 5, 8).double()
    for num_rows in (0, 8, 16, 48):
        x = torch.randn(3, num_rows, 5).double()
        got = per_head(x, weight)
        torch.testing.assert_close(got, torch.einsum("hna,hab->hnb", x, weight))
        assert torch.equal(per_head(x[1:2], weight[1:2]), got[1:2])
        if num_rows:
            assert torch.equal(per_head(x[:, 8:16], weight), got[:, 8:16])
        shared = torch.einsum("na,hab->hnb", x[0], weight)
        torch.testing.assert_close(per_head(x[0], weight), shared)


def test_padding() -> None:
    x = torch.ones(3, 5)
    assert pad_rows(x).shape == (ROW_TILE, 5)
    assert pad_rows(x).sum() == 15
    assert pad_to(x, 5, dim=1) is x


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
