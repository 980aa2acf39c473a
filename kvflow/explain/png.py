"""A drawing as PNG pixels, with Pillow and the font that comes with it: no other machine's fonts,
so the same drawing gives the same pixels.

Everything is painted `FINE` times as large and averaged, which smooths edges and leaves the inside
of every shape in the colour that it was given.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import cycle, pairwise
from math import ceil, hypot

from attrs import frozen
from PIL import Image, ImageDraw, ImageFont

from kvflow.explain.canvas import (
    HATCH_GROUND,
    HATCH_LINE,
    HATCH_SIZE,
    HELD,
    POSITION,
    Curve,
    Drawing,
    Rect,
    Text,
    position_colour,
    rgb,
)

FINE = 3
STEPS = 48
"""Straight pieces of a curve."""

Point = tuple[float, float]


def png_of(drawing: Drawing) -> bytes:
    """The whole file: a pixel for each pixel of the drawing."""
    size = drawing.width * FINE, drawing.height * FINE
    image = Image.new("RGB", size, "#ffffff")
    paint = _Paint(image, ImageDraw.Draw(image, "RGBA"))
    for element in drawing.elements:
        match element:
            case Rect():
                paint.rect(element)
            case Curve():
                paint.curve(element)
            case Text():
                paint.text(element)
    out = BytesIO()
    image.reduce(FINE).save(out, "PNG", optimize=True)
    return out.getvalue()


@frozen(eq=False)
class _Paint:
    """Paints elements on an image that is `FINE` times as large."""

    image: Image.Image
    draw: ImageDraw.ImageDraw

    def rect(self, rect: Rect) -> None:
        x, y = round(rect.x * FINE), round(rect.y * FINE)
        right = round((rect.x + rect.width) * FINE) - 1
        bottom = round((rect.y + rect.height) * FINE) - 1
        style, radius = rect.style, _number(rect.style.get("rx", 0)) * FINE
        mask = Image.new("1", (max(right - x + 1, 1), max(bottom - y + 1, 1)))
        ImageDraw.Draw(mask).rounded_rectangle((0, 0, right - x, bottom - y), radius, fill=1)
        self.image.paste(_filled(str(style["fill"]), (x, y), mask.size), (x, y), mask)
        if "stroke" not in style:
            return
        ink, half = str(style["stroke"]), FINE // 2
        if "stroke_dasharray" in style:
            corners = [(x, y), (right, y), (right, bottom), (x, bottom), (x, y)]
            for dash in _dashes(corners, style["stroke_dasharray"]):
                self.draw.line(dash, ink, FINE)
        else:
            box = (x - half, y - half, right + half, bottom + half)
            self.draw.rounded_rectangle(box, radius, outline=ink, width=FINE)

    def curve(self, curve: Curve) -> None:
        style, line = curve.style, _along([(x * FINE, y * FINE) for x, y in curve.points])
        width = _number(style.get("stroke_width", 1)) * FINE
        ink = (*rgb(str(style["stroke"])), round(255 * _number(style.get("stroke_opacity", 1))))
        lines = [line]
        if "stroke_dasharray" in style:
            lines = _dashes(line, style["stroke_dasharray"])
        for part in lines:
            self.draw.polygon(_band(part, width / 2), ink)

    def text(self, text: Text) -> None:
        style = text.style
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[
            str(style.get("text_anchor", "start"))
        ]
        at, ink = (text.x * FINE, text.y * FINE), str(style["fill"])
        font = _font(round(text.size * FINE))
        if "stroke" in style:  # a halo behind the words
            wide, halo = round(_number(style["stroke_width"]) * FINE / 2), str(style["stroke"])
            self.draw.text(at, text.said, halo, font, anchor, stroke_width=wide, stroke_fill=halo)
        bold = 1 if "font_weight" in style else 0
        self.draw.text(at, text.said, ink, font, anchor, stroke_width=bold, stroke_fill=ink)


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _number(value: object) -> float:
    return float(str(value))


def _filled(fill: str, at: tuple[int, int], size: tuple[int, int]) -> Image.Image:
    """A piece of the image at `at`, in a colour, hatched, or in the colours of positions."""
    if fill not in (HELD, POSITION):
        return Image.new("RGB", size, fill)
    image = Image.new("RGB", size, HATCH_GROUND)
    draw = ImageDraw.Draw(image)
    width, height = size
    if fill == POSITION:
        for x in range(width):
            draw.line((x, 0, x, height), position_colour(x / max(width - 1, 1)))
        return image
    step, first = HATCH_SIZE * FINE, sum(at)
    for on in range(first // step * step, first + width + height, step):  # where x + y is `on`
        low = on - first
        draw.line((low, 0, low - height, height), HATCH_LINE, FINE)
    return image


def _along(points: Sequence[Point]) -> list[Point]:
    """Points of a cubic Bézier curve, ends included: lines between lines between its points."""
    line = []
    for s in (i / STEPS for i in range(STEPS + 1)):
        left = list(points)
        while len(left) > 1:
            left = [
                (x0 + (x1 - x0) * s, y0 + (y1 - y0) * s) for (x0, y0), (x1, y1) in pairwise(left)
            ]
        line += left
    return line


def _band(line: Sequence[Point], half: float) -> list[Point]:
    """The outline of a line that is twice `half` wide."""
    left, right = [], []
    for i, (x, y) in enumerate(line):
        (x0, y0), (x1, y1) = line[max(i - 1, 0)], line[min(i + 1, len(line) - 1)]
        length = hypot(x1 - x0, y1 - y0) or 1.0
        dx, dy = (y0 - y1) / length * half, (x1 - x0) / length * half
        left.append((x + dx, y + dy))
        right.append((x - dx, y - dy))
    return left + right[::-1]


def _dashes(line: Sequence[Point], array: object) -> list[list[Point]]:
    """The parts of a line that are drawn, as the two lengths of a dash array say."""
    on = [_number(n) * FINE for n in str(array).split()]
    lengths = cycle((length, i % 2 == 0) for i, length in enumerate(on))
    left, drawn = next(lengths)
    parts: list[list[Point]] = [[]]
    for (x, y), step in _steps(line):
        if drawn:
            parts[-1].append((x, y))
        left -= step
        if left <= 0:
            length, drawn = next(lengths)
            left += length
            parts.append([])
    return [part for part in parts if len(part) > 1]


def _steps(line: Sequence[Point]) -> Iterator[tuple[Point, float]]:
    """Points about a pixel apart along a line, with the way from each to the next."""
    for (x0, y0), (x1, y1) in pairwise(line):
        length = hypot(x1 - x0, y1 - y0)
        num = max(ceil(length), 1)
        for i in range(num):
            yield (x0 + (x1 - x0) * i / num, y0 + (y1 - y0) * i / num), length / num
