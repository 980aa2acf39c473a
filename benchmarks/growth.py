"""How the cost of a transfer grows with the length of the request, from 4K to 1M tokens.

    python benchmarks/growth.py [--rounds R] [--gib G] [--svg docs/images/growth.svg]

GLM-5.3 with 101 components, blocks of 64, block tables that are random permutations, 8 DCP ranks to
one rank, interleaved by 64 and by 1. Planning and proof are measured at every length. The torch
executor moves as many of the 78 layers as --gib holds on each side, and its time is scaled to all
101 components by bytes. Counts are exact: runs of the plan, descriptors of one request
when every token and field is one, when whatever touches is merged, and when source pages are read
whole. Times are of the process (CPU), all on one thread.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import svgplot
import torch
from attrs import frozen
from copies import executor_calls
from measure import GIB, Memcpy, in_turns, load
from planning import layout, planned, tables

from kvflow.layouts.layout import KVLayout
from kvflow.layouts.paging import page_of
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.transfers.lower import BoundPlan, PageGeometry, descriptors

BLOCK_SIZE = 64
NBYTES_PER_TOKEN = 54_728


@frozen
class Point:
    """One interleave and length; seconds, and counts for one request."""

    interleave: int
    tokens: int
    plan: float
    prove: float
    memcpy: float
    move: float
    runs: int
    rows: int
    merged: int
    pages: int


def pair(interleave: int, layers: int = 78) -> tuple[KVLayout, KVLayout]:
    dealt = layout(RoundRobin(8, interleave), BLOCK_SIZE, layers)
    return dealt, layout(Replicated(), BLOCK_SIZE, layers)


def counts(bound: BoundPlan) -> tuple[int, int, int]:
    """Descriptors: one a token and field, merged, one a whole source page."""
    rows = merged = pages = 0
    for part, _, runs in bound.links_to(0):
        records = [bound.plan.src.spec[name].record for name in part.components]
        ids = len(np.unique(page_of(runs.src, BLOCK_SIZE)))
        for record in set(records):
            times = records.count(record)
            page, most = record.page_pitch(BLOCK_SIZE), bound.dst.num_blocks[part.dst_group]
            geometry = PageGeometry(record, BLOCK_SIZE, 0, page, most)
            rows += times * len(record.pieces(BLOCK_SIZE)) * runs.num_tokens
            merged += times * len(descriptors(runs, geometry, geometry))
            pages += times * ids
    return rows, merged, pages


def measure(interleave: int, tokens: int, rounds: int, memcpy: Memcpy, gib: float) -> Point:
    src, dst = pair(interleave)
    plan, prove, derived = planned((src, dst), tokens)
    seconds = in_turns({"plan": plan, "prove": prove, "memcpy": memcpy}, rounds, time.process_time)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    bound = BoundPlan(derived, tables(src, tokens, 1)(), tables(dst, tokens, 2)())
    scaled = median["memcpy"] * derived.nbytes / GIB
    return Point(
        interleave, tokens, median["plan"], median["prove"], scaled,
        move_seconds(interleave, tokens, gib, rounds), derived.num_runs, *counts(bound),
    )  # fmt: skip


def move_seconds(interleave: int, tokens: int, gib: float, rounds: int) -> float:
    """Median of the executor's seconds, scaled to all components by bytes."""
    layers = max(min(int(78 * gib * GIB / (tokens * NBYTES_PER_TOKEN)) - 1, 78), 1)
    calls, nbytes = executor_calls({"move": pair(interleave, layers)}, tokens)
    seconds = statistics.median(in_turns(calls, rounds, time.process_time)["move"])
    return seconds * tokens * NBYTES_PER_TOKEN / nbytes


def table(rounds: int, gib: float) -> list[Point]:
    """Measures and prints one line after the other."""
    print(f"median of {rounds} rounds, 1 thread, {load()}\n\n{HEADER}")
    memcpy = Memcpy(GIB)
    points = []
    for interleave in (64, 1):
        for tokens in (1 << k for k in range(12, 21)):
            points.append(measure(interleave, tokens, rounds, memcpy, gib))
            print(row(points[-1]), flush=True)
    return points


HEADER = """\
| I | tokens | plan ms | prove ms | memcpy s | torch move s | runs | rows | merged | pages |
|---|---|---|---|---|---|---|---|---|---|"""


def row(p: Point) -> str:
    return (
        f"| {p.interleave} | {p.tokens} | {p.plan * 1e3:.2f} | {p.prove * 1e3:.2f} | "
        f"{p.memcpy:.3f} | {p.move:.3f} | {p.runs} | {p.rows} | {p.merged} | {p.pages} |"
    )


def picture(points: list[Point]) -> str:
    by_interleave = {i: [p for p in points if p.interleave == i] for i in (64, 1)}
    seconds, numbers = {}, {}
    for i, line in by_interleave.items():
        seconds[f"plan and prove, I={i}"] = [(p.tokens, p.plan + p.prove) for p in line]
        seconds[f"torch executor, I={i}"] = [(p.tokens, p.move) for p in line]
        numbers[f"runs of the plan, I={i}"] = [(p.tokens, p.runs) for p in line]
        numbers[f"merged descriptors, I={i}"] = [(p.tokens, p.merged) for p in line]
    seconds["memcpy of the bytes"] = [(p.tokens, p.memcpy) for p in by_interleave[64]]
    numbers["one descriptor a row and field"] = [(p.tokens, p.rows) for p in by_interleave[64]]
    numbers["whole source pages"] = [(p.tokens, p.pages) for p in by_interleave[64]]
    return svgplot.page(
        svgplot.chart("Time of one request", "seconds", seconds),
        svgplot.chart("Runs and descriptors of one request", "number", numbers),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=2.0, help="of caches on each side")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    points = table(args.rounds, args.gib)
    if args.svg:
        args.svg.write_text(picture(points))


if __name__ == "__main__":
    main()
