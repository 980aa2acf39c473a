"""Stacks: pairs of pieces that differ in nothing but their offsets, by equal steps.

A head-sharded or transposed page is cut into hundreds of small pieces, and nearly all of them
follow from one by a step. What moves rows treats a stack as one more dimension.
"""

from collections.abc import Iterable

from attrs import evolve, frozen

from kvflow.layouts.pieces import Piece

Pairs = Iterable[tuple[Piece, Piece]]
"""Pieces of a source and of a target that hold the same bytes."""


@frozen
class Stack:
    """Pair k < `count` begins ``k * src_step`` bytes behind `src` and ``k * dst_step`` behind
    `dst`; no step is negative."""

    src: Piece
    dst: Piece
    count: int = 1
    src_step: int = 0
    dst_step: int = 0

    def takes(self, src: Piece, dst: Piece) -> bool:
        """Whether a pair is the next one."""
        if _kind(src) != _kind(self.src) or _kind(dst) != _kind(self.dst):
            return False
        steps = (src.offset - self.src.offset, dst.offset - self.dst.offset)
        if self.count == 1:
            return min(steps) >= 0
        return steps == (self.count * self.src_step, self.count * self.dst_step)

    def grown(self, src: Piece, dst: Piece) -> "Stack":
        """With one pair more."""
        if self.count > 1:
            return evolve(self, count=self.count + 1)
        steps = (src.offset - self.src.offset, dst.offset - self.dst.offset)
        return Stack(self.src, self.dst, 2, *steps)


def _kind(piece: Piece) -> tuple[object, ...]:
    return piece.nbytes, piece.stride, piece.tiles


def stacked(pairs: Pairs) -> tuple[Stack, ...]:
    """All pairs, in stacks as high as they come.

    >>> a, b = Piece(0, 2, 2, 0), Piece(128, 2, 2, 2)
    >>> (stack,) = stacked([(a, Piece(0, 0, 2, 0)), (b, Piece(2, 0, 2, 2))])
    >>> stack.count, stack.src_step, stack.dst_step
    (2, 128, 2)
    """
    stacks: list[Stack] = []
    for src, dst in pairs:
        if stacks and stacks[-1].takes(src, dst):
            stacks[-1] = stacks[-1].grown(src, dst)
        else:
            stacks.append(Stack(src, dst))
    return tuple(stacks)


def packed(pieces: Iterable[Piece]) -> list[tuple[Piece, Piece]]:
    """Every piece of a page and its place in a packed row."""
    return [(p, Piece(p.record_offset, 0, p.nbytes, p.record_offset)) for p in pieces]
