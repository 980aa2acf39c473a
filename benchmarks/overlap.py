"""Whether fetches of cached rows run beside computing: the logs of a real step say so.

    python benchmarks/overlap.py [--ranks P] [--cached L] [--new N] [--rounds R] [--svg FILE]

P = W processes over gloo share the KV cache of the committed checkpoint. A held-out text is
prefilled in chunks; then the next chunk is computed again and again, with and without overlap, in
turns, and every log is checked. What a link of a given speed would leave exposed at GLM-5.3's
sizes is computed beside it (`exposed.py`).
"""

import argparse
import statistics
import sys
from pathlib import Path

from attrs import frozen
from exposed import report
from group import run_group
from measure import load
from timeline import blocked, document, panel, phases, violations
from tokenizers import Tokenizer

from kvflow.comm import DistComm
from kvflow.engine.access import AccessOptions, PagedMemory, StepLog
from kvflow.engine.access.order import LayerOrder
from kvflow.engine.memory import balanced_deal
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import RankCache

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODEL = EXAMPLES / "models" / "tiny-glm-python"
sys.path.insert(0, str(EXAMPLES))
from train_tiny_glm import library_files  # noqa: E402

BLOCK, WIDTH = 64, 900
MODES = (
    ("whole", AccessOptions("whole", "keys")),
    ("whole", AccessOptions("whole", "keys", overlap=False)),
    ("union", AccessOptions("union", "keys")),
    ("union", AccessOptions("union", "keys", overlap=False)),
)


@frozen
class Task:
    """What every rank does: prefills all tokens but the last `new` in chunks, and computes those
    `rounds` times in every mode."""

    tokens: tuple[int, ...]
    chunk: int
    new: int
    rounds: int


@frozen(eq=False)
class Found:
    """By mode and round, the logs of a rank; and where rows of the chunk's requests came from."""

    spec: KVCacheSpec
    logs: list[list[StepLog]]


def held_out_tokens(count: int) -> tuple[int, ...]:
    """The first tokens of the held-out files, one file after the other."""
    tokenizer, ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")), list[int]()
    for path in library_files()[1]:
        ids += tokenizer.encode(path.read_text(errors="ignore")).ids
        if len(ids) >= count:
            return tuple(ids[:count])
    raise SystemExit(f"the held-out files have {len(ids)} tokens, {count} were asked for")


def on_rank(comm: DistComm, task: Task) -> Found:
    size = comm.size
    model = Glm.load(MODEL, kv_dtype="fp8", rank=comm.rank, size=size)
    mesh = Mesh((Axis("pcp", size), Axis("dcp", size, ("pcp",))))
    placement = mesh.place(RoundRobin(size, BLOCK), "dcp")
    layout = KVLayout.uniform(model.spec, placement, Paged(BLOCK))
    table = list(range(layout.num_blocks_for(len(task.tokens))["kv"]))
    cache = RankCache.allocate(layout, comm.rank, {"kv": len(table)})
    deal = balanced_deal([(rank,) for rank in range(size)])
    runners = [
        StepRunner(model, PagedMemory(layout, cache, comm, options), comm, deal)
        for _, options in MODES
    ]
    cached = len(task.tokens) - task.new
    for start in range(0, cached, task.chunk):
        run_chunk(runners[0], task.tokens, start, min(start + task.chunk, cached), table)
    logs: list[list[StepLog]] = [[] for _ in MODES]
    for turn in range(task.rounds + 1):
        for mode, runner in enumerate(runners):
            comm.barrier()
            run_chunk(runner, task.tokens, cached, len(task.tokens), table)
            if turn:
                logs[mode].append(runner.memory.log)
    return Found(model.spec, logs)


def run_chunk(
    runner: StepRunner, tokens: tuple[int, ...], start: int, stop: int, table: list[int]
) -> None:
    following = tokens[stop] if stop < len(tokens) else tokens[0]
    item = StepItem("a", start, list(tokens[start:stop]), following, {"kv": table}, None)
    runner.run([item])


def step_seconds(log: StepLog, order: LayerOrder) -> float:
    spans = phases(log, order)
    return spans[-1].end - spans[0].begin


def stood_still(log: StepLog, *, overlap: bool) -> float:
    spans = [blocked(f, overlap=overlap) for f in log.fetches]
    return sum(end - begin for begin, end in spans)


def check(found: list[Found]) -> int:
    """Every log of every rank against the rules; raises `SystemExit` at the first that breaks
    one."""
    order, num_fetches = LayerOrder(found[0].spec), 0
    for rank, f in enumerate(found):
        for (way, options), logs in zip(MODES, f.logs, strict=True):
            for log in logs if options.overlap else []:
                num_fetches += len(log.fetches)
                if wrong := violations(log, order, way):
                    raise SystemExit(f"rank {rank}, {way}: {wrong}")
    return num_fetches


def report_run(found: list[Found]) -> None:
    """Time that fetches take and that computing stands still for them, medians over rounds of the
    sums over ranks."""
    print(f"{'':24}{'fetched MB':>12}{'fetches ms':>12}{'exposed ms':>12}{'of the step':>12}")
    exposed = []
    for mode, (way, options) in enumerate(MODES):
        rounds = list(zip(*(f.logs[mode] for f in found), strict=True))
        still = [sum(stood_still(g, overlap=options.overlap) for g in r) for r in rounds]
        taken = [sum(f.times.ended - f.times.began for g in r for f in g.fetches) for r in rounds]
        order = LayerOrder(found[0].spec)
        share = [
            s / sum(step_seconds(g, order) for g in r) for s, r in zip(still, rounds, strict=True)
        ]
        nbytes = sum(f.nbytes for g in rounds[0] for f in g.fetches)
        exposed.append(still)
        print(
            f"{way + (', overlap' if options.overlap else ', one by one'):24}{nbytes / 1e6:12.2f}"
            f"{statistics.median(taken) * 1e3:12.1f}{statistics.median(still) * 1e3:12.1f}"
            f"{statistics.median(share):12.3f}"
        )
    for name, with_overlap, without in (("whole", *exposed[:2]), ("union", *exposed[2:])):
        ratios = [a / b for a, b in zip(with_overlap, without, strict=True)]
        print(f"{name}: exposed with overlap over without, median: {statistics.median(ratios):.2f}")


def draw(found: Found, args: argparse.Namespace) -> str:
    """Rank 0's step of median length, in three modes."""
    order, shown = LayerOrder(found.spec), []
    for mode, words in (
        (1, "whole context, one by one"),
        (0, "whole context, with overlap"),
        (2, "union of chosen rows, with overlap"),
    ):
        logs = sorted(found.logs[mode], key=lambda log: step_seconds(log, order))
        shown.append((words, logs[len(logs) // 2], MODES[mode][1].overlap))
    seconds = max(step_seconds(log, order) for _, log, _ in shown)
    where = f"rank 0 of {args.ranks}, {args.new} new tokens on {args.cached}"
    panels = [
        panel(f"{words}: {where}", log, order, WIDTH, seconds, overlap=overlap)
        for words, log, overlap in shown
    ]
    return document(panels, len(found.spec.select(kind="latent", part="main")), WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk before")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--svg", type=Path, help="draw the timeline into this file")
    args = parser.parse_args()
    if min(args.ranks - 1, args.cached, args.chunk, args.new, args.rounds) < 1:
        parser.error("--ranks is at least 2, the others are at least 1")
    print(f"P = W = {args.ranks} over gloo, {args.new} new tokens on {args.cached}, {load()}")
    tokens = held_out_tokens(args.cached + args.new)
    found = run_group(args.ranks, on_rank, Task(tokens, args.chunk, args.new, args.rounds))
    print(f"{check(found)} fetches, each issued and waited for where it should be")
    report_run(found)
    if args.svg:
        args.svg.write_text(draw(found[0], args))
    report()


if __name__ == "__main__":
    main()
