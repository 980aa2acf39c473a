"""The `explain` and `draw` commands: two layouts as texts, a token range, and what to say of it."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvflow.errors import KvflowError, LayoutError
from kvflow.explain.canvas import Drawing
from kvflow.explain.draw import drawing_of
from kvflow.explain.render import render
from kvflow.explain.report import explain
from kvflow.explain.svg import svg_of
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.text import parse_layout, parse_members, parse_spec
from kvflow.transfers.cost import Costs
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


def run_explain(options: argparse.Namespace) -> int:
    """Prints the report of a plan; exit status 2 for bad input."""
    return _guarded("explain", _explain, options)


def run_draw(options: argparse.Namespace) -> int:
    """Writes the drawing of a plan; exit status 2 for bad input."""
    return _guarded("draw", _draw, options)


def _guarded(
    name: str, run: Callable[[argparse.Namespace], None], options: argparse.Namespace
) -> int:
    try:
        run(options)
    except BrokenPipeError:
        raise  # no bad input
    except (KvflowError, OSError) as error:
        print(f"kvflow {name}: {error}", file=sys.stderr)
        return 2
    return 0


def _explain(options: argparse.Namespace) -> None:
    costs = Costs()
    if options.costs is not None:
        costs = Costs.from_json(options.costs.read_bytes())
    report = explain(_plan(options), costs)
    print(json.dumps(report.as_json(), indent=2) if options.json else render(report))


def _draw(options: argparse.Namespace) -> None:
    path, kind = options.output, options.output.suffix.lower()
    if kind not in (".svg", ".png"):
        raise LayoutError(f"{path}: a drawing is SVG or PNG, the name must end in .svg or .png")
    drawing = drawing_of(_plan(options))
    path.write_bytes(_png_of(drawing) if kind == ".png" else svg_of(drawing).encode())
    print(f"wrote {options.output}")


def _png_of(drawing: Drawing) -> bytes:
    try:
        from kvflow.explain.png import png_of
    except ModuleNotFoundError as error:
        raise KvflowError(f'PNG needs Pillow ({error}): pip install "kvflow[png]"') from error
    return png_of(drawing)


def _plan(options: argparse.Namespace) -> Plan:
    if options.start > options.tokens:
        raise LayoutError(f"--start {options.start} is behind --tokens {options.tokens}")
    spec = _read_model(options.model)
    src, dst = parse_layout(options.src, spec), parse_layout(options.dst, spec)
    absent: set[str] = set()
    if options.absent:
        for side in (src, dst):
            try:
                absent |= set(parse_members(options.absent, side.spec))
            except LayoutError:
                if side is dst and not absent:
                    raise
    return plan_transfer(src, dst, (options.start, options.tokens), absent=absent)


def _read_model(name: str) -> KVCacheSpec:
    """A name of the language, or the path of an HF config with ``/DTYPE`` behind it if wanted."""
    path, _, dtype = name.partition(".json")
    if not Path(path + ".json").is_file():
        return parse_spec(name)
    try:
        config: Any = json.loads(Path(path + ".json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{path}.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise LayoutError(f"{path}.json holds a {type(config).__name__}, must be an object")
    return KVCacheSpec.from_config(config, kv_dtype=dtype.lstrip("/") or "fp8")  # type: ignore[arg-type]
