"""Mutation testing of the pure half: every small change of the code must fail a test.

``python tools/mutants.py [--only TEXT] [--jobs N] [--list]`` changes one place at a time in the
modules below, runs the tests that concern the module, and reports the mutants that no test
notices. Mutants that change nothing observable stand in ``mutants_equivalent.txt`` with a reason.
Exits 1 if a mutant survives that is not listed, or if a listed one no longer exists.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.txt"
LAYOUTS, TRANSFERS = "tests/layouts/test_", "tests/transfers/test_"
TESTS = {
    "kvflow/layouts/sharding.py": [LAYOUTS + "sharding.py", TRANSFERS + "planner.py"],
    "kvflow/layouts/chunks.py": [LAYOUTS + "sharding.py", TRANSFERS + "planner.py"],
    "kvflow/layouts/mesh.py": [LAYOUTS + "mesh.py"],
    "kvflow/layouts/paging.py": [LAYOUTS + "paging.py", LAYOUTS + "layout.py"],
    "kvflow/layouts/record.py": [LAYOUTS + "record.py"],
    "kvflow/layouts/spec.py": [LAYOUTS + "spec.py"],
    "kvflow/layouts/layout.py": [LAYOUTS + "layout.py"],
    "kvflow/transfers/plan.py": [TRANSFERS + "plan.py"],
    "kvflow/transfers/planner.py": [TRANSFERS + "planner.py"],
    "kvflow/transfers/verify.py": [TRANSFERS + "verify.py"],
    "kvflow/transfers/lower.py": [TRANSFERS + "lower.py", TRANSFERS + "planner.py"],
}
OPTIONS = [
    "-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-profile=mutants",
    "-k", "not a16",
]  # fmt: skip

COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum",
    "maximum": "minimum",
}  # fmt: skip
SIDES = {"left": "right", "right": "left"}


@dataclass(frozen=True)
class Mutant:
    """One change of one place. `key` says it without line numbers, so it outlives edits."""

    path: str
    key: str
    write: Callable[[], str] = field(repr=False)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Every way to change this node itself, as new nodes."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[i] = COMPARE[type(op)]()
            yield changed
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Expr | ast.Raise | ast.Continue | ast.AugAssign) or _stores(node):
        yield ast.Pass()


def _constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif node.value in SIDES:
        yield ast.Constant(SIDES[node.value])


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and all(
        isinstance(t, ast.Subscript | ast.Attribute) for t in node.targets
    )


def children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """(field, place in it, child): all but annotations, docstrings and messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.JoinedStr):
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_text(child):
                yield name, i, child


def _is_text(node: ast.AST) -> bool:
    """Docstrings, ``...`` bodies, messages: nothing to test there."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutants(path: str) -> list[Mutant]:
    """All mutants of a module, in the order of its code."""
    tree = ast.parse((ROOT / path).read_text())
    found: list[Mutant] = []
    seen: Counter[str] = Counter()

    def visit(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = (*where, node.name)
            if any(
                isinstance(b, ast.Name) and b.id == "Protocol" for b in getattr(node, "bases", [])
            ):
                return
        for name, i, child in children(node):
            for changed in variants(child):
                key = f"{path} {'.'.join(where)}: {_short(child)} => {_short(changed)}"
                seen[key] += 1
                if seen[key] > 1:
                    key += f" #{seen[key]}"
                write = partial(_with, tree, node, name, i, child, changed)
                found.append(Mutant(path, key, write))
            visit(child, where)

    visit(tree, ())
    return found


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= 90 else text[:87] + "..."


def _with(
    tree: ast.AST, node: ast.AST, name: str, i: int | None, child: ast.AST, changed: ast.AST
) -> str:
    _put(node, name, i, changed)
    try:
        return ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
    finally:
        _put(node, name, i, child)


def _put(node: ast.AST, name: str, i: int | None, child: ast.AST) -> None:
    if i is None:
        setattr(node, name, child)
    else:
        getattr(node, name)[i] = child


class _Override(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other source than its file's."""

    def __init__(self, path: str, source: str) -> None:
        self.name, self.path, self.source = path[:-3].replace("/", "."), path, source

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(ROOT / self.path))

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        exec(compile(self.source, str(ROOT / self.path), "exec"), module.__dict__)


def start(path: str, source: str) -> int:
    """Forks a child that runs the module's tests against `source`; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, _Override(path, source))
        import pytest

        code = int(pytest.main([*OPTIONS, *TESTS[path]]))
    except BaseException:
        code = 1
    os._exit(code)


def run_all(jobs: Sequence[Mutant], workers: int, limit_s: float) -> Iterator[tuple[Mutant, str]]:
    """Runs the tests of every mutant; yields ``killed``, ``timeout`` or ``survived``."""
    waiting, running = list(reversed(jobs)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            running[start(mutant.path, mutant.write())] = mutant, time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            mutant, _ = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            yield mutant, {0: "survived", -signal.SIGKILL: "timeout"}.get(code, "killed")
            continue
        for late, (_, since) in running.items():
            if time.monotonic() - since > limit_s:
                os.kill(late, signal.SIGKILL)
        time.sleep(0.01)


def read_equivalent() -> dict[str, str]:
    """Mutant key -> reason; a line is ``key | reason``, # begins a comment."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = (line.rsplit(" | ", 1) for line in lines if line.strip() and line[0] != "#")
    return {key.strip(): reason.strip() for key, reason in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose key holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for one mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()
    os.chdir(ROOT)
    everything = [m for path in TESTS for m in mutants(path)]
    equivalent = read_equivalent()
    stale = sorted(set(equivalent) - {m.key for m in everything})
    chosen = [m for m in everything if args.only in m.key and m.key not in equivalent]
    if args.list:
        print(*(m.key for m in chosen), sep="\n")
        return 0
    preload()
    paths = sorted({m.path for m in chosen})
    baseline = [Mutant(p, f"{p} unchanged", (ROOT / p).read_text) for p in paths]
    if bad := [m.key for m, fate in run_all(baseline, args.jobs, 600) if fate != "survived"]:
        print("the tests fail without any mutant:", *bad, sep="\n  ")
        return 2
    begin, fates = time.monotonic(), Counter[str]()
    for mutant, fate in run_all(chosen, args.jobs, args.limit_s):
        fates[fate] += 1
        if fates.total() % 25 == 0:
            print(f"{fates.total()} of {len(chosen)}: {dict(fates)}", file=sys.stderr, flush=True)
        if fate == "survived":
            print(f"SURVIVED {mutant.key}", flush=True)
    print(f"{len(chosen)} mutants in {time.monotonic() - begin:.0f} s: {dict(fates)}; "
          f"{len(equivalent)} listed as equivalent")  # fmt: skip
    for key in stale:
        print(f"LISTED BUT GONE {key}")
    return 1 if fates["survived"] or stale else 0


def preload() -> None:
    """What every child needs and no mutant touches, imported once before forking."""
    import hypothesis.strategies  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name.startswith("kvflow") for name in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
