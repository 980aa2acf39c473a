"""Drawings: the same plan gives the same picture, and the picture says what the layouts say."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from kvflow.cli import main
from kvflow.explain.canvas import VIRIDIS, ink_on, position_colour
from kvflow.explain.draw import WIDTH, draw_plan, tokens_text
from kvflow.explain.lanes import Gap, Page, flows_of, lanes_of
from kvflow.layouts.text import parse_layout
from kvflow.testing import Case, cases, deal
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[2]


def planned(src: str, dst: str, tokens: tuple[int, int], model: str = "tiny/fp8") -> Plan:
    return plan_transfer(*(parse_layout(f"{side} {model}") for side in (src, dst)), tokens)


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def titles(root: ElementTree.Element, tag: str) -> list[str]:
    found = [element.find(f"{SVG}title") for element in root.iter(SVG + tag)]
    return [title.text or "" for title in found if title is not None]


@settings(max_examples=25)
@given(cases(max_tokens=30, max_shards=4))
def test_any_plan_is_drawn_and_each_token_where_it_lies(case: Case) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    drawn = draw_plan(plan)
    assert drawn == draw_plan(plan)
    root = ElementTree.fromstring(drawn)
    height = float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib.get(k, "0")) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= WIDTH + 0.1
        assert 0 <= y <= y + h <= height + 0.1
    flows = [t for t in titles(root, "path") if "copied on their host" not in t]
    assert len(flows) == len(plan.links)
    held: list[str] = []
    for layout in (plan.src, plan.dst):
        hands = deal(layout.placement.sharding, plan.tokens[1])
        for hand, ranks in zip(hands, layout.placement.ranks, strict=True):
            for rank in ranks:
                held += [str(t) for t in hand] if layout.components_of(rank) else []
    cells = [
        e.text for e in root.iter(f"{SVG}text")
        if e.attrib.get("text-anchor") == "middle" and "font-family" in e.attrib
        and "Mono" in e.attrib["font-family"]
    ]  # fmt: skip
    if max(len(plan.src.ranks), len(plan.dst.ranks)) <= 12:
        assert sorted(cells) == sorted(held)


def test_golden_drawing() -> None:
    root = ElementTree.fromstring(
        draw_plan(planned("dcp2(i=2) paged(4)", "replicated paged(8)", (3, 10)))
    )
    assert titles(root, "rect") == [
        "page 0: 0..5 in 2 runs", "page 1: 8-9", "page 0: 2..7 in 2 runs",
        "page 0: 0-7", "page 1: 8-9",
    ]  # fmt: skip
    assert titles(root, "path") == [
        "rank 0 · shard 0 to rank 0: 4 tokens, 336 B",
        "rank 1 · shard 1 to rank 0: 3 tokens, 252 B",
    ]
    said = texts(root)
    for words in (
        "tokens 3 to 10", "7 tokens, 588 B, 2 links, 4 runs", "dcp2(i=2) paged(4) tiny/fp8",
        "replicated paged(8) tiny/fp8", "rank 1 · shard 1", "4 tokens", "held before, not moved",
        "link: width and number are its tokens",
    ):  # fmt: skip
        assert words in said, words
    fills = [e.attrib["fill"] for e in root.iter(f"{SVG}rect")]
    assert fills.count("url(#held)") == 2 * 3 + 1  # both sides and the legend
    assert fills.count(VIRIDIS[0]) == fills.count(VIRIDIS[-1]) == 2
    assert "copy on the targets' host" not in said


def test_long_requests_say_what_they_leave_out() -> None:
    plan = planned("dcp16(i=1) paged(16)", "replicated paged(64)", (1000, 20000))
    root = ElementTree.fromstring(draw_plan(plan))
    said = texts(root)
    assert "ranks 9 to 13: 5 ranks, not drawn" in said
    assert "of the ranks the first ones and the last two are drawn" in said
    assert "a page shows at most 26 of its tokens, and below them its ends" in said
    assert any(words.startswith("pages drawn: where moved tokens begin") for words in said)
    assert "link: width and number are its tokens" in said  # 12 bands
    assert len(titles(root, "path")) == 12
    many = ElementTree.fromstring(draw_plan(planned("dcp8 paged(4)", "dcp5 paged(4)", (0, 99))))
    assert "link: its width is its tokens" in texts(many)
    assert len(titles(many, "path")) == 8 * 5


def test_few_tokens_are_drawn_one_by_one() -> None:
    for num, detailed in ((160, True), (161, False)):
        said = texts(ElementTree.fromstring(draw_plan(planned("dcp2", "replicated", (0, num),
            "paged(32) tiny"))))  # fmt: skip
        assert (said.count("47") == 2) == detailed


def test_empty_rows_of_a_large_page_are_left_out() -> None:
    note = "of the empty slots at the end of a page, whole rows are not drawn"
    for dst, noted in (("replicated dense(4096)", True), ("replicated paged(40)", False)):
        root = ElementTree.fromstring(draw_plan(planned("dcp2 paged(4)", dst, (0, 33))))
        assert (note in texts(root)) == noted
        assert float(root.attrib["height"]) < 400


@pytest.mark.parametrize("limit", [3, 6, 14])
def test_lanes_account_for_every_page(limit: int) -> None:
    layout = parse_layout("dcp3(i=2) latent:paged(8) indexer:paged(4) tiny")
    for component, size in (("latent.1", 8), ("indexer.0", 4)):
        for lane in lanes_of(layout, component, (100, 1000), limit):
            pages = [p for p in lane.pages if isinstance(p, Page)]
            gaps = [p for p in lane.pages if isinstance(p, Gap)]
            assert len(pages) == limit
            hand = deal(layout.placement.sharding, 1000)[lane.ranks[0]]
            assert lane.num_tokens == len(hand)
            assert len(pages) + sum(g.num_pages for g in gaps) == -(-len(hand) // size)
            assert lane.num_hidden_pages == sum(g.num_pages for g in gaps)
            for page in pages:
                mine = hand[page.entry * size : (page.entry + 1) * size]
                assert page.tokens == (*mine, *[-1] * (size - len(mine)))
            shown = [t for p in pages for t in p.tokens]
            assert hand[-1] in shown
            assert any(100 <= t < 100 + 3 * size for t in shown)


def test_flows_of_hidden_ranks_are_one_band() -> None:
    plan = planned("dcp16 paged(4)", "replicated(2) paged(4) hosts(0,1)", (0, 160))
    sides = [lanes_of(side, "latent.0", plan.tokens, 3) for side in (plan.src, plan.dst)]
    flows = flows_of(plan, *sides)
    assert sum(f.num_tokens for f in flows) == 160
    assert sum(f.nbytes for f in flows) == plan.link_nbytes
    hidden = [f for f in flows if f.src == 9]
    assert sum(f.num_tokens for f in hidden) == 5 * 10
    root = ElementTree.fromstring(draw_plan(plan))
    assert sum("copied on their host" in t for t in titles(root, "path")) == 2
    assert "copy on the targets' host" in texts(root)


def test_heads_stages_and_empty_ranks_are_named() -> None:
    heads = "{key.0:(key:bfloat16x4x4h)[t h e]} heads(0|1)"
    root = ElementTree.fromstring(
        draw_plan(planned("replicated(2) paged(4)", "replicated(2) paged(4)", (0, 9), heads))
    )
    assert texts(root).count("rank 1 · replica 2 of 2 · heads 2 to 3") == 2
    stages = "stages(all.0 on 0|all.1-2 on 1)"
    split = planned(f"replicated(2) paged(4) {stages}", "replicated paged(4)", (0, 9))
    said = texts(ElementTree.fromstring(draw_plan(split)))
    assert "rank 0 · replica 1 of 2 · 2 components" in said
    assert "rank 1 · replica 2 of 2 · 3 components" in said


def test_absent_components_and_groups_are_noted() -> None:
    src = parse_layout("dcp2 paged(4) tiny")
    dst = parse_layout("replicated latent:pool(4) indexer:paged(8) tiny")
    plan = plan_transfer(src, dst, (0, 20), absent=["latent.2", "indexer.2"])
    said = texts(ElementTree.fromstring(draw_plan(plan)))
    assert "2 components are absent: they do not move" in said
    assert any(words.startswith("pages are those of latent.0, bands are of all") for words in said)


def test_colours_go_from_dark_to_light_and_numbers_stay_readable() -> None:
    colours = [position_colour(i / 49) for i in range(50)]
    assert (colours[0], colours[-1]) == (VIRIDIS[0], VIRIDIS[-1])
    assert len(set(colours)) == 50
    light = [int(c[1:3], 16) * 3 + int(c[3:5], 16) * 6 + int(c[5:7], 16) for c in colours]
    assert light == sorted(light)
    assert (ink_on(VIRIDIS[0]), ink_on(VIRIDIS[-1])) == ("#ffffff", "#111111")


def test_tokens_of_a_page_in_few_words() -> None:
    for tokens, words in (
        ((), "empty"), ((-1,), "empty"), ((7, -1), "7"), ((4, 5), "4-5"), ((4, 12), "4,12..12"),
        ((0, 1, 2, 8, 9, -1), "0..9 in 2 runs"), ((0, 8, 16), "0,8..16"),
    ):  # fmt: skip
        assert tokens_text(tokens) == words


def test_names_are_escaped() -> None:
    plan = planned('dcp2 "<&>":paged(4)', "replicated paged(4)", (0, 9))
    drawn = draw_plan(plan)
    assert "<&>" not in drawn
    assert any("<&>" in words for words in texts(ElementTree.fromstring(drawn)))


# --- the command and the page ---------------------------------------------------------------------


def test_the_command_writes_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["draw", "dcp2 paged(4)", "replicated paged(8)", "--tokens", "20", "--model", "tiny"]
    out = tmp_path / "plan.svg"
    assert main([*words, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert out.read_text() == draw_plan(planned("dcp2 paged(4)", "replicated paged(8)", (0, 20)))
    assert main([*words, "-o", str(tmp_path / "plan.gif")]) == 2
    assert "the name must end in .svg or .png" in capsys.readouterr().err
    assert not (tmp_path / "plan.gif").exists()
    assert main([*words, "-o", str(tmp_path / "none" / "plan.svg")]) == 2


def test_the_page_shows_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python tools/explain_page.py` writes it anew."""
    page = (ROOT / "docs/explain.md").read_text(encoding="utf-8")
    (tmp_path / "docs/images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    tool = runpy.run_path(str(ROOT / "tools/explain_page.py"))
    assert tool["fresh"](page) == page
    assert tool["fresh"](page.replace("1,969", "1,968")) == page.replace(
        "reads 1,969", "reads 1,968"
    )
    assert len(tool["SHOWN"].findall(page)) == page.count("```sh")
    drawn = sorted((tmp_path / "docs/images").iterdir())
    assert [image.name for image in drawn] == ["long.svg", "uneven.svg"]
    for image in drawn:
        assert image.read_text() == (ROOT / "docs/images" / image.name).read_text()
