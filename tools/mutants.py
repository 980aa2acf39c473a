"""Mutation testing of the pure half: every small change of the code must fail a test.

``python tools/mutants.py [--only TEXT] [--jobs N] [--list]`` changes one place at a time in the
modules below, runs the tests that concern the module, and reports the mutants that no test
notices. Mutants that change nothing observable stand in ``mutants_equivalent.txt`` with a reason.
Exits 1 if a mutant survives that is not listed, or if a listed one no longer exists.
"""

import argparse
import ast
import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from mutants_run import ROOT, Limits, Mutant, fresh, warm

EQUIVALENT = ROOT / "tools" / "mutants_equivalent.txt"
LAYOUTS, TRANSFERS = "tests/layouts/test_", "tests/transfers/test_"
LAWFUL = LAYOUTS + "lawful_values.py"
TEXTS = [LAYOUTS + "text_words.py", LAYOUTS + "text.py"]
CATALOGUED = [LAYOUTS + "catalogue.py"]
GOLDEN = [
    LAYOUTS + "catalogue_entry.py", LAYOUTS + "catalogue.py::test_golden_numbers", *CATALOGUED
]  # fmt: skip
HEADS = TRANSFERS + "heads_and_copies.py"
TESTS = {
    "kvflow/layouts/sharding.py": [LAYOUTS + "sharding.py", TRANSFERS + "planner.py", LAWFUL],
    "kvflow/layouts/chunks.py": [LAYOUTS + "sharding.py", TRANSFERS + "planner.py", LAWFUL],
    "kvflow/layouts/mesh.py": [LAYOUTS + "mesh.py", LAYOUTS + "heads.py", LAWFUL],
    "kvflow/layouts/paging.py": [LAYOUTS + "paging.py", LAYOUTS + "layout.py",
                                 LAYOUTS + "record.py", LAWFUL],
    "kvflow/layouts/arrangement.py": [LAYOUTS + "arrangement.py", LAYOUTS + "record.py"],
    "kvflow/layouts/pieces.py": [LAYOUTS + "pieces.py", LAYOUTS + "record.py"],
    "kvflow/layouts/record.py": [LAYOUTS + "record.py", LAYOUTS + "arrangement.py",
                                 LAYOUTS + "pieces.py", LAWFUL],
    "kvflow/layouts/spec.py": [LAYOUTS + "spec.py", LAWFUL],
    "kvflow/layouts/layout.py": [LAYOUTS + "layout.py", LAYOUTS + "heads.py", LAWFUL],
    "kvflow/layouts/counts.py": [LAYOUTS + "counts.py", TRANSFERS + "lower.py"],
    "kvflow/layouts/wire.py": [LAYOUTS + "wire.py", LAWFUL],
    "kvflow/layouts/identity.py": [LAYOUTS + "identity.py"],
    "kvflow/layouts/memory.py": [LAYOUTS + "memory.py"],
    "kvflow/layouts/catalogue/axes.py": [LAYOUTS + "axes.py", *CATALOGUED],
    "kvflow/layouts/catalogue/entry.py": GOLDEN,
    "kvflow/layouts/catalogue/vllm_host.py": GOLDEN,
    "kvflow/layouts/catalogue/__init__.py": CATALOGUED,
    "kvflow/layouts/catalogue/vllm.py": GOLDEN,
    "kvflow/layouts/catalogue/vllm_mla.py": GOLDEN,
    "kvflow/layouts/catalogue/sglang.py": GOLDEN,
    "kvflow/layouts/catalogue/trtllm.py": GOLDEN,
    "kvflow/layouts/catalogue/dynamo.py": GOLDEN,
    "kvflow/layouts/catalogue/lmcache.py": GOLDEN,
    "kvflow/layouts/text/scan.py": TEXTS,
    "kvflow/layouts/text/placement.py": TEXTS,
    "kvflow/layouts/text/members.py": TEXTS,
    "kvflow/layouts/text/records.py": TEXTS,
    "kvflow/layouts/text/specs.py": TEXTS,
    "kvflow/layouts/text/layouts.py": TEXTS,
    "kvflow/layouts/values.py": [LAYOUTS + "values.py", LAWFUL],
    "kvflow/transfers/claims.py": [TRANSFERS + "claims.py", TRANSFERS + "planner.py",
                                   TRANSFERS + "whole_plans.py"],
    "kvflow/transfers/plan.py": [TRANSFERS + "plan.py", TRANSFERS + "whole_plans.py",
                                 TRANSFERS + "verify_heads.py", HEADS],
    "kvflow/transfers/planner.py": [TRANSFERS + "planner.py", HEADS],
    "kvflow/transfers/verify.py": [TRANSFERS + "verify.py", TRANSFERS + "whole_plans.py",
                                   TRANSFERS + "verify_heads.py"],
    "kvflow/transfers/lower.py": [TRANSFERS + "lower.py", HEADS],
    "kvflow/transfers/joint.py": [TRANSFERS + "joint.py"],
    "kvflow/transfers/cuts.py": [TRANSFERS + "cuts.py"],
    "kvflow/transfers/readiness.py": [TRANSFERS + "readiness.py"],
    "kvflow/transfers/wire.py": [TRANSFERS + "plan_wire.py"],
    "kvflow/transfers/handshake.py": [TRANSFERS + "handshake.py"],
    "kvflow/transfers/slot_cuts.py": [TRANSFERS + "slot_cuts.py"],
    "kvflow/transfers/predict.py": [TRANSFERS + "cost.py"],
    "kvflow/transfers/cost.py": [TRANSFERS + "cost.py"],
}  # fmt: skip
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

    def visit(node: ast.AST, where: tuple[str, ...], function: tuple[str, ...]) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = (*where, node.name)
            if any(
                isinstance(b, ast.Name) and b.id == "Protocol" for b in getattr(node, "bases", [])
            ):
                return
        for name, i, child in children(node):
            inside = function
            if isinstance(node, ast.FunctionDef) and name == "body" and not function:
                inside = where
            for changed in variants(child):
                key = f"{path} {'.'.join(where)}: {_short(child)} => {_short(changed)}"
                seen[key] += 1
                if seen[key] > 1:
                    key += f" #{seen[key]}"
                write = partial(_with, tree, node, name, i, child, changed)
                found.append(Mutant(path, key, inside, write))
            visit(child, where, inside)

    visit(tree, (), ())
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


def read_equivalent() -> dict[str, str]:
    """Mutant key -> reason; a line is ``key | reason``, # begins a comment."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = (line.rsplit(" | ", 1) for line in lines if line.strip() and line[0] != "#")
    return {key.strip(): reason.strip() for key, reason in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose key holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cpu-s", type=int, default=40, help="CPU seconds for one mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--warm-only", action="store_true",
                        help="do not judge survivors again in a fresh process")  # fmt: skip
    args = parser.parse_args()
    os.chdir(ROOT)
    everything = [m for path in TESTS for m in mutants(path)]
    equivalent = read_equivalent()
    stale = sorted(set(equivalent) - {m.key for m in everything})
    chosen = [m for m in everything if args.only in m.key and m.key not in equivalent]
    if args.list:
        print(*(m.key for m in chosen), sep="\n")
        return 0
    if not chosen:
        parser.error(f"no mutant's key holds {args.only!r}")
    preload()
    begin = time.monotonic()
    fates = judge(chosen, Limits(args.jobs, args.cpu_s), args.warm_only)
    if fates is None:
        return 2
    report(fates, [m for m in everything if m.key in equivalent], time.monotonic() - begin)
    for key in stale:
        print(f"LISTED BUT GONE {key}")
    return 1 if "survived" in fates.values() or stale else 0


def judge(chosen: list[Mutant], limits: Limits, warm_only: bool) -> dict[Mutant, str] | None:
    """The fate of every mutant: ``killed``, ``timeout`` or ``survived``."""
    by_key = {m.key: m for m in chosen}
    fates: dict[Mutant, str] = {}
    for fate, key in warm(chosen, TESTS, limits):
        if key not in by_key:
            print(f"{fate}: {key}")
            return None
        fates[by_key[key]] = fate
        if fate == "survived":
            print(f"{len(fates)} of {len(chosen)}: not yet killed: {key}", file=sys.stderr)
    if len(fates) < len(chosen):
        print("the tests could not be run")
        return None
    left = [m for m, fate in fates.items() if fate == "survived"]
    if warm_only:
        left = [m for m in left if not m.function]
    print(f"{len(left)} left to fresh processes", file=sys.stderr, flush=True)
    return fates | dict(fresh(left, TESTS, limits))


def report(fates: dict[Mutant, str], listed: list[Mutant], seconds: float) -> None:
    for mutant, fate in fates.items():
        if fate == "survived":
            print(f"SURVIVED {mutant.key}")
    print(f"{'module':34}{'mutants':>8}{'killed':>8}{'listed':>8}{'survived':>9}")
    for path in TESTS:
        counts = Counter(fate for m, fate in fates.items() if m.path == path)
        kept = sum(m.path == path for m in listed)
        if counts:
            print(f"{path:34}{counts.total() + kept:8}{counts['killed'] + counts['timeout']:8}"
                  f"{kept:8}{counts['survived']:9}")  # fmt: skip
    print(f"{len(fates)} mutants in {seconds:.0f} s: {dict(Counter(fates.values()))}")


def preload() -> None:
    """What every child needs and no mutant touches, imported once before forking."""
    import hypothesis.strategies  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name.startswith("kvflow") for name in sys.modules)


if __name__ == "__main__":
    sys.exit(main())
