"""How much the queries of an extend choose alike, and what that makes of the ways' bytes.

    python benchmarks/selection_curves.py [--svg FOLDER]
    python benchmarks/selection_curves.py --measure [--windows N] [--length L]

With --measure the committed checkpoint reads held-out files, every query's choice is kept, and what
is found is written to selection_overlap.json, beside this file. A rank's
queries are two balanced chunks of the new tokens; how many cached positions they choose together,
over what as many independent choices would give (`StepCounts.union`), is the *overlap ratio* of
so many queries and such a context, in multiples of the top-k.

From these the cost model plans GLM-5.3's records on P = W = 8 from 64 to 8,192 new tokens and from
4K to 1M cached ones, for which nothing moves: once as if queries chose independently, and once with
that ratio. Outside what was measured the nearest measured ratio holds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from context_gather import PLENTY, counts, shapes
from measure import load
from svgplot import chart, page
from tokenizers import Tokenizer
from torch import Tensor

from kvflow.comm import LocalComm
from kvflow.engine.access import AccessOptions, PagedMemory
from kvflow.engine.access.choice import choose_attention
from kvflow.engine.memory import StepRequest
from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Ints, Replicated
from kvflow.models.glm import Glm
from kvflow.models.kvstep import IndexQueries, KVStep
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection
from kvflow.transfers.executors.base import RankCache

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODEL = EXAMPLES / "models" / "tiny-glm-python"
sys.path.insert(0, str(EXAMPLES))
from train_tiny_glm import library_files  # noqa: E402

FILE = Path(__file__).with_name("selection_overlap.json")
RANKS, CHUNK, WINDOWS = 8, 512, 3
NEWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = tuple(1 << k for k in range(12, 21))
MULTIPLES = (2, 4, 8, 16, 24, 31)
"""Contexts of the measurement, in multiples of the top-k."""

WORKSPACE = AccessOptions().workspace_tokens


# --- what is chosen together


@define(eq=False)
class Recorded:
    """A `KVStep` that keeps what every indexer chooses."""

    inner: KVStep
    chosen: dict[str, list[Tensor]] = field(factory=dict)

    @property
    def max_context_len(self) -> int:
        return self.inner.max_context_len

    def publish(self, component: str, rows: Tensor) -> None:
        self.inner.publish(component, rows)

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        found = self.inner.topk(component, queries, segments)
        self.chosen.setdefault(component, []).extend(found)
        return found

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        return self.inner.attend(component, queries, selection)

    def release(self, component: str) -> None:
        self.inner.release(component)


def choices(model: Glm, tokens: Sequence[int]) -> dict[str, Ints]:
    """By indexer int64 ``[len(tokens), topk]``: the positions that each query chooses; those of the
    first topk queries are not all real."""
    layout = KVLayout.uniform(model.spec, Placement.simple(Replicated()), Paged(64))
    table = list(range(layout.num_blocks_for(len(tokens))["kv"]))
    memory = PagedMemory(
        layout, RankCache.allocate(layout, 0, {"kv": len(table)}), comm := LocalComm()
    )
    mtp, topk = frozenset(model.spec.select(part="mtp")), model.config.index_topk
    kept: dict[str, list[Ints]] = {}
    for start in range(0, len(tokens), CHUNK):
        stop = min(start + CHUNK, len(tokens))
        queries = Placement.simple(Replicated(start, stop))
        kv = Recorded(memory.open([StepRequest("a", start, stop, queries, {"kv": table})], mtp))
        segments = [Segment(0, torch.arange(start, stop), stop)]
        model.forward(torch.tensor(tokens[start:stop]), segments, kv, comm)
        for name, (rows,) in kv.chosen.items():
            wide = np.zeros((stop - start, topk), np.int64)
            wide[:, : rows.shape[1]] = rows.numpy()
            kept.setdefault(name, []).append(wide)
    return {name: np.concatenate(parts) for name, parts in kept.items()}


def union_rows(chosen: Ints, new: int, cached: int, ranks: int) -> int:
    """Cached positions that the ranks' queries choose together, each once a rank, of a request of
    `cached` tokens and `new` more. `chosen` int64 ``[cached + new, topk]``, all real."""
    stop, total = cached + new, 0
    deal = BalancedChunks(ranks, cached, stop)
    for rank in range(ranks):
        mine = deal.token(rank, np.arange(deal.local_len(stop, rank)))
        is_chosen = np.zeros(stop, np.bool_)
        is_chosen[chosen[mine]] = True
        total += int(is_chosen[:cached].sum())
    return total


@frozen
class Overlap:
    """Rows that queries chose together over what independent ones would, measured at some numbers
    of a rank's queries: for each, ratios by context in multiples of the top-k, both ascending."""

    ratios: Mapping[float, Sequence[tuple[float, float]]]

    def at(self, num_queries: float, multiple: float) -> float:
        """Linear between the logarithms of what was measured, and outside the nearest."""
        by_queries = []
        for line in self.ratios.values():
            multiples, ratios = np.array(line).T
            by_queries.append(np.interp(np.log(multiple), np.log(multiples), ratios))
        return float(np.interp(np.log(num_queries), np.log([*self.ratios]), by_queries))


INDEPENDENT = Overlap({1.0: ((1.0, 1.0),)})


def measured_windows(length: int, num_windows: int) -> list[tuple[str, list[int]]]:
    """(name, ids) of windows that lie in one held-out file each: the first of every file, longest
    files first, then the second. The first token is <sop>."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    paths = library_files()[1]
    texts = [(p.name, tokenizer.encode(p.read_text(errors="ignore")).ids) for p in paths]
    texts.sort(key=lambda text: -len(text[1]))
    found = [
        (f"{name}:{start}", ids[:1] + ids[start + 1 : start + length])
        for start in range(0, len(texts[0][1]), length)
        for name, ids in texts
        if start + length <= len(ids)
    ]
    if len(found) < num_windows:
        raise SystemExit(f"held-out files have {len(found)} windows of {length} tokens")
    return found[:num_windows]


@define(eq=False)
class Measured:
    """Sums of `union_rows` over windows: by indexer, and (new tokens, multiple of the top-k)."""

    topk: int
    cells: Sequence[tuple[int, int]]
    num_windows: int = 0
    rows: dict[str, dict[tuple[int, int], int]] = field(factory=dict)

    def add(self, chosen: Mapping[str, Ints]) -> None:
        self.num_windows += 1
        for indexer, each in chosen.items():
            sums = self.rows.setdefault(indexer, dict.fromkeys(self.cells, 0))
            for new, m in self.cells:
                cached = m * self.topk
                sums[new, m] += union_rows(each[: cached + new], new, cached, RANKS)

    def overlap(self, *indexers: str) -> Overlap:
        """Of some indexers together."""
        lines: dict[float, list[tuple[float, float]]] = {}
        for new, m in self.cells:
            alone = counts(new, m * self.topk, RANKS).union(self.topk)
            rows = sum(self.rows[name][new, m] for name in indexers)
            ratio = rows / (alone * self.num_windows * len(indexers))
            lines.setdefault(new / RANKS, []).append((m, ratio))
        return Overlap(lines)


def measure(length: int, num_windows: int) -> Iterator[Measured]:
    """What has been found after each window."""
    model = Glm.load(MODEL, kv_dtype="fp8")
    topk = model.config.index_topk
    found = Measured(topk, [(n, m) for n in NEWS for m in MULTIPLES if n + m * topk <= length])
    for name, ids in measured_windows(length, num_windows):
        found.add(choices(model, ids))
        print(f"  {name}", flush=True)
        yield found


# --- what it makes of the bytes


def rank_nbytes(
    new: int, cached: int, overlap: Overlap, workspace: int = PLENTY
) -> dict[str, float]:
    """Bytes that one rank receives for one layer, by way. Where a union exceeds the workspace, it
    comes in parts, which fetch again what they share."""
    attention, _, _, _ = shapes(78)
    step = counts(new, cached, RANKS)
    size, _ = attention.union_parts(step, workspace)
    part = evolve(step, num_queries=[[min(size, n)] for (n,) in step.num_queries])
    num_parts = step.total_queries / part.total_queries
    ratio = overlap.at(part.most_queries, cached / attention.topk)
    return {
        "whole": attention.nbytes("whole", step) / RANKS,
        "union": attention.nbytes("union", part) / RANKS * num_parts * ratio,
        "queries": attention.nbytes("queries", step) / RANKS,
    }


def auto(new: int, cached: int) -> str:
    """What a step takes, where its workspace holds the context."""
    return choose_attention(shapes(78)[0], counts(new, cached, RANKS), None, PLENTY)


def crossover(holds: Callable[[int], bool]) -> int | None:
    """The longest context, in steps of 1/8 of a power of two up to 1M, for which something holds;
    None if there is none."""
    contexts = [round(2 ** (eighth / 8)) for eighth in range(8 * 11, 8 * 20 + 1)]
    return max(filter(holds, contexts), default=None)


def whole_is_less(new: int, overlap: Overlap) -> Callable[[int], bool]:
    """Of a context, whether it moves no more bytes whole than as a union."""

    def holds(cached: int) -> bool:
        ways = rank_nbytes(new, cached, overlap)
        return ways["whole"] <= ways["union"]

    return holds


def save(measured: Measured) -> None:
    indexers = [*measured.rows]
    found = {"all": measured.overlap(*indexers)} | {n: measured.overlap(n) for n in indexers}
    lines = [
        {"indexer": name, "queries": num, "ratios": [[m, round(r, 4)] for m, r in line]}
        for name, overlap in found.items()
        for num, line in overlap.ratios.items()
    ]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")


def read() -> tuple[Overlap, dict[str, Overlap]]:
    """What `save` has written: the overlap of all indexers, and of each."""
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for line in json.loads(FILE.read_text()):
        ratios = [(m, r) for m, r in line["ratios"]]
        found.setdefault(line["indexer"], {})[line["queries"]] = ratios
    return Overlap(found.pop("all")), {name: Overlap(lines) for name, lines in found.items()}


def report_overlap(overall: Overlap, by_indexer: Mapping[str, Overlap]) -> None:
    for name, overlap in {"all": overall, **by_indexer}.items():
        print(f"\noverlap ratio, {name}; contexts in multiples of the top-k")
        print(f"{'queries of a rank':>18}" + "".join(f"{m:8}" for m in MULTIPLES))
        for num, line in overlap.ratios.items():
            print(f"{num:18g}" + "".join(f"{r:8.3f}" for _, r in line))


def report_bytes(overlap: Overlap) -> None:
    print("\nGLM-5.3, P = W = 8: MB a rank receives for a layer; * is what the cost model takes")
    print(f"{'new':>6}{'cached':>9}{'whole':>10}{'union':>10}{'measured':>10}{'queries':>10}")
    for new in NEWS:
        for cached in CONTEXTS:
            ways, real = rank_nbytes(new, cached, INDEPENDENT), rank_nbytes(new, cached, overlap)
            taken = auto(new, cached)
            cells = [
                (ways["whole"], taken == "whole"),
                (ways["union"], taken == "union"),
                (real["union"], False),
                (ways["queries"], taken == "queries"),
            ]
            line = "".join(f"{nbytes / 1e6:9.2f}{'*' * star:1}" for nbytes, star in cells)
            print(f"{new:6}{cached:9}{line}")


def report_crossover(overlap: Overlap) -> None:
    print(
        "\nthe longest context that moves no more whole than as a union, and up to where the cost"
    )
    print("model takes whole")
    print(f"{'new':>6}{'independent':>13}{'measured':>10}{'cost model':>12}")
    for new in NEWS:
        found = [
            crossover(whole_is_less(new, INDEPENDENT)),
            crossover(whole_is_less(new, overlap)),
            crossover(lambda cached, new=new: auto(new, cached) == "whole"),
        ]
        words = ["none" if c is None else str(c) for c in found]
        print(f"{new:6}{words[0]:>13}{words[1]:>10}{words[2]:>12}")


def report_parts() -> None:
    print(f"\nindependent unions, workspace of {WORKSPACE} tokens: MB a rank receives for a layer")
    print(f"{'new':>6}{'cached':>9}{'one part':>10}{'in parts':>10}")
    for new in NEWS:
        for cached in (c for c in CONTEXTS if c > WORKSPACE):
            one, parts = (
                rank_nbytes(new, cached, INDEPENDENT, w)["union"] / 1e6 for w in (PLENTY, WORKSPACE)
            )
            print(f"{new:6}{cached:9}{one:10.2f}{parts:10.2f}")


def draw(overlap: Overlap, folder: Path) -> None:
    def lines(points: Sequence[tuple[int, int, int]]) -> dict[str, list[tuple[float, float]]]:
        """(x, new, cached) -> a line for every way."""
        found: dict[str, list[tuple[float, float]]] = {}
        for x, new, cached in points:
            ways = rank_nbytes(new, cached, INDEPENDENT)
            union = rank_nbytes(new, cached, overlap)["union"]
            found.setdefault("whole", []).append((x, ways["whole"]))
            found.setdefault("union, independent", []).append((x, ways["union"]))
            found.setdefault("union, measured overlap", []).append((x, union))
            found.setdefault("queries", []).append((x, ways["queries"]))
        return found

    unit = "bytes a rank receives for a layer"
    contexts = [
        chart(f"{new:,} new tokens", unit, lines([(c, new, c) for c in CONTEXTS]), "cached tokens")
        for new in (64, 512, 2048, 8192)
    ]
    news = [
        chart(f"{c:,} cached tokens", unit, lines([(n, n, c) for n in NEWS]), "new tokens")
        for c in (1 << 14, 1 << 16, 1 << 18, 1 << 20)
    ]
    multiples = sorted({m for line in overlap.ratios.values() for m, _ in line})
    ratios = chart(
        "rows of a union, measured over independent",
        "by cached tokens",
        {
            f"{m:g} x top-k": [
                (n, r) for n, line in overlap.ratios.items() for at, r in line if at == m
            ]
            for m in multiples
        },
        "queries of a rank",
    )
    (folder / "selection-contexts.svg").write_text(page(*contexts))
    (folder / "selection-new.svg").write_text(page(*news))
    (folder / "selection-overlap.svg").write_text(page(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="write selection_overlap.json anew")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of one held-out file each")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a window")
    parser.add_argument("--svg", type=Path, help="draw the curves into this folder")
    args = parser.parse_args()
    if args.windows < 1 or args.length < 1024:
        parser.error("--windows is at least 1 and --length at least 1024")
    torch.set_num_threads(1)
    if args.measure:
        print(f"{args.windows} windows of {args.length} tokens of held-out files, {load()}")
        for found in measure(args.length, args.windows):
            save(found)
    overlap, by_indexer = read()
    report_overlap(overlap, by_indexer)
    report_bytes(overlap)
    report_crossover(overlap)
    report_parts()
    if args.svg:
        draw(overlap, args.svg)


if __name__ == "__main__":
    main()
