"""A drawing as SVG text: the same drawing gives the same text."""

from html import escape

from kvflow.explain.canvas import (
    HATCH_GROUND,
    HATCH_LINE,
    HATCH_SIZE,
    VIRIDIS,
    Curve,
    Drawing,
    Rect,
    Style,
    Text,
)


def svg_of(drawing: Drawing) -> str:
    """The whole file."""
    width, height, n = drawing.width, drawing.height, HATCH_SIZE
    stops = "".join(
        f'<stop offset="{i / (len(VIRIDIS) - 1):.2f}" stop-color="{c}"/>'
        for i, c in enumerate(VIRIDIS)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}">',
            _title(drawing.title),
            f'<defs><linearGradient id="position">{stops}</linearGradient>'
            f'<pattern id="held" width="{n}" height="{n}" patternUnits="userSpaceOnUse">'
            f'<rect width="{n}" height="{n}" fill="{HATCH_GROUND}"/>'
            f'<path d="M0 {n}L{n} 0" stroke="{HATCH_LINE}" stroke-width="1"/></pattern></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *map(_element, drawing.elements),
            "</svg>\n",
        ]
    )


def _element(element: Rect | Curve | Text) -> str:
    match element:
        case Rect(x, y, width, height, style):
            return _tag("rect", {"x": x, "y": y, "width": width, "height": height, **style})
        case Curve(points, style):
            begin, *rest = (f"{x:.1f} {y:.1f}" for x, y in points)
            return _tag("path", {"d": f"M{begin}C{' '.join(rest)}", **style})
        case Text(x, y, said, size, style):
            return _tag("text", {"x": x, "y": y, "font_size": size, **style}, escape(said))


def _tag(name: str, attributes: Style, inner: str = "") -> str:
    inner += _title(str(attributes.get("title", "")))
    said = " ".join(
        f'{key.replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if key != "title"
    )
    return f"<{name} {said}>{inner}</{name}>" if inner else f"<{name} {said}/>"


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))


def _title(said: str) -> str:
    return f"<title>{escape(said)}</title>" if said else ""
