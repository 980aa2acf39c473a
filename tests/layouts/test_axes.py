"""Axes against dense arrays: what steps how far, which page order is left, what is refused."""

import numpy as np
import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.catalogue.axes import place_axes

SIZES = {"L": 3, "B": 5, "v": 2, "w": 4, "t": 8, "h": 2, "e": 6, "f": 1}


def dense_strides(axes: list[str], unit: int) -> dict[str, int]:
    """Of numpy's C-contiguous array with these axes."""
    array = np.empty([SIZES[a] for a in axes], f"V{unit}")
    return dict(zip(axes, array.strides, strict=True))


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("L B t h e", "t h e"),  # holes before the first digit are no part of a page
        ("B w L h v t e", "h _2 t e"),
        ("B t L h v e", "t _3 h _2 e"),
        ("t B e L", "t _5 e _3"),
        ("L w t e", "t e"),
    ],
)
def test_axes_step_like_a_dense_array(text: str, order: str) -> None:
    placed = place_axes(text, SIZES, 2, 1)
    axes = text.split()
    strides = dense_strides(axes, 2)
    assert placed.strides == {a: strides[a] for a in axes if a in "LBvw"}
    assert placed.order == order
    assert placed.nbytes == 2 * int(np.prod([SIZES[a] for a in axes]))
    assert placed.regions == ""
    at = {a: SIZES[a] - 1 for a in axes if a in "LBvw"} | {"x": 7}
    assert placed.base(at) == sum(strides[a] * i for a, i in at.items() if a != "x")


def test_axes_left_of_a_bar_have_regions_and_axes_of_one_step_no_holes() -> None:
    placed = place_axes("L v | B t L h e", SIZES | {"L": 1}, 4, 1)
    assert (placed.regions, placed.order) == ("L v", "t h e")
    assert placed.nbytes == 4 * 5 * 8 * 2 * 6


def test_the_slowest_axis_alone_is_rounded_up() -> None:
    placed = place_axes("B L t e", SIZES, 1, 100)
    assert placed.strides == {"B": 200, "L": 48}  # 3 layers of 48 bytes, rounded up from 144
    assert placed.nbytes == 5 * 200
    assert place_axes("B L t e", SIZES, 1, 144).nbytes == 5 * 144


def test_tiles_divide_their_axis() -> None:
    placed = place_axes("B t h t4 e2 e", SIZES, 1, 1)
    assert (placed.order, placed.nbytes) == ("t h t4 e2 e", 5 * 8 * 2 * 6)
    for text, complaint in (
        ("B t t3 e", r"8 steps of 't' in tiles of 3$"),
        ("B t x", r"None steps of 'x' in tiles of 1$"),
    ):
        with pytest.raises(LayoutError, match=complaint):
            place_axes(text, SIZES, 1, 1)


def test_a_page_is_one_item() -> None:
    placed = place_axes("L B page", SIZES, 1000, 1)
    assert (placed.order, placed.strides) == ("", {"L": 5000, "B": 1000})
    assert placed.nbytes == 15_000
