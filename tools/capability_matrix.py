"""Writes docs/capabilities.md: which transfers kvflow plans, proves and moves, found by doing it.

python tools/capability_matrix.py          # writes the page
python tools/capability_matrix.py --check  # exit status 1 if the committed page is another one
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from kvflow.explain.matrix import (
    HEAD_KINDS,
    KINDS,
    MODEL,
    REFUSED,
    TOKENS,
    Kind,
    Outcome,
    Refused,
    run_matrix,
    run_refused,
)
from kvflow.explain.naive import num_misplaced
from kvflow.explain.prices import synthetic_binding
from kvflow.layouts import BalancedChunks, Binding, RoundRobin
from kvflow.layouts.text import parse_layout
from kvflow.testing import cells, check_law, tag
from kvflow.testing.images import Images
from kvflow.testing.law import SOURCE_FILL, TARGET_FILL, allocate_caches
from kvflow.transfers.cuts import verify_cut
from kvflow.transfers.executors.reference import ReferenceExecutor
from kvflow.transfers.joint import BoundJoint, Holding, plan_joint, verify_joint
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.planner import plan_transfer
from kvflow.transfers.readiness import Schedule, stream_parts
from kvflow.transfers.verify import verify_plan

PAGE = Path(__file__).parents[1] / "docs" / "capabilities.md"
REAL = "glm-5.3/fp8"
HIT, PROMPT = 1280, 2000

# --- moving, byte for byte ------------------------------------------------------------------------


def move(src: Binding, dst: Binding, tokens: tuple[int, int]) -> None:
    """Moves on fresh caches, one field of one token at a time, and compares every byte."""
    check_law(ReferenceExecutor(), src, dst, tokens)


def move_all(
    legs: Iterable[tuple[int, BoundPlan]],
    srcs: Sequence[Binding],
    dst: Binding,
    claims: Mapping[str, tuple[int, int]],
) -> None:
    """Moves several plans into one target, each from the source it names; then the target must
    hold the claimed tokens of each component and be untouched everywhere else."""
    target = allocate_caches(dst.layout, dst.num_blocks, TARGET_FILL)
    wanted = Images(target)
    for name, tokens in claims.items():
        for cell in cells(dst.layout, dst, tokens, (name,)):
            wanted.put(cell, tag(cell))
    sources = []
    for binding in srcs:
        caches = allocate_caches(binding.layout, binding.num_blocks, SOURCE_FILL)
        held = Images(caches)
        names = binding.layout.spec.names
        for cell in cells(binding.layout, binding, (0, min(binding.lengths.values())), names):
            held.put(cell, tag(cell))
        held.write()
        sources.append(caches)
    for source, bound in legs:
        ReferenceExecutor().execute(bound, sources[source], target)
    wanted.compare("target")


# --- rows that are more than one plan -------------------------------------------------------------


def joint_hit(model: str, hit: int, prompt: int) -> tuple[int, int]:
    """An offload hit and the remainder over the network in one request, into HiSparse host pages;
    in the small model it is moved too. Returns runs and links."""
    texts = ("replicated pool(256)", "dcp8(i=1) paged(64)")
    sides = [parse_layout(f"{text} {model}") for text in texts]
    dst = parse_layout(f"replicated latent:pool(64) indexer:paged(64) {model}")
    sources = [Holding(side, (0, n)) for side, n in zip(sides, (hit, prompt), strict=True)]
    joint = plan_joint(sources, dst, (0, prompt))
    srcs = [synthetic_binding(side, n) for side, n in zip(sides, (hit, prompt), strict=True)]
    there = synthetic_binding(dst, prompt)
    verify_joint(joint, srcs, there)
    if model == MODEL:
        bound = BoundJoint(joint, srcs, there)
        legs = [(leg.source, b) for leg, b in zip(joint.legs, bound.legs, strict=True)]
        move_all(legs, srcs, there, {c.component: (c.start, c.stop) for c in joint.claims})
    return joint.num_runs, len(joint.links)


def recovery(model: str, start: int, stop: int) -> tuple[int, int]:
    """Only one layer kind of one layer, and only the tokens of the pages that are missing."""
    src = parse_layout(f"dcp8(i=1) paged(16) {model}")
    dst = parse_layout(f"replicated(2) paged(64) {model}")
    others = set(src.spec.names) - {"latent.1"}
    plan = plan_transfer(src, dst, (start, stop), components=["latent.1"], absent=others)
    here, there = synthetic_binding(src, stop), synthetic_binding(dst, stop)
    verify_plan(plan, here, there)
    if model == MODEL:
        bound = [(0, BoundPlan(plan, here, there))]
        move_all(bound, [here], there, {"latent.1": (start, stop)})
    return plan.num_runs, len(plan.links)


def streaming(model: str, step: int, prompt: int) -> tuple[int, int]:
    """A plan cut by prefill step and layer, each part moved as soon as its rows are complete."""
    src = parse_layout(f"dcp8(i=1) paged(64) {model}")
    dst = parse_layout(f"replicated latent:pool(64) indexer:paged(32) {model}")
    plan = plan_transfer(src, dst, (0, prompt))
    steps = [BalancedChunks(8, at, min(at + step, prompt)) for at in range(0, prompt, step)]
    parts = list(stream_parts(plan, Schedule(steps)))
    verify_cut(plan, [part.plan for part in parts])
    if model == MODEL:
        here, there = synthetic_binding(src, prompt), synthetic_binding(dst, prompt)
        bound = [(0, BoundPlan(part.plan, here, there)) for part in parts]
        move_all(bound, [here], there, dict.fromkeys(dst.spec.names, (0, prompt)))
    return len(parts), len(plan.links)


# --- the page -------------------------------------------------------------------------------------

INTRO = """# What kvflow transfers

Written by `python tools/capability_matrix.py`; a test compares this page with a fresh one. Nothing
here is claimed: every mark is a plan that was derived, proven, and moved byte for byte.

**Marks.** ✓ the plan was derived and proven (bounds, overlaps, coverage), the tokens were moved by
the slow reference executor, and every byte of both sides was compared with an oracle that shares no
code with the planner. The number is the runs of the plan. ✗ would be a failure.
"""


def page() -> str:
    """The whole page."""
    sections = [
        INTRO,
        "## Any layout to any layout\n",
        f"Rows send, columns receive. Tokens [{TOKENS[0]}, {TOKENS[1]}): a prefix is there, pages "
        "are partial at both\nends. Two layers of rows and one of planar pages.\n",
        _crossed(KINDS),
        "## Heads\n",
        "Keys and values of two heads, dealt to T ranks; the order of a page's digits differs.\n",
        _crossed(HEAD_KINDS),
        "## What today's systems refuse\n",
        "The numbers are those of a list of what a widely used serving system refused when this was"
        "\nwritten. Plans are for GLM-5.3 in fp8, moves for a small model with the same placements."
        "\nOf 2,000 tokens unless said otherwise.\n",
        _refused_table(),
        "## What is silently wrong today\n",
        "The receiver takes the interleave of an 8-way sender to be its page size of 64. Of 2,000 "
        "tokens it reads\nfrom a wrong place (kvflow's own moves of row 1 above were compared byte "
        "for byte):\n",
        _silent_table(),
    ]
    return "\n".join(sections)


def _crossed(kinds: Sequence[Kind]) -> str:
    outcomes = run_matrix(kinds, move)
    letters = [chr(ord("a") + i) for i in range(len(kinds))]
    head = ["", "source", *letters]
    rows = [
        [
            letter,
            f"{kind.name}: `{kind.text}`",
            *(_mark(outcomes[kind.name, k.name]) for k in kinds),
        ]
        for letter, kind in zip(letters, kinds, strict=True)
    ]
    good = sum(outcome.is_good for outcome in outcomes.values())
    return f"{_table(head, rows)}\n{good} of {len(outcomes)} pairs.\n"


def _mark(outcome: Outcome) -> str:
    return f"✓ {outcome.num_runs}" if outcome.is_good else f"✗ {outcome.error}"


def _refused_table() -> str:
    rows = []
    for row in REFUSED:
        rows += _pair_rows(row)
    for number, what, today, how, run, real, small in SPECIAL:
        runs, links = run(REAL, *real)
        run(MODEL, *small)
        rows.append([str(number), what, today, how, _proven(runs, links), "✓"])
    rows.sort(key=lambda cells: int(cells[0]))
    said = set()
    for cells_ in rows:
        if cells_[0] in said:
            cells_[:3] = "", "", ""
        said.add(cells_[0])
    return _table(["", "transfer", "today", "kvflow ran", "proven, runs", "moved"], rows)


def _pair_rows(row: Refused) -> list[list[str]]:
    start, stop = row.tokens
    which = "" if (start, stop) == (0, 2000) else f", tokens [{start}, {stop})"
    return [
        [
            str(row.number), row.what, row.today, f"`{src}` to `{dst}`{which}",
            _proven(outcome.num_runs, outcome.num_links) if outcome.verified else "✗",
            "✓" if outcome.moved else f"✗ {outcome.error}",
        ]
        for (src, dst), outcome in zip(row.pairs, run_refused(row, move), strict=True)
    ]  # fmt: skip


def _proven(num_runs: int, num_links: int) -> str:
    return f"✓ {num_runs:,} in {num_links} link{'s' * (num_links != 1)}"


SPECIAL = (
    (
        9, "an offload hit and a network remainder in one request; offload of HiSparse pages",
        "refused", f"`replicated pool(256)` up to {HIT}, `dcp8(i=1) paged(64)` from there, "
        "to `replicated latent:pool(64) indexer:paged(64)`",
        joint_hit, (HIT, PROMPT), (160, 250),
    ),
    (
        11, "recovery of what is missing alone", "the whole request is moved again",
        "one layer's latent rows, tokens [640, 704), `dcp8(i=1) paged(16)` to "
        "`replicated(2) paged(64)`", recovery, (640, 704), (64, 128),
    ),
    (
        12, "streaming while prefill still runs", "the pull starts after the request ended",
        "cut by (step of 512, layer), balanced chunks: parts in place of runs",
        streaming, (512, PROMPT), (64, 200),
    ),
)  # fmt: skip


def _silent_table() -> str:
    rows = [
        [str(i), f"{num_misplaced(RoundRobin(8, i), RoundRobin(8, 64), (0, 2000)):,}"]
        for i in (64, 32, 16, 8, 1)
    ]
    return _table(["interleave", "tokens misplaced by the page formula"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def main() -> int:
    """Writes or checks the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fresh = page()
    if options.check:
        if PAGE.read_text(encoding="utf-8") != fresh:
            print(f"{PAGE.name} is not what a run gives; write it anew", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
