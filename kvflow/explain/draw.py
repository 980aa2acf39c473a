"""A plan as a picture: who holds which token, and what flows where.

Source ranks on the left, target ranks on the right, pages as boxes, each token in the colour of its
position, and a band for each link, as wide as the tokens that it carries.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from attrs import frozen

from kvflow.explain.bands import COPY, MAX_LABELS, RANK_COLOURS, Column, draw_bands, draw_copies
from kvflow.explain.canvas import HELD, MONO, POSITION, Canvas, Drawing, ink_on, position_colour
from kvflow.explain.lanes import Gap, Lane, Page, copies_of, flows_of, lanes_of
from kvflow.explain.render import nbytes_text
from kvflow.explain.svg import svg_of
from kvflow.layouts.text import format_layout
from kvflow.transfers.plan import Plan

WIDTH, MARGIN, LANE_W, TOP = 1200.0, 24.0, 470.0, 118.0
INNER = LANE_W - 24
PAGE, PAGE_H, GAP_W, CELL, CELL_H, COLUMNS = 104.0, 36.0, 30.0, 21.5, 19.0, 20
MAX_DETAILED = 160
"""Tokens of a request up to which each one is a cell with its number."""

MAX_STRIPS = 26
GREY = "#5a6272"
NUMBERED, COPIED = "link: width and number are its tokens", "copy on the targets' host"


@frozen
class Scale:
    """How tokens are drawn: one by one with their numbers (`detailed`), or pages as strips."""

    start: int
    stop: int
    detailed: bool

    def colour(self, token: int) -> str:
        return position_colour((token - self.start) / max(self.stop - self.start - 1, 1))

    def fill(self, token: int) -> dict[str, object]:
        """Style of a slot: -1 is an empty one."""
        if token < 0:
            return {"fill": "#ffffff", "stroke": "#c3c8d3", "stroke_dasharray": "2 2"}
        return {"fill": HELD if token < self.start else self.colour(token)}

    def size(self, page: Page | Gap) -> tuple[float, float]:
        if isinstance(page, Gap):
            return GAP_W, CELL_H if self.detailed else PAGE_H
        if not self.detailed:
            return PAGE, PAGE_H
        num = len(shown_slots(page))
        columns = min(num, COLUMNS)
        return CELL * columns + 4, CELL_H * -(-num // columns) + 4


def shown_slots(page: Page) -> tuple[int, ...]:
    """The slots of a page that are drawn one by one: not the empty rows at its end."""
    held = sum(token >= 0 for token in page.tokens)
    return page.tokens[: max(COLUMNS, -(-held // COLUMNS) * COLUMNS)]


def draw_plan(plan: Plan) -> str:
    """The SVG of a plan: the same plan gives the same text."""
    return svg_of(drawing_of(plan))


def drawing_of(plan: Plan) -> Drawing:
    """The picture of a plan."""
    start, stop = plan.tokens
    scale = Scale(start, stop, stop <= MAX_DETAILED)
    component = next((c for part in plan.parts for c in part.components), plan.src.spec.names[0])
    src, dst = (
        lanes_of(layout, component, plan.tokens, _max_pages(len(layout.ranks), scale))
        for layout in (plan.src, plan.dst)
    )
    heights = [[_lane_height(lane, scale) for lane in lanes] for lanes in (src, dst)]
    room = max(map(sum, heights))
    left = Column(MARGIN, MARGIN + LANE_W, *_spread(heights[0], room))
    right = Column(WIDTH - MARGIN - LANE_W, WIDTH - MARGIN, *_spread(heights[1], room))
    canvas, copies = Canvas(), copies_of(plan, dst)
    names = [[lane.label for lane in lanes] for lanes in (src, dst)]
    flows = flows_of(plan, src, dst)
    draw_bands(canvas, flows, left, right, names)
    for lanes, column, bars in ((src, left, RANK_COLOURS), (dst, right, ("#3b4252",))):
        for i, lane in enumerate(lanes):
            _lane(canvas, lane, scale, column, i, bars[i % len(bars)])
    draw_copies(canvas, copies, right, names[1])
    _title(canvas, plan)
    notes = [*_notes(plan, (*src, *dst), component, scale)]
    marks = {COPIED: bool(copies), NUMBERED: len(flows) <= MAX_LABELS}
    end = _legend(canvas, scale, TOP + room + 14, notes, marks)
    said = f"{format_layout(plan.src)} to {format_layout(plan.dst)}, tokens {start} to {stop}"
    return canvas.drawing(WIDTH, end, said)


def _max_pages(num_ranks: int, scale: Scale) -> int:
    """Pages of a lane, so that a side with many ranks stays within a screen or two."""
    if scale.detailed:
        return 64
    return 14 if num_ranks <= 2 else 6 if num_ranks <= 4 else 3


def _spread(heights: list[float], room: float) -> tuple[list[float], list[float]]:
    """Tops and heights of lanes spread over the room, so that both columns are equally high."""
    gap = (room - sum(heights)) / max(len(heights), 1)
    tops, y = [], TOP + gap / 2
    for height in heights:
        tops.append(y)
        y += height + gap
    return tops, [height - 10 for height in heights]


# --- lanes ----------------------------------------------------------------------------------------


def _boxes(lane: Lane, scale: Scale) -> Iterator[tuple[float, float, Page | Gap]]:
    """Where the pages of a lane stand, row by row."""
    x = y = row = 0.0
    for page in lane.pages:
        w, h = scale.size(page)
        if x and x + w > INNER:
            x, y, row = 0.0, y + row + 5, 0.0
        yield x, y, page
        x, row = x + w + 6, max(row, h)


def _lane_height(lane: Lane, scale: Scale) -> float:
    bottoms = [y + scale.size(page)[1] for _, y, page in _boxes(lane, scale)]
    return max(bottoms) + 44 if bottoms else 36.0


def _lane(canvas: Canvas, lane: Lane, scale: Scale, column: Column, place: int, bar: str) -> None:
    x, y, h = column.left, column.tops[place], column.heights[place]
    canvas.rect(x, y, LANE_W, h, rx=5, fill="#f6f7f9", stroke="#c9ced9")
    canvas.rect(x, y, 5.0, h, rx=2, fill=bar)
    canvas.text(x + 14, y + 17, lane.label, 12, font_weight="600")
    if not lane.hidden:
        held = f"{lane.num_tokens:,} tokens" if lane.num_tokens else "no token"
        canvas.text(x + LANE_W - 10, y + 17, held, 11, text_anchor="end", fill=GREY)
    for dx, dy, page in _boxes(lane, scale):
        left, top = x + 14 + dx, y + 26 + dy
        if isinstance(page, Gap):
            middle = (left + GAP_W / 2, top + scale.size(page)[1] / 2)
            canvas.text(middle[0], middle[1] - 1, "…", 12, text_anchor="middle", fill=GREY)
            said = f"{page.num_pages:,}"
            canvas.text(middle[0], middle[1] + 11, said, 10, text_anchor="middle", fill=GREY)
        elif scale.detailed:
            _cells(canvas, page, scale, left, top)
        else:
            _strips(canvas, page, scale, left, top)


def _cells(canvas: Canvas, page: Page, scale: Scale, x: float, y: float) -> None:
    w, h = scale.size(page)
    said = f"page {page.entry}: {tokens_text(page.tokens)}"
    canvas.rect(x, y, w, h, rx=3, fill="#ffffff", stroke="#596174", title=said)
    slots = shown_slots(page)
    columns = min(len(slots), COLUMNS)
    for i, token in enumerate(slots):
        left, top = x + 2.5 + i % columns * CELL, y + 2.5 + i // columns * CELL_H
        canvas.rect(left, top, CELL - 1, CELL_H - 1, rx=2, **scale.fill(token))
        if token >= 0:
            ink = GREY if token < scale.start else ink_on(scale.colour(token))
            size = 10 if token < 100 else 9
            style = {"text_anchor": "middle", "fill": ink, "font_family": MONO}
            canvas.text(left + 10.2, top + 12.6, str(token), size, **style)


def _strips(canvas: Canvas, page: Page, scale: Scale, x: float, y: float) -> None:
    w, h = scale.size(page)
    said = tokens_text(page.tokens)
    title = f"page {page.entry}: {said}"
    canvas.rect(x, y, w, h, rx=3, fill="#ffffff", stroke="#596174", title=title)
    num = min(len(page.tokens), MAX_STRIPS)
    wide = (w - 6) / num
    for i in range(num):
        token = page.tokens[i * len(page.tokens) // num]
        canvas.rect(x + 3 + i * wide, y + 3, wide, 15.0, **scale.fill(token))
    style = {"text_anchor": "middle", "font_family": MONO}
    canvas.text(x + w / 2, y + 30, said, 9 if len(said) < 19 else 8, **style)


def tokens_text(tokens: tuple[int, ...]) -> str:
    """Tokens of a page in few words: a range, a progression, or the ends and how many runs.

    >>> tokens_text((4, 5, 6, -1)), tokens_text((0, 8, 16, 24)), tokens_text((0, 1, 8, 9))
    ('4-6', '0,8..24', '0..9 in 2 runs')
    """
    held = [t for t in tokens if t >= 0]
    if len(held) < 2:
        return str(held[0]) if held else "empty"
    steps = [b - a for a, b in pairwise(held)]
    if set(steps) == {1}:
        return f"{held[0]}-{held[-1]}"
    if len(set(steps)) == 1:
        return f"{held[0]},{held[1]}..{held[-1]}"
    return f"{held[0]}..{held[-1]} in {1 + sum(s != 1 for s in steps)} runs"


# --- words ----------------------------------------------------------------------------------------


def _title(canvas: Canvas, plan: Plan) -> None:
    start, stop = plan.tokens
    canvas.text(MARGIN, 34, f"tokens {start:,} to {stop:,}", 17, font_weight="700")
    links = len(plan.links)
    said = (
        f"{stop - start:,} tokens, {nbytes_text(plan.nbytes)}, {links} link{'s' * (links != 1)}, "
        f"{plan.num_runs:,} runs"
    )
    canvas.text(WIDTH - MARGIN, 34, said, 12, text_anchor="end", fill=GREY)
    sides = ((MARGIN, "from", plan.src), (WIDTH - MARGIN - LANE_W, "to", plan.dst))
    for x, name, layout in sides:
        canvas.text(x, 62, name, 12, fill=GREY)
        for i, line in enumerate(_wrapped(format_layout(layout), 64)[:3]):
            canvas.text(x, 78 + 14 * i, line, 12, font_family=MONO)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def _notes(plan: Plan, lanes: tuple[Lane, ...], component: str, scale: Scale) -> Iterator[str]:
    """What the picture leaves out."""
    pairs = {(part.src_group, part.dst_group): 0 for part in plan.parts}
    for part in plan.parts:
        pairs[part.src_group, part.dst_group] += len(part.components)
    if len(pairs) > 1:
        said = "; ".join(f"{n} components {a} to {b}" for (a, b), n in pairs.items())
        yield f"pages are those of {component}, bands are of all groups: {said}"
    pages = [page for lane in lanes for page in lane.pages if isinstance(page, Page)]
    if scale.detailed and any(shown_slots(page) != page.tokens for page in pages):
        yield "of the empty slots at the end of a page, whole rows are not drawn"
    if not scale.detailed:
        yield f"a page shows at most {MAX_STRIPS} of its tokens, and below them its ends"
    if any(lane.num_hidden_pages for lane in lanes):
        yield "pages drawn: where moved tokens begin, in the middle, at the end; … counts others"
    if any(lane.hidden for lane in lanes):
        yield "of the ranks the first ones and the last two are drawn"
    if plan.absent:
        yield f"{len(plan.absent)} components are absent: they do not move"


def _legend(
    canvas: Canvas, scale: Scale, y: float, notes: list[str], marks: Mapping[str, bool]
) -> float:
    """Draws the legend below `y`; returns where the picture ends."""
    x = MARGIN
    canvas.rect(x, y, 150.0, 13.0, fill=POSITION)
    canvas.text(x, y + 26, f"{scale.start:,}", 10, font_family=MONO)
    last = f"{max(scale.stop - 1, scale.start):,}"
    canvas.text(x + 150, y + 26, last, 10, font_family=MONO, text_anchor="end")
    box: dict[str, object] = {"rx": 3, "fill": "#ffffff", "stroke": "#596174"}
    line: dict[str, object] = {
        "stroke": RANK_COLOURS[0],
        "stroke_width": 8,
        "stroke_opacity": "0.55",
    }
    items: list[tuple[str, bool, Mapping[str, object]]] = [
        ("position of a token that moves", True, {}),
        ("held before, not moved", scale.start > 0, {"fill": HELD}),
        ("empty slot", True, scale.fill(-1)),
        ("page", True, box),
        (NUMBERED, marks[NUMBERED], line),
        ("link: its width is its tokens", not marks[NUMBERED], line),
        (COPIED, marks[COPIED], COPY),
    ]
    x += 130
    for said, shown, style in items:
        if not shown:
            continue
        if "fill" in style:
            canvas.rect(x, y, 22.0, 13.0, **style)
        elif style:
            canvas.line(x, y + 6.5, 22, fill="none", **style)
        canvas.text(x + 29, y + 11, said, 11)
        x += 42 + 5.9 * len(said)
    for i, note in enumerate(notes):
        canvas.text(MARGIN, y + 46 + 15 * i, note, 11, fill=GREY)
    return y + 46 + 15 * len(notes)
