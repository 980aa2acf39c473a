"""Runs tests against mutants: first in a warm process, then, for what is left, in a fresh one.

The warm process has imported and collected everything. For each mutant it forks; the child gives
the changed function its new code and runs the tests of the module until one fails, the quick ones
and those that have killed most first. A change that is not inside a function, and a
mutant that no test of the warm process noticed, is judged by a fork that imports the changed module
from the start.
"""

import importlib.abc
import importlib.util
import mmap
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = [
    "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain",
    "--hypothesis-profile=mutants", "-k", "not a16",
]  # fmt: skip
MEMORY = 3 << 30
"""Bytes of address space that a mutant may ask for beyond what its parent has."""


@dataclass(frozen=True)
class Mutant:
    """One change of one place. `key` says it without line numbers, so it outlives edits;
    `function` leads to the outermost function whose body holds the change, if one does."""

    path: str
    key: str
    function: tuple[str, ...]
    write: Callable[[], str] = field(repr=False)


@dataclass
class Limits:
    workers: int
    cpu_s: int


class _Override(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from other source than its file's."""

    def __init__(self, path: str, source: str) -> None:
        self.name, self.path, self.source = _module_name(path), path, source

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(ROOT / self.path))

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        exec(compile(self.source, str(ROOT / self.path), "exec"), module.__dict__)


def _module_name(path: str) -> str:
    return path[:-3].replace("/", ".")


def _child(limits: Limits, work: Callable[[], int]) -> int:
    """Forks; the child limits its time and memory, does its work and ends with its answer."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + limits.cpu_s, used + limits.cpu_s + 5))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        space = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        code = work()
    except BaseException:
        code = 1
    os._exit(code)


def _each(
    mutants: Sequence[Mutant], limits: Limits, work: Callable[[Mutant], int]
) -> Iterator[tuple[Mutant, str]]:
    """Does the work of every mutant in forks; yields ``killed``, ``timeout`` or ``survived``."""
    waiting, running = list(reversed(mutants)), {}
    while waiting or running:
        while waiting and len(running) < limits.workers:
            mutant = waiting.pop()
            running[_child(limits, lambda m=mutant: work(m))] = mutant
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        late = code in (-signal.SIGXCPU, -signal.SIGKILL)
        yield running.pop(pid), "timeout" if late else "killed" if code else "survived"


def fresh(
    mutants: Sequence[Mutant], tests: Mapping[str, Sequence[str]], limits: Limits
) -> Iterator[tuple[Mutant, str]]:
    """Judges mutants by importing the changed module from the start."""

    def work(mutant: Mutant) -> int:
        import pytest

        sys.meta_path.insert(0, _Override(mutant.path, mutant.write()))
        return int(pytest.main([*OPTIONS, *tests[mutant.path]]))

    return _each(mutants, limits, work)


class _Warm:
    """A pytest plugin that runs the collected tests once, then against each mutant."""

    def __init__(self, mutants, tests, limits, out) -> None:  # type: ignore[no-untyped-def]
        self.mutants, self.tests, self.limits, self.out = mutants, tests, limits, out

    def pytest_runtestloop(self, session) -> bool:  # type: ignore[no-untyped-def]
        cost = {}
        for item in session.items:
            begin = time.process_time()
            if _fails(item):
                self.tell("the tests fail without any mutant", item.nodeid)
                return True
            cost[item] = time.process_time() - begin

        nth = {item: i for i, item in enumerate(session.items)}
        kills = memoryview(mmap.mmap(-1, 8 * len(nth))).cast("q")  # shared with the children

        def work(mutant: Mutant) -> int:
            if not _swap(mutant):
                return 0
            files = {str(ROOT / name) for name in self.tests[mutant.path]}
            mine = [item for item in session.items if str(item.path) in files]
            for item in sorted(mine, key=lambda i: (cost[i] + 0.003) / (1 + kills[nth[i]])):
                if _fails(item):
                    kills[nth[item]] += 1
                    return 1
            return 0

        for mutant, fate in _each(self.mutants, self.limits, work):
            self.tell(fate, mutant.key)
        return True

    def tell(self, fate: str, text: str) -> None:
        self.out.write(f"{fate}\t{text}\n")
        self.out.flush()


def _fails(item) -> bool:  # type: ignore[no-untyped-def]
    from _pytest.runner import runtestprotocol

    return any(report.failed for report in runtestprotocol(item, log=False))


def _swap(mutant: Mutant) -> bool:
    """Gives the mutant's function, wherever it is already known, the changed code."""
    if not mutant.function:
        return False
    code = compile(mutant.write(), str(ROOT / mutant.path), "exec")
    found: object = sys.modules[_module_name(mutant.path)]
    for name in mutant.function:
        found = vars(found).get(name)
        code = next(
            c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name
        )
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, classmethod | staticmethod):
        found = found.__func__
    elif isinstance(found, cached_property):
        found = found.func
    found = getattr(found, "__wrapped__", found)  # behind lru_cache
    if not isinstance(found, types.FunctionType):
        return False
    found.__code__ = code
    _forget()
    return True


def _forget() -> None:
    """Empties what functions of the package remember, or a change would go unnoticed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvflow"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def warm(
    mutants: Sequence[Mutant], tests: Mapping[str, Sequence[str]], limits: Limits
) -> Iterator[tuple[str, str]]:
    """Yields (fate, key) as a forked pytest session tells them; ``survived`` is not final."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        code = 1
        try:
            import pytest

            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            with os.fdopen(write, "w") as out:
                files = sorted({name for m in mutants for name in tests[m.path]})
                pytest.main([*OPTIONS, *files], plugins=[_Warm(mutants, tests, limits, out)])
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            fate, _, key = line.rstrip("\n").partition("\t")
            yield fate, key
    os.waitpid(pid, 0)
