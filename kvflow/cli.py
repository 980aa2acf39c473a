"""The `kvflow` command."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import kvflow
from kvflow import doctor
from kvflow.errors import KvflowError

_NOBODY_READS = 128 + 13
"""What shells call the status of a process that SIGPIPE ended."""

LAYOUTS = """Layouts are texts: "dcp8(i=1) paged(64)", "pcp4*dcp2@pcp(i=16) paged(16) glm-5.3/fp8",
"replicated(4) latent:pool(64) indexer:paged(16)"; docs/explain.md has the language."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status, 141 if whoever reads the output has left."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python flushes at its end
        return _NOBODY_READS
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvflow", description=kvflow.__doc__)
    parser.add_argument("--version", action="version", version=kvflow.__version__)
    commands = parser.add_subparsers(title="commands", required=True)
    examine = commands.add_parser("doctor", help=_run_doctor.__doc__, description=doctor.__doc__)
    examine.add_argument("--json", action="store_true", help="for programs")
    examine.set_defaults(run=_run_doctor)
    gauge = commands.add_parser("calibrate", help=_run_calibrate.__doc__)
    gauge.add_argument("path", type=Path, nargs="?", default=Path("kvflow-costs.json"))
    gauge.add_argument("--force", action="store_true", help="overwrite the file")
    gauge.add_argument("--tokens", type=int, default=4096, help="size of the payload moved")
    gauge.add_argument("--rounds", type=int, default=7, help="repetitions; their median counts")
    gauge.set_defaults(run=_run_calibrate)
    told = commands.add_parser("explain", help=_run_explain.__doc__, description=LAYOUTS)
    _add_transfer(told)
    told.add_argument("--costs", type=Path, help="JSON of the measured costs of a transport")
    told.add_argument("--json", action="store_true", help="for programs")
    told.set_defaults(run=_run_explain)
    drawn = commands.add_parser("draw", help=_run_draw.__doc__, description=LAYOUTS)
    _add_transfer(drawn)
    drawn.add_argument("-o", "--output", type=Path, default=Path("plan.svg"), help="SVG or PNG")
    drawn.set_defaults(run=_run_draw)
    routes = commands.add_parser("router", help=_run_router.__doc__)
    _add_router(routes)
    routes.set_defaults(run=_run_router)
    return parser


def _add_router(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--server",
        action="append",
        required=True,
        dest="servers",
        metavar="URL",
        help="http://host:port of a kvflow server; several times",
    )
    add("--model", type=Path, required=True, help="directory of the servers' model: its tokenizer")
    add("--served-model-name", help="the servers' name of it; the directory's by default")
    add("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    add(
        "--health-interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between two looks at a server's health (%(default)s)",
    )


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="layout that holds the tokens")
    parser.add_argument("dst", metavar="DST", help="layout that gets them")
    parser.add_argument("--tokens", type=int, required=True, help="tokens of the request")
    parser.add_argument("--start", type=int, default=0, help="the target holds what is before it")
    parser.add_argument(
        "--model",
        default="glm-5.3/fp8",
        help="what is cached, where a layout does not say it: a name, or config.json[/DTYPE]",
    )
    parser.add_argument("--absent", help="components that do not move, like latent.78,indexer.78")


def _run_doctor(options: argparse.Namespace) -> int:
    """what is installed, what is missing, what that costs; exit status 1 if kvflow cannot work"""
    findings = doctor.examine()
    if options.json:
        print(json.dumps(doctor.as_json(findings), indent=2))
    else:
        print(doctor.as_text(findings))
    return 0 if doctor.works(findings) else 1


def _run_calibrate(options: argparse.Namespace) -> int:
    """measure what NIXL and local copies cost here, for `explain --costs` and launch options"""
    if options.path.exists() and not options.force:
        print(f"{options.path} exists: give --force to overwrite it", file=sys.stderr)
        return 1
    from kvflow.transfers.executors.nixl import settle_environment

    settle_environment()
    from kvflow import calibrate

    try:
        costs = calibrate.measure(options.tokens, options.rounds)
        options.path.write_text(costs.to_json())
    except (KvflowError, OSError) as error:
        print(f"kvflow calibrate: {error}", file=sys.stderr)
        return 2
    print(calibrate.as_text(costs))
    print(f"written to {options.path}")
    return 0


def _run_explain(options: argparse.Namespace) -> int:
    """what a transfer between two layouts moves, what it costs, what simpler formulas misplace"""
    from kvflow.explain.command import run_explain

    return run_explain(options)


def _run_draw(options: argparse.Namespace) -> int:
    """an SVG or PNG of who holds which token, and what flows where"""
    from kvflow.explain.command import run_draw

    return run_draw(options)


def _run_router(options: argparse.Namespace) -> int:
    """an OpenAI-compatible HTTP front that gives each call to the best of several servers"""
    from kvflow.router.front.command import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
