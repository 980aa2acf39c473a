"""What a step's log says about overlap: which fetch was issued and awaited when, beside which
layer's compute; and a picture of it."""

from collections.abc import Mapping, Sequence
from html import escape

from attrs import frozen

from kvflow.engine.access import Fetched, StepLog
from kvflow.engine.access.order import LayerOrder

ROW, BAR, LEFT, RIGHT, TITLE, FOOT = 34, 13, 86, 16, 44, 24
PHASES = {"rows": "#9fb8cf", "index": "#e0b15e", "attention": "#1b6ca8", "experts": "#c9d6e2"}
FETCHES = {"attention rows": "#3a7d44", "index keys": "#8d5a97"}
WAIT = "#d1495b"


@frozen
class Span:
    """A phase of a layer on the thread that computes, in seconds of the log's clock."""

    layer: int
    what: str
    begin: float
    end: float


def phases(log: StepLog, order: LayerOrder) -> list[Span]:
    """The phases of the main layers, in order. A layer goes from the publishing of its latent rows
    to that of the next one's, the projections of which are thus in its last phase."""
    at = {(m.what, m.component): m.at for m in log.moments}
    latents = [n for n in order.spec.select(kind="latent") if ("attend", n) in at]
    begins = [at["publish", name] for name in order.spec.select(kind="latent")]
    spans = []
    for layer, name in enumerate(latents):
        chooses = at.get(("topk", order.indexer(name) or ""))
        marks = [("rows", begins[layer])]
        marks += [("index", chooses)] if chooses else []
        marks += [("attention", at["attend", name]), ("experts", at["attended", name])]
        end = begins[layer + 1] if layer + 1 < len(begins) else log.moments[-1].at
        ends = [t for _, t in marks[1:]] + [end]
        spans += [Span(layer, w, b, e) for (w, b), e in zip(marks, ends, strict=True)]
    return spans


def blocked(fetch: Fetched, *, overlap: bool) -> tuple[float, float]:
    """From when until when computing stood still for a fetch: all the while, where none runs
    beside it."""
    times = fetch.times
    return times.waited_from if overlap else times.issued, times.waited_until


def violations(log: StepLog, order: LayerOrder, way: str) -> list[str]:
    """What in the log of an overlapped step contradicts docs/context-access.md: rows of layer
    l + 1 (in way "union", where it follows its leader) are issued before layer l has attended, and
    waited for where layer l + 1 attends; keys come a layer ahead of their indexer and are waited
    for where it chooses. Empty if nothing does."""
    at = {(m.what, m.component): m.at for m in log.moments}
    latents = [n for n in order.spec.select(kind="latent") if ("attend", n) in at]
    before = {order.after(n): n for n in latents}
    owner = {order.indexer(n): n for n in latents if order.indexer(n)}
    wrong = []
    for f in log.fetches:
        keys = f.kind == "index keys"
        latent = owner[f.component] if keys else f.component
        previous, first_use = before.get(latent), at["topk" if keys else "attend", f.component]
        ahead = previous is not None and (keys or way == "whole" or order.indexer(latent) is None)
        if ahead and not at["publish", previous] < f.times.issued < at["attended", previous]:
            wrong.append(f"{f.component} was not issued while {previous} attended")
        if f.times.waited_from < first_use:
            wrong.append(f"{f.component} was waited for before its first use")
    return wrong


def panel(
    title: str, log: StepLog, order: LayerOrder, width: int, seconds: float, *, overlap: bool
) -> str:
    """A step as an SVG group, two bars a layer, `seconds` wide: what the layer computes, and
    below what is fetched for it. A fetch's line begins where it was issued; computing that stands
    still is red."""
    spans = phases(log, order)
    start, latents = spans[0].begin, [*order.spec.select(kind="latent")]
    scale = (width - LEFT - RIGHT) / seconds

    def x(at: float) -> float:
        return LEFT + (at - start) * scale

    def bar(begin: float, end: float, y: float, height: float, color: str) -> str:
        size = max((end - begin) * scale, 0.6)
        return (
            f'<rect x="{x(begin):.1f}" y="{y:.1f}" width="{size:.1f}" height="{height}" '
            f'fill="{color}"/>'
        )

    num_layers = spans[-1].layer + 1
    parts = [f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>']
    for layer in range(num_layers):
        y = TITLE + layer * ROW
        leads = "leads" if order.indexer(latents[layer]) else "follows"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 11}" class="end">layer {layer}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 24}" class="end note">{leads}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y + 29}" y2="{y + 29}"/>')
    parts += [bar(s.begin, s.end, TITLE + s.layer * ROW, BAR, PHASES[s.what]) for s in spans]
    for f in log.fetches:
        name = f.component if f.kind == "attention rows" else f"latent.{f.component.split('.')[1]}"
        y, t = TITLE + latents.index(name) * ROW, f.times
        parts.append(bar(t.issued, t.ended, y + BAR + 5.5, 1.5, FETCHES[f.kind]))
        parts.append(bar(t.began, t.ended, y + BAR + 2, 9, FETCHES[f.kind]))
        parts.append(bar(*blocked(f, overlap=overlap), y, BAR, WAIT))
    parts += _axis(num_layers, seconds, scale)
    return "\n".join(parts)


def _axis(num_layers: int, seconds: float, scale: float) -> list[str]:
    steps = [m * 10**e for e in range(6) for m in (1, 2, 5)]
    step = next(s for s in steps if seconds * 1e3 / s <= 12)
    y, parts = TITLE + num_layers * ROW + 12, []
    for ms in range(0, int(seconds * 1e3) + 1, step):
        at = LEFT + ms / 1e3 * scale
        parts.append(f'<text x="{at:.1f}" y="{y}" class="mid note">{ms} ms</text>')
    return parts


def panel_height(num_layers: int) -> int:
    return TITLE + num_layers * ROW + FOOT


def document(panels: Sequence[str], num_layers: int, width: int) -> str:
    """Panels below each other and what the colours mean, as one SVG document on white."""
    each = panel_height(num_layers)
    height = each * len(panels) + 34
    body = [f'<g transform="translate(0 {i * each})">\n{p}\n</g>' for i, p in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">\n<style>{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + f'\n<g transform="translate({LEFT} {each * len(panels) + 8})">{_legend()}</g>\n</svg>\n'
    )


def _legend() -> str:
    words: Mapping[str, str] = {
        "publish": PHASES["rows"],
        "choose": PHASES["index"],
        "attend": PHASES["attention"],
        "experts, next projections": PHASES["experts"],
        "fetch of rows": FETCHES["attention rows"],
        "fetch of keys": FETCHES["index keys"],
        "computing waits": WAIT,
    }
    parts, x = [], 0.0
    for word, color in words.items():
        parts.append(f'<rect x="{x:.0f}" y="0" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="10">{escape(word)}</text>')
        x += 34 + 6.1 * len(word)
    return "".join(parts)


STYLE = """text { font: 11px sans-serif; } .title { font-weight: bold; font-size: 13px; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .note { fill: #777; font-size: 10px; }
line { stroke: #e6e6e6; }"""
