"""A log-log line chart as SVG text: enough for a picture in the documentation, no dependency."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Series = Mapping[str, Sequence[tuple[float, float]]]

WIDTH, HEIGHT = 460, 390
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 44, 106
COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5a97", "#c77d2e", "#4a4e69")


def _ticks(low: float, high: float, base: int) -> list[float]:
    first, last = (math.floor(math.log(x, base) + 1e-9) for x in (low, high))
    return [float(base) ** k for k in range(first, last + 2)]


def _power(value: float) -> str:
    """1000000 -> 1M, 0.01 -> 0.01."""
    for size, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= size and math.log2(value).is_integer():
            return f"{value / size:g}{unit}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def chart(title: str, unit: str, series: Series, x_label: str = "tokens of the request") -> str:
    """One chart as an SVG group of WIDTH x HEIGHT; x ticks are powers of 4, y ticks of 10."""
    points = [p for line in series.values() for p in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    y_ticks = _ticks(min(ys), max(ys), 10)
    x_low, x_high = math.log(min(xs)), math.log(max(xs))
    y_low, y_high = math.log(y_ticks[0]), math.log(y_ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - x_low) / (x_high - x_low)
        up = (math.log(y) - y_low) / (y_high - y_low)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    parts = [f'<text x="{LEFT}" y="20" class="title">{escape(title)}</text>']
    for tick in y_ticks:
        _, y = at(xs[0], tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{_power(tick)}</text>')
    for tick in sorted({x for x in xs if math.log2(x) % 2 == 0}):
        x, _ = at(tick, y_ticks[0])
        y = HEIGHT - BOTTOM
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" class="mid">{_power(tick)}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - BOTTOM + 32}" class="mid">{escape(x_label)}</text>'
    )
    parts.append(f'<text x="{LEFT}" y="34" class="unit">{escape(unit)}</text>')
    for i, (name, line) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line))
        parts.append(f'<polyline points="{path}" stroke="{color}"/>')
        parts.extend(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>'
            for x, y in (at(*p) for p in line)
        )
        x, y = LEFT + i % 2 * (WIDTH - LEFT) / 2, HEIGHT - BOTTOM + 56 + i // 2 * 16
        parts.append(f'<rect x="{x:.0f}" y="{y - 6}" width="14" height="3" fill="{color}"/>')
        parts.append(f'<text x="{x + 19:.0f}" y="{y}">{escape(name)}</text>')
    return "\n".join(parts)


STYLE = """text { font: 11px sans-serif; } .title { font-weight: bold; font-size: 13px; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .unit { fill: #666; }
line { stroke: #ddd; } polyline { fill: none; stroke-width: 1.8; }"""


def page(*charts: str) -> str:
    """Charts side by side, as one SVG document on white."""
    width = WIDTH * len(charts)
    groups = "\n".join(
        f'<g transform="translate({i * WIDTH} 0)">\n{c}\n</g>' for i, c in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'width="{width}" height="{HEIGHT}">\n<style>{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{groups}\n</svg>\n'
    )
