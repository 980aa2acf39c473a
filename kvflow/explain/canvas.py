"""What a drawing is made of: rectangles, curves and texts as values, in painting order.

A drawing says nothing of files: `kvflow.explain.svg` writes it as text, `kvflow.explain.png` as
pixels. Styles are SVG's presentation attributes, with ``_`` for ``-``; besides a colour, ``fill``
may be `HELD` (hatched) or `POSITION` (the colours of positions, left to right).
"""

from collections.abc import Mapping

from attrs import define, field, frozen

MONO = "ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace"
SANS = "system-ui,DejaVu Sans,Helvetica,Arial,sans-serif"
VIRIDIS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
"""Stops of the colour of a position, first to last: dark to light in even steps of lightness."""

HELD, POSITION = "url(#held)", "url(#position)"
HATCH_GROUND, HATCH_LINE, HATCH_SIZE = "#e9ebf0", "#a9afbd", 5
"""`HELD`: lines of one pixel from the lower left to the upper right, a square of pixels each."""

Style = Mapping[str, object]


@frozen
class Rect:
    x: float
    y: float
    width: float
    height: float
    style: Style


@frozen
class Curve:
    """A cubic Bézier curve from the first to the last of four points (x, y)."""

    points: tuple[tuple[float, float], ...]
    style: Style


@frozen
class Text:
    """`said` on a base line from, around or up to x, as ``text_anchor`` in the style says."""

    x: float
    y: float
    said: str
    size: float
    style: Style


@frozen
class Drawing:
    """Elements in painting order, on white. Sizes are in pixels."""

    width: int
    height: int
    title: str
    elements: tuple[Rect | Curve | Text, ...]


@define(eq=False)
class Canvas:
    """Where a drawing comes to be. `title` in a style is what a pointer on the element is told."""

    elements: list[Rect | Curve | Text] = field(factory=list)

    def rect(self, x: float, y: float, w: float, h: float, **style: object) -> None:
        self.elements.append(Rect(x, y, w, h, style))

    def curve(self, *points: tuple[float, float], **style: object) -> None:
        self.elements.append(Curve(points, style))

    def line(self, x: float, y: float, length: float, **style: object) -> None:
        """A level line to the right."""
        self.curve((x, y), (x, y), (x + length, y), (x + length, y), **style)

    def text(self, x: float, y: float, said: str, size: float = 11, **style: object) -> None:
        style = {"font_family": SANS, "fill": "#1f2430", **style}
        self.elements.append(Text(x, y, said, size, style))

    def drawing(self, width: float, height: float, title: str) -> Drawing:
        return Drawing(round(width), round(height), title, tuple(self.elements))


def position_colour(share: float) -> str:
    """The colour of a position that lies at `share` (0 to 1) of the range."""
    at = min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1)
    i = min(int(at), len(VIRIDIS) - 2)
    a, b = rgb(VIRIDIS[i]), rgb(VIRIDIS[i + 1])
    mixed = [round(x + (y - x) * (at - i)) for x, y in zip(a, b, strict=True)]
    return "#" + "".join(f"{v:02x}" for v in mixed)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    r, g, b = rgb(colour)
    return "#111111" if 0.299 * r + 0.587 * g + 0.114 * b > 140 else "#ffffff"


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue (0 to 255) of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
