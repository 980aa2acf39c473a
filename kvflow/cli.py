"""The `kvflow` command."""

import argparse
import json
import sys
from collections.abc import Sequence

import kvflow
from kvflow import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvflow", description=kvflow.__doc__)
    parser.add_argument("--version", action="version", version=kvflow.__version__)
    commands = parser.add_subparsers(title="commands", required=True)
    examine = commands.add_parser("doctor", help=_run_doctor.__doc__, description=doctor.__doc__)
    examine.add_argument("--json", action="store_true", help="for programs")
    examine.set_defaults(run=_run_doctor)
    return parser


def _run_doctor(options: argparse.Namespace) -> int:
    """what is installed, what is missing, what that costs; exit status 1 if kvflow cannot work"""
    findings = doctor.examine()
    if options.json:
        print(json.dumps(doctor.as_json(findings), indent=2))
    else:
        print(doctor.as_text(findings))
    return 0 if doctor.works(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
