"""The few SVG elements that drawings need, as text: same calls, same bytes."""

from html import escape

from attrs import define, field

MONO = "ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace"
SANS = "system-ui,DejaVu Sans,Helvetica,Arial,sans-serif"
VIRIDIS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
"""Stops of the colour of a position, first to last: dark to light in even steps of lightness."""


@define(eq=False)
class Canvas:
    """Elements in painting order."""

    parts: list[str] = field(factory=list)

    def rect(self, x: float, y: float, w: float, h: float, **style: object) -> None:
        """`title` in the style is what a pointer on the element is told."""
        self._add("rect", {"x": x, "y": y, "width": w, "height": h, **style}, "")

    def path(self, d: str, **style: object) -> None:
        self._add("path", {"d": d, **style}, "")

    def text(self, x: float, y: float, said: str, size: float = 11, **style: object) -> None:
        style = {"font_family": SANS, "fill": "#1f2430", **style}
        self._add("text", {"x": x, "y": y, "font_size": size, **style}, escape(said))

    def _add(self, tag: str, attributes: dict[str, object], inner: str) -> None:
        inner += _title(str(attributes.pop("title", "")))
        said = " ".join(f'{k.replace("_", "-")}="{_value(v)}"' for k, v in attributes.items())
        self.parts.append(f"<{tag} {said}>{inner}</{tag}>" if inner else f"<{tag} {said}/>")

    def document(self, width: float, height: float, title: str) -> str:
        """The whole file, on white."""
        stops = "".join(
            f'<stop offset="{i / (len(VIRIDIS) - 1):.2f}" stop-color="{c}"/>'
            for i, c in enumerate(VIRIDIS)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
                f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
                _title(title),
                f'<defs><linearGradient id="position">{stops}</linearGradient>'
                '<pattern id="held" width="5" height="5" patternUnits="userSpaceOnUse">'
                '<rect width="5" height="5" fill="#e9ebf0"/>'
                '<path d="M0 5L5 0" stroke="#a9afbd" stroke-width="1"/></pattern></defs>',
                f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))


def _title(said: str) -> str:
    return f"<title>{escape(said)}</title>" if said else ""


def position_colour(share: float) -> str:
    """The colour of a position that lies at `share` (0 to 1) of the range."""
    at = min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1)
    i = min(int(at), len(VIRIDIS) - 2)
    a, b = _rgb(VIRIDIS[i]), _rgb(VIRIDIS[i + 1])
    mixed = [round(x + (y - x) * (at - i)) for x, y in zip(a, b, strict=True)]
    return "#" + "".join(f"{v:02x}" for v in mixed)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    r, g, b = _rgb(colour)
    return "#111111" if 0.299 * r + 0.587 * g + 0.114 * b > 140 else "#ffffff"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
