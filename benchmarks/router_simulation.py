"""Rules of routing on recorded agent sessions, in a simulated deployment.

    python benchmarks/router_simulation.py

Replays the sessions of tests/fixtures/traces in fleets of 4 + 4 and 8 + 8 engines whose tiers hold
25 % and 100 % of the working set, under round-robin, least-loaded, session affinity, and kvflow's
router told of everything half a second late or at once. Prints one table a fleet and size.
docs/router.md says what is simulated and what the columns mean. Time is simulated, so the numbers
are the same on any machine; it takes three quarters of an hour of one core.
"""

import argparse
import gc
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from attrs import evolve
from router_sim.report import Report, ratios, report
from router_sim.rules import Kvflow, LeastLoaded, RoundRobin, SessionAffinity
from router_sim.setting import Setting
from router_sim.traces import Session, load, read
from router_sim.world import Rule, World

from kvflow.router.config import RouterConfig

TRACES = Path(__file__).parents[1] / "tests/fixtures/traces/weka_cc_cut.jsonl.gz"
MAX_THINK = 60.0
EXACT = "kvflow, exact state"
TARGET = 1.3

RULES: dict[str, Callable[[Setting], Rule]] = {
    "round-robin": lambda setting: RoundRobin(),
    "least-loaded": lambda setting: LeastLoaded(),
    "session affinity": lambda setting: SessionAffinity(),
    "kvflow": lambda setting: Kvflow.of(setting, config(setting), late=True),
    EXACT: lambda setting: Kvflow.of(setting, config(setting), late=False),
    "kvflow without loans": lambda setting: Kvflow.of(
        setting, evolve(config(setting), loans=False), late=True
    ),
}


def config(setting: Setting) -> RouterConfig:
    """kvflow's defaults; recent work is what the fleet can compute in half a minute."""
    tokens = int(30 * setting.prefill_rate * setting.num_prefill)
    return RouterConfig(setting.block_size, balance_tokens=tokens)


_SESSIONS: list[Session] = []  # of this process and those it forks


def run(setting: Setting, rule: str) -> tuple[str, Report]:
    return rule, report(World(setting, RULES[rule](setting), _SESSIONS).run())


def working_set(block_size: int) -> int:
    """Distinct tokens of all prompts."""
    blocks = {block for one in _SESSIONS for turn in one.walk() for block in turn.chain}
    return len(blocks) * block_size


HEAD = (
    "| rule | requests | hits | hits, of exact | load, whole run | load, median window "
    "| load, worst window | windows above 1.3 | busy | TTFT p50 / p90 / p99 |\n" + "|---" * 10 + "|"
)


def row(name: str, found: Report, exact: Report) -> str:
    by_window = ratios(found.computed)
    p50, p90, p99 = np.percentile(found.ttft, [50, 90, 99])
    cells = (
        name,
        f"{found.num_requests:,}",
        f"{found.hit_share:.2%}",
        f"{found.hit_share / exact.hit_share:.4f}",
        f"{found.load_ratio:.3f}",
        f"{np.median(by_window):.2f}",
        f"{by_window.max():.2f}",
        f"{(by_window > TARGET).sum()} of {len(by_window)}",
        f"{found.utilisation:.0%}",
        f"{p50:.2f} / {p90:.1f} / {p99:.1f} s",
    )
    return "| " + " | ".join(cells) + " |"


LEVEL_HEAD = (
    "| rule | worst window | above 1.3 | worst, one prompt alone | worst, levelled by a search "
    "| above 1.3, levelled | worst, heeding no cache | above 1.3, heeding no cache |\n"
    + "|---" * 8
    + "|"
)


def level_row(name: str, found: Report) -> str:
    """What its windows are, and what they could have been."""
    own, levelled, uncaring = ratios(found.computed), found.levelled, found.uncaring
    cells = (
        name,
        f"{own.max():.2f}",
        f"{(own > TARGET).sum()} of {len(own)}",
        f"{found.alone.max():.2f}",
        f"{levelled.max():.2f}",
        f"{(levelled > TARGET).sum()} of {len(own)}",
        f"{uncaring.max():.2f}",
        f"{(uncaring > TARGET).sum()} of {len(own)}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--fleets", type=int, nargs="+", default=[4, 8], help="engines of a kind")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--live", type=int, default=112, help="sessions at a time, per engine")
    parser.add_argument(
        "--copies", type=int, help="of every session; twice the engines of a kind if not said"
    )
    parser.add_argument("--delay", type=float, default=0.5, help="of what the router is told")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    rules = dict.fromkeys([*args.rules, EXACT])
    gc.disable()  # millions of names that live to the end
    for num in args.fleets:
        _SESSIONS[:] = load(read(args.traces), args.copies or 2 * num, MAX_THINK, 256)
        tokens = working_set(256)
        for share in args.shares:
            setting = Setting(num, num, args.live * num, int(share * tokens))
            setting = evolve(setting, delay=args.delay, seconds=args.seconds)
            print(
                f"\n{num} prefill and {num} decode engines, {setting.live} sessions at a time of "
                f"{len(_SESSIONS)}; tiers of {share:.0%} of a working set of {tokens / 1e6:.1f}M "
                f"tokens\n\n{HEAD}",
                flush=True,
            )
            with Pool(args.jobs, maxtasksperchild=1) as pool:
                found = dict(pool.starmap(run, [(setting, rule) for rule in rules], chunksize=1))
            print("\n".join(row(rule, found[rule], found[EXACT]) for rule in rules), flush=True)
            ours = [rule for rule in rules if rule.startswith("kvflow")]
            rows = "\n".join(level_row(rule, found[rule]) for rule in ours)
            print(f"\n{LEVEL_HEAD}\n{rows}", flush=True)


if __name__ == "__main__":
    main()
