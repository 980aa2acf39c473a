"""Rules about the repository itself; every tool that enforces one is seen to fail."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvflow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvflow"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES = 320
MAX_FUNCTION_LINES = 60

DESCRIBE = "describe and derive import no torch, triton or nixl"
LAYERS = "describe, derive, move: each layer imports only those below it"
ROUTER = "the router's policy imports no torch and no network"
TESTING = "nothing imports kvflow.testing"
ENGINE = "the engine names no executor class"


# --- import contracts -----------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its configuration, free to be spoiled."""
    shutil.copytree(PACKAGE, tmp_path / "kvflow", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def broken_contracts(copy: Path) -> set[str]:
    """Names of the import contracts that a copy breaks."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    broken = set(re.findall(r"^(.+) BROKEN\b", done.stdout, re.MULTILINE))
    assert "Contracts: " in done.stdout, done.stdout + done.stderr
    assert (done.returncode != 0) == bool(broken)
    return broken


def test_the_package_keeps_its_contracts(copy):
    assert broken_contracts(copy) == set()


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("layouts/planted.py", "import torch", DESCRIBE),
        ("layouts/planted.py", "from kvflow.kernels import rows", DESCRIBE),
        ("transfers/lower.py", "import triton.language", DESCRIBE),
        ("transfers/verify.py", "import nixl_cu12", DESCRIBE),
        ("layouts/planted.py", "from kvflow.transfers.plan import Plan", LAYERS),
        ("transfers/plan.py", "from kvflow.transfers import planner", LAYERS),
        ("models/planted.py", "import kvflow.engine.api", LAYERS),
        ("engine/planted.py", "from kvflow.server import sse", LAYERS),
        ("router/index.py", "from kvflow.engine.prefix import hashes", LAYERS),
        ("router/load.py", "import h11", ROUTER),
        ("engine/planted.py", "import kvflow.testing", TESTING),
        ("transfers/planted.py", "from kvflow import testing", TESTING),
        ("engine/planted.py", "from kvflow.transfers.executors import strided", ENGINE),
        (
            "models/planted.py",
            "from kvflow.transfers.executors.reference import ReferenceExecutor",
            ENGINE,
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(copy, module, planted, contract):
    with (copy / "kvflow" / module).open("a") as file:
        file.write(f"\n{planted}\n")
    assert contract in broken_contracts(copy)


# --- budgets --------------------------------------------------------------------------------------


def module_lines(source: str) -> int:
    return len(source.splitlines())


def function_lines(source: str) -> dict[str, int]:
    """Lines of every function, decorators not counted, by name and first line."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        f"{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and node.end_lineno is not None
    }


def reads_environment(source: str) -> bool:
    return bool(re.search(r"\bos\.(environ|getenv)\b|\bfrom os import .*(environ|getenv)", source))


def test_modules_and_functions_stay_small():
    over = []
    for path in MODULES:
        source, name = path.read_text(), path.relative_to(ROOT)
        if (n := module_lines(source)) > MAX_MODULE_LINES:
            over.append(f"{name} has {n} lines, the budget is {MAX_MODULE_LINES}")
        for function, n in function_lines(source).items():
            if n > MAX_FUNCTION_LINES:
                over.append(f"{name} {function} has {n} lines, the budget is {MAX_FUNCTION_LINES}")
    assert not over, "\n".join(over)


def test_the_budget_counts_what_it_says():
    body = "    x = 1\n" * 60
    source = f"class A:\n  @property\n  def f(self):\n{body}\nasync def g():\n  pass\n"
    assert function_lines(source) == {"f:3": 61, "g:65": 2}
    assert module_lines(source) == 66


def test_every_module_says_what_it_is():
    silent = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if (source := path.read_text()).strip() and not ast.get_docstring(ast.parse(source))
    ]
    assert not silent


def test_only_entry_points_meet_the_environment():
    """The doctor passes it on to a child; what a spawned rank starts with is an entry point, as is
    what torchrun starts."""
    allowed = {
        *("doctor.py", "launch/processes.py", "launch/node.py"),
        "transfers/executors/nixl_agent.py",
    }
    found = {
        str(path.relative_to(PACKAGE)) for path in MODULES if reads_environment(path.read_text())
    }
    assert found <= allowed
    assert reads_environment("x = os.environ['HOME']")
    assert reads_environment("from os import path, getenv")


# --- dependencies ---------------------------------------------------------------------------------


def imported_modules(source: str) -> set[str]:
    """Top-level names of everything a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def declared() -> set[str]:
    """Normalised names of every distribution that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {
        re.split(r"[\[<>=!;~ ]", wanted)[0].lower().replace("_", "-")
        for group in groups
        for wanted in group
    }


def undeclared(sources: dict[str, str], own: set[str]) -> list[str]:
    """`file: module` for every third-party import whose distribution is not asked for; one that is
    not installed is taken to bear its module's name."""
    origins, asked = importlib.metadata.packages_distributions(), declared()
    return [
        f"{name}: {module}"
        for name, source in sources.items()
        for module in sorted(imported_modules(source) - own - set(sys.stdlib_module_names))
        if not {d.lower().replace("_", "-") for d in origins.get(module, (module,))} & asked
    ]


def test_every_import_is_declared():
    folders = ("kvflow", "tests", "examples", "benchmarks", "tools")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    own = {path.parent.name if path.name == "__init__.py" else path.stem for path in paths}
    assert not undeclared(sources, own | {"kvflow"})
    planted = {
        "a.py": "import os, torch\ndef f():\n    from pluggy.x import y\n    from . import z",
        "b.py": "import not_installed",
    }
    assert undeclared(planted, set()) == ["a.py: pluggy", "b.py: not_installed"]


def unexplained(decision: str) -> set[str]:
    """Distributions that pyproject.toml asks for and no row of the decision names."""
    rows = [line for line in decision.splitlines() if line.startswith("| ")]
    return {name for name in declared() if not any(re.search(rf"\b{name}\b", r) for r in rows)}


def test_every_dependency_has_a_reason():
    decision = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text()
    assert not unexplained(decision)
    assert unexplained(decision.replace("| msgspec", "| msg")) == {"msgspec"}


# --- what is committed ----------------------------------------------------------------------------

PRIVATE_FOLDERS = ("work", "root", r"home/\w+", "opt/wheels", "opt/pypi")
MACHINE_PATH = re.compile(
    rf"(?:(?<![\w./<>-])|(?<=file://))/(?:{'|'.join(PRIVATE_FOLDERS)})\b(?!-)".encode()
)
REGISTRIES = ("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org")
REGISTRY_HOST = re.compile(
    rf"\b(?:{'|'.join(map(re.escape, map('.'.join, REGISTRIES)))})\b".encode()
)


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def mentions(pattern: re.Pattern[bytes]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in tracked_files()
        if (match := pattern.search(path.read_bytes()))
    ]


def test_no_machine_path_is_committed():
    assert not mentions(MACHINE_PATH)


def test_no_registry_host_is_committed():
    assert not mentions(REGISTRY_HOST)


def test_the_patterns_see_what_they_forbid():
    for folder in ("work", "root", "home/me", "opt/wheels"):
        for text in ("cd /{}/main", '"/{}/x"', "(/{})", "=/{}/x", "file:///{}/"):
            assert MACHINE_PATH.search(text.format(folder).encode()), text.format(folder)
    for text in (b"compute / work", b"a/work/b", b"/workers", b"usr/root/", b"</root>"):
        assert not MACHINE_PATH.search(text), text
    for registry in REGISTRIES:
        assert REGISTRY_HOST.search(f"https://{'.'.join(registry)}/simple".encode())


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvflow.__version__
    assert f"## [{kvflow.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence_is_the_one_that_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


# --- tools ----------------------------------------------------------------------------------------


def load_tool(name: str) -> dict:
    scope: dict = {"__name__": name}
    exec(compile((ROOT / "tools" / f"{name}.py").read_text(), name, "exec"), scope)
    return scope


def test_a_cuda_torch_is_refused_where_no_gpu_is(monkeypatch, capsys):
    tool = load_tool("install_torch")
    planned = ["torch", "triton", "numpy", "nvidia-cublas-cu12", "cuda-bindings"]
    installs: list[list[str]] = []
    monkeypatch.setitem(tool, "planned_names", lambda arguments: planned)
    monkeypatch.setattr(tool["shutil"], "which", lambda name: None)
    monkeypatch.setattr(tool["subprocess"], "run", lambda cmd, **kw: installs.append(cmd))
    assert tool["main"](["torch"]) == 1
    assert not installs
    message = capsys.readouterr().err
    assert "cuda-bindings, nvidia-cublas-cu12" in message
    assert "TORCH=" in message
    planned[:] = ["torch", "numpy"]
    assert tool["main"](["torch"]) == 0
    assert [cmd[-1] for cmd in installs] == ["torch"]


def test_a_cuda_torch_is_taken_where_a_gpu_is(monkeypatch):
    tool = load_tool("install_torch")
    installs: list[list[str]] = []
    monkeypatch.setattr(tool["shutil"], "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(tool["subprocess"], "run", lambda cmd, **kw: installs.append(cmd))
    assert tool["main"](["torch==2.13.0"]) == 0
    assert [cmd[-1] for cmd in installs] == ["torch==2.13.0"]
