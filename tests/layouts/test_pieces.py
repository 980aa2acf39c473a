"""Pieces: the fewest that a page allows, counted by hand, and how two sides are cut alike."""

import numpy as np
import pytest

from kvflow.errors import LayoutError
from kvflow.layouts.paging import bytes_of_slots
from kvflow.layouts.pieces import Piece, refine
from kvflow.layouts.record import Field, Record

K, V = Field("k", "bfloat16", 4, 2), Field("v", "bfloat16", 4, 2)


@pytest.mark.parametrize(
    ("order", "block_size", "pieces"),
    [
        ("t h e", 4, [Piece(0, 16, 16, 0)]),  # NHD: one a token
        ("h t e", 4, [Piece(0, 8, 8, 0), Piece(32, 8, 8, 8)]),  # HND: one a head
        ("h t e", 1, [Piece(0, 8, 16, 0)]),  # a page of one token: heads lie together
        ("t e h", 4, [Piece(4 * e + 2 * h, 16, 2, 8 * h + 2 * e)
                      for h in range(2) for e in range(4)]),
        ("h e t", 4, [Piece(32 * h + 8 * e, 2, 2, 8 * h + 2 * e)
                      for h in range(2) for e in range(4)]),
        ("t h e e2", 4, [Piece(0, 16, 16, 0)]),
        ("t e h e2", 4, [Piece(8 * e + 4 * h, 16, 4, 8 * h + 4 * e)
                         for h in range(2) for e in range(2)]),
        ("t _3 h e", 4, [Piece(0, 48, 16, 0)]),
        ("t h _2 e", 4, [Piece(0, 32, 8, 0), Piece(16, 32, 8, 8)]),
        ("t t2 h e", 4, [Piece(0, 16, 16, 0)]),  # digits that step on evenly are one
        ("t h t2 e", 4, [Piece(16 * h, 32, 8, 8 * h, ((2, 8),)) for h in range(2)]),
        ("t h t2 t2 e", 8, [Piece(32 * h, 64, 8, 8 * h, ((4, 8),)) for h in range(2)]),
        ("t h t2 t2 e", 16, [Piece(32 * h, 64, 8, 8 * h, ((4, 8),)) for h in range(2)]),
        ("t h t2 _2 t2 e", 8, [Piece(64 * h, 128, 8, 8 * h, ((2, 32), (2, 8)))
                               for h in range(2)]),
    ],
)  # fmt: skip
def test_the_fewest_pieces(order: str, block_size: int, pieces: list[Piece]) -> None:
    assert Record((K,), order).pieces(block_size) == tuple(pieces)


def test_fields_that_lie_together_are_one_piece() -> None:
    assert Record((K, V), "t f h e").pieces(4) == (Piece(0, 32, 32, 0),)
    assert Record((K, V), "t h f e").pieces(4) == (
        Piece(0, 32, 8, 0), Piece(16, 32, 8, 8), Piece(8, 32, 8, 16), Piece(24, 32, 8, 24),
    )  # fmt: skip
    assert Record((K, V), "planar").pieces(4) == (Piece(0, 16, 16, 0), Piece(64, 16, 16, 16))
    assert Record((K, V), "[v,k: t f h e]").pieces(4) == (
        Piece(16, 32, 16, 0), Piece(0, 32, 16, 16),
    )  # fmt: skip


def test_neighbours_of_one_token_that_step_apart_stay_apart() -> None:
    """In pages of one token both planes touch, yet a field of another stride is another piece."""
    a, b = Field("a", "uint8", 2), Field("b", "uint8", 1)
    assert Record((a, b), "planar").pieces(1) == (Piece(0, 2, 2, 0), Piece(2, 1, 1, 2))
    tiled = Record((a, b), "[a: t e | b: t t2 _2 e]")
    assert tiled.pieces(2)[0] == Piece(0, 2, 2, 0)


@pytest.mark.parametrize(
    ("heads", "pieces"),
    [
        ((0, 1), [Piece(0, 48, 16, 0)]),
        ((1, 2), [Piece(16, 48, 16, 0)]),
        ((1, 3), [Piece(16, 48, 32, 0)]),
        ((0, 3), [Piece(0, 48, 48, 0)]),
        (None, [Piece(0, 48, 48, 0)]),
    ],
)
def test_some_heads(heads: tuple[int, int] | None, pieces: list[Piece]) -> None:
    record = Record((Field("k", "float32", 4, 3),), "t h e")
    assert record.pieces(4, heads) == tuple(pieces)
    assert record.row_nbytes(heads) == sum(p.nbytes for p in pieces)


def test_some_heads_of_two_fields() -> None:
    record = Record((K, V), "planar")
    assert record.pieces(4, (1, 2)) == (Piece(8, 16, 8, 0), Piece(72, 16, 8, 8))
    assert record.row_nbytes((1, 2)) == 16
    for heads in ((-1, 1), (0, 3), (1, 1), (2, 1), (2, 3)):
        with pytest.raises(
            LayoutError, match=rf"heads \[{heads[0]}, {heads[1]}\) of a record of 2"
        ):
            record.pieces(4, heads)


def test_a_piece_is_cut_where_the_row_says() -> None:
    piece = Piece(100, 32, 16, 8, ((2, 4),))
    assert piece.cut(8, 24) == piece
    assert piece.cut(10, 14) == Piece(102, 32, 4, 10, ((2, 4),))
    assert piece.cut(20, 24) == Piece(112, 32, 4, 20, ((2, 4),))


def test_two_sides_are_cut_wherever_either_is() -> None:
    a = [Piece(0, 9, 4, 0), Piece(50, 9, 2, 4), Piece(70, 9, 2, 6)]
    b = [Piece(7, 5, 1, 0), Piece(20, 5, 5, 1), Piece(40, 5, 2, 6)]
    assert refine(a, b) == [
        (Piece(0, 9, 1, 0), Piece(7, 5, 1, 0)),
        (Piece(1, 9, 3, 1), Piece(20, 5, 3, 1)),
        (Piece(50, 9, 2, 4), Piece(23, 5, 2, 4)),
        (Piece(70, 9, 2, 6), Piece(40, 5, 2, 6)),
    ]
    assert refine(a, a) == [(p, p) for p in a]


def test_bytes_of_slots_in_tiles() -> None:
    """Tiles of 2 by 2 tokens in pages of 8: digits of the token, most significant first."""
    piece = Piece(3, 1000, 8, 0, ((2, 100), (2, 10)))
    begins = bytes_of_slots(np.arange(16), 8, 50_000, piece)
    one = [0, 10, 100, 110, 1000, 1010, 1100, 1110]
    assert begins.tolist() == [3 + x for x in one] + [50_003 + x for x in one]
    assert begins.dtype == np.int64
