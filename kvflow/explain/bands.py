"""The links of a drawing: bands between two columns of lanes, and copies within one."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from kvflow.explain.canvas import Canvas
from kvflow.explain.lanes import Flow
from kvflow.explain.render import nbytes_text

MAX_LABELS = 24
"""Links up to which each band has a number; more would cover each other."""

MAX_BAND = 16.0
RANK_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#b8a000", "#5ab4d6", "#aa3377", "#e07b39", "#777777"
)  # fmt: skip
"""Of the bands, by source lane."""

COPY: Mapping[str, object] = MappingProxyType(
    {"stroke": "#3b4252", "stroke_width": 1.6, "stroke_dasharray": "4 3"}
)


@frozen
class Column:
    """Where the lanes of one side stand: from `left` to `right`, each with its top and height."""

    left: float
    right: float
    tops: list[float]
    heights: list[float]


def draw_bands(
    canvas: Canvas,
    flows: Sequence[Flow],
    src: Column,
    dst: Column,
    names: Sequence[Sequence[str]],
) -> None:
    """A band for each flow from the right edge of `src` to the left edge of `dst`, in the colour
    of its source; `names` are the labels of both sides' lanes."""
    scale = _tokens_per_pixel(flows, src, dst)
    begins = _meets(flows, src, dst, scale, [f.src for f in flows], [f.dst for f in flows])
    ends = _meets(flows, dst, src, scale, [f.dst for f in flows], [f.src for f in flows])
    x0, x1, mid = src.right, dst.left, (src.right + dst.left) / 2
    for flow, y0, y1 in zip(flows, begins, ends, strict=True):
        canvas.curve(
            *((x0, y0), (mid, y0), (mid, y1), (x1, y1)),
            title=f"{names[0][flow.src]} to {names[1][flow.dst]}: {_said(flow)}",
            fill="none",
            stroke=RANK_COLOURS[flow.src % len(RANK_COLOURS)],
            stroke_width=max(flow.num_tokens / scale, 1.2),
            stroke_opacity="0.55",
        )
    if len(flows) <= MAX_LABELS:
        _numbers(canvas, flows, (x0, begins), (x1, ends), at_source=len(dst.tops) < len(src.tops))


def draw_copies(
    canvas: Canvas, flows: Sequence[Flow], column: Column, names: Sequence[str]
) -> None:
    """Copies between lanes of one column, as dashed arcs at its right edge."""
    x = column.right
    for flow in flows:
        y0, y1 = (column.tops[i] + column.heights[i] / 2 for i in (flow.src, flow.dst))
        canvas.curve(
            *((x, y0), (x + 22, y0), (x + 22, y1), (x, y1)),
            title=f"{names[flow.src]} to {names[flow.dst]}, copied on their host: {_said(flow)}",
            fill="none",
            **COPY,
        )


def _said(flow: Flow) -> str:
    return f"{flow.num_tokens:,} tokens, {nbytes_text(flow.nbytes)}"


def _tokens_per_pixel(flows: Sequence[Flow], src: Column, dst: Column) -> float:
    """So that the bands of the fullest lane fit its side, and none is wider than `MAX_BAND`."""
    most = max((f.num_tokens for f in flows), default=1) / MAX_BAND
    for column, ends in ((src, [f.src for f in flows]), (dst, [f.dst for f in flows])):
        for lane, height in enumerate(column.heights):
            through = sum(f.num_tokens for f, end in zip(flows, ends, strict=True) if end == lane)
            most = max(most, through / (height - 6))
    return most


def _meets(
    flows: Sequence[Flow],
    mine: Column,
    other: Column,
    scale: float,
    here: Sequence[int],
    there: Sequence[int],
) -> list[float]:
    """The height at which each band meets its lane of one column: next to each other in the order
    of the other column, spread over the side of the lane."""
    at = [0.0] * len(flows)
    for lane, height in enumerate(mine.heights):
        bands = [n for n, end in enumerate(here) if end == lane]
        bands.sort(key=lambda n: other.tops[there[n]])
        total = sum(flows[n].num_tokens / scale for n in bands)
        gap = (height - 4 - total) / max(len(bands), 1)
        y = mine.tops[lane] + 2 + gap / 2
        for n in bands:
            thick = flows[n].num_tokens / scale
            at[n] = y + thick / 2
            y += thick + gap
    return at


def _numbers(
    canvas: Canvas,
    flows: Sequence[Flow],
    begins: tuple[float, list[float]],
    ends: tuple[float, list[float]],
    *,
    at_source: bool,
) -> None:
    """The tokens of each band, at the end where fewer bands meet."""
    (x, heights), shift = (begins, 6) if at_source else (ends, -6)
    style = {"stroke": "#ffffff", "stroke_width": 3, "paint_order": "stroke"}
    for flow, y in zip(flows, heights, strict=True):
        anchor = "start" if at_source else "end"
        canvas.text(x + shift, y + 3.5, f"{flow.num_tokens:,}", 10, text_anchor=anchor, **style)
