"""PNG: the picture that the SVG states, pixel by pixel where a colour is stated."""

import io
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image

from kvflow.cli import main
from kvflow.explain.draw import draw_plan, drawing_of
from kvflow.explain.png import png_of
from kvflow.layouts.text import parse_layout
from kvflow.testing import Case, cases
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["draw", "dcp4(i=4) paged(8)", "dcp3 paged(6)", "--model", "tiny", "--tokens", "50"]


def planned(src: str, dst: str, tokens: tuple[int, int]) -> Plan:
    return plan_transfer(*(parse_layout(f"{side} tiny") for side in (src, dst)), tokens)


def decoded(data: bytes) -> Image.Image:
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.mode == "RGB"
    return image


def both(plan: Plan) -> tuple[ElementTree.Element, Image.Image]:
    """The SVG as an XML tree, the PNG as pixels."""
    return ElementTree.fromstring(draw_plan(plan)), decoded(png_of(drawing_of(plan)))


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def of_hex(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


def colours(image: Image.Image, *box: int) -> set[tuple[int, ...]]:
    """Of the pixels from (left, top) to (right, bottom)."""
    return set(map(tuple, np.asarray(image.crop(box)).reshape(-1, 3).tolist()))


def cells(root: ElementTree.Element) -> list[tuple[str, int, int]]:
    """Of every token drawn as a cell: its colour, and a pixel inside the cell's upper left corner,
    where no letter is."""
    found = []
    for box in root.iter(f"{SVG}rect"):
        if box.attrib.get("rx") == "2" and box.attrib["fill"].startswith("#"):
            x, y, w = numbers(box, "x", "y", "width")
            if w > 10 and "stroke" not in box.attrib:
                found.append((box.attrib["fill"], int(x) + 3, int(y) + 3))
    return found


@settings(max_examples=5)
@given(cases(max_tokens=30, max_shards=4))
def test_the_pixels_of_any_plan_are_those_that_the_svg_states(case: Case) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    root, image = both(plan)
    assert list(image.size) == numbers(root, "width", "height")
    assert all(image.getpixel((x, y)) == of_hex(fill) for fill, x, y in cells(root))
    assert image.getpixel((0, 0)) == image.getpixel((image.width - 1, image.height - 1))


def test_every_token_has_its_colour_and_strips_too() -> None:
    root, image = both(planned("dcp4(i=4) paged(8)", "dcp3 paged(6)", (7, 50)))
    said = cells(root)
    assert len(said) == 2 * 43
    assert len({fill for fill, _, _ in said}) == 43
    assert [image.getpixel((x, y)) for _, x, y in said] == [of_hex(fill) for fill, _, _ in said]
    root, image = both(planned("dcp2 paged(64)", "replicated paged(32)", (0, 600)))
    strips = [box for box in root.iter(f"{SVG}rect") if box.attrib["height"] == "15"]
    assert len(strips) > 100
    for box in strips:
        if "stroke" not in box.attrib:
            x, y, w = numbers(box, "x", "y", "width")
            assert image.getpixel((int(x + w / 2), int(y) + 5)) == of_hex(box.attrib["fill"])


def test_bands_words_hatches_and_frames_are_there() -> None:
    root, image = both(planned("dcp2(i=4) paged(8)", "replicated paged(8)", (7, 50)))
    for band in root.iter(f"{SVG}path"):
        if band.find(f"{SVG}title") is None:
            continue
        x, y = band.attrib["d"].split("C")[1].split(" ")[-2:]
        ink, pixel = (
            of_hex(band.attrib["stroke"]),
            image.getpixel((int(float(x)) - 3, int(float(y)))),
        )
        assert isinstance(pixel, tuple)
        assert all(abs(p - (0.55 * i + 0.45 * 255)) < 2 for p, i in zip(pixel, ink, strict=True))
    for words in root.iter(f"{SVG}text"):
        x, y, size = numbers(words, "x", "y", "font-size")
        wide = size * 0.3
        shift = {"end": -wide, "middle": -wide / 2}.get(words.attrib.get("text-anchor", ""), 0)
        box = (int(x + shift) - 1, int(y - size), int(x + shift + wide) + 2, int(y) + 1)
        assert len(colours(image, *box)) > 3, words.text
    held = [box for box in root.iter(f"{SVG}rect") if box.attrib["fill"] == "url(#held)"]
    assert len(held) == 7 * 2 + 1
    for box in held:
        x, y = (int(n) for n in numbers(box, "x", "y"))
        seen = colours(image, x + 2, y + 2, x + 12, y + 12)
        assert of_hex("#e9ebf0") in seen
        assert len(seen) > 3
    scale = next(b for b in root.iter(f"{SVG}rect") if b.attrib["fill"] == "url(#position)")
    x, y, w = (int(n) for n in numbers(scale, "x", "y", "width"))
    row = [image.getpixel((x + i, y + 6)) for i in range(1, w - 1)]
    assert len(set(row)) > 100
    lane = next(b for b in root.iter(f"{SVG}rect") if b.attrib.get("stroke") == "#c9ced9")
    x, y, w, h = numbers(lane, "x", "y", "width", "height")
    edge = image.getpixel((round(x + w) - 1, int(y + h / 2)))
    assert edge not in (of_hex("#ffffff"), of_hex("#f6f7f9"))


def test_the_same_plan_gives_the_same_file() -> None:
    plan = planned("dcp2 paged(4)", "replicated(2) paged(4) hosts(0,1)", (0, 40))
    assert png_of(drawing_of(plan)) == png_of(drawing_of(plan))


def test_copies_are_dashed() -> None:
    root, image = both(planned("dcp2 paged(4)", "replicated(2) paged(4) hosts(0,1)", (0, 90)))
    arc, *_ = [p for p in root.iter(f"{SVG}path") if "copied" in (p.findtext(f"{SVG}title") or "")]
    assert arc.attrib["stroke-dasharray"] == "4 3"
    begin, _, rest = arc.attrib["d"].removeprefix("M").partition("C")
    (x, top), bottom = map(float, begin.split()), float(rest.split(" ")[-1])
    row = [
        min(sum(image.getpixel((int(x) + dx, y))) for dx in range(10, 20))  # type: ignore[arg-type]
        for y in range(int(top) + 20, int(bottom) - 20)
    ]
    dark = [value < 500 for value in row]
    assert sum(a != b for a, b in pairwise(dark)) > 10


def test_the_command_writes_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.PNG"
    assert main([*WORDS, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    plan = planned("dcp4(i=4) paged(8)", "dcp3 paged(6)", (0, 50))
    assert out.read_bytes() == png_of(drawing_of(plan))


def test_without_pillow_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvflow.explain.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main([*WORDS, "-o", str(tmp_path / "plan.png")]) == 2
    assert 'pip install "kvflow[png]"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
