"""Documentation runs: python blocks are executed, named commands and links exist."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import kvflow
from kvflow import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {"docs/http-api.md": "tests/server/test_server_docs.py"}
"""Pages whose examples need a server, and the test that gives them one."""

SHELLS = {"sh", "bash", "shell", "console"}

FENCE = re.compile(
    r"^(?P<mark>`{3,}|~{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=mark)\s*$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str, languages: set[str]) -> list[tuple[int, str]]:
    """(first line of the body, body) of every fenced block in one of the languages."""
    return [
        (text.count("\n", 0, match.start("body")) + 1, match["body"])
        for match in FENCE.finditer(text)
        if match["info"].split()[:1] and match["info"].split()[0].lower() in languages
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- python ---------------------------------------------------------------------------------------


def run_python(text: str, name: str) -> int:
    """Runs the python blocks of a page in order, in one namespace; returns how many."""
    scope: dict[str, object] = {"__name__": name}
    found = blocks(text, {"python", "py"})
    for line, body in found:
        exec(compile("\n" * (line - 1) + body, name, "exec"), scope)
    return len(found)


def run_sessions(text: str, name: str) -> None:
    """Runs the pycon blocks of a page as doctests."""
    for line, body in blocks(text, {"pycon"}):
        test = doctest.DocTestParser().get_doctest(body, {}, name, name, line)
        problems: list[str] = []
        doctest.DocTestRunner().run(test, out=problems.append)
        assert not problems, "".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fault_k11_examples_run(page):
    text, name = page.read_text(), name_of(page)
    if name in RUN_ELSEWHERE:
        assert page.name in (ROOT / RUN_ELSEWHERE[name]).read_text()
        return
    run_python(text, name)
    run_sessions(text, name)


def test_fault_k11_the_readme_has_an_example(capsys):
    assert run_python((ROOT / "README.md").read_text(), "README.md") >= 1
    assert capsys.readouterr().out


def test_fault_k11_a_wrong_example_is_seen():
    with pytest.raises(AssertionError, match="wrong"):
        run_python(
            "text\n```python\nx = 1\n```\n\n```python\nassert x == 2, 'wrong'\n```\n", "page"
        )
    with pytest.raises(AssertionError, match="Expected"):
        run_sessions("```pycon\n>>> 1 + 1\n3\n```\n", "page")
    assert run_python("```text\n1 / 0\n```\n", "page") == 0


# --- docstrings -----------------------------------------------------------------------------------


def modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(kvflow.__path__, "kvflow.")]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name):
    assert doctest.testmod(imported(name)).failed == 0


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


# --- commands -------------------------------------------------------------------------------------


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return frozenset(project["optional-dependencies"])


@cache
def help_of(script: str) -> str:
    """What a script prints for --help."""
    command = [sys.executable, str(ROOT / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return done.stdout


def commands(text: str) -> list[list[str]]:
    """The words of every command in the shell blocks, and of every `make x` and `kvflow x`."""
    lines = []
    for _, body in blocks(text, SHELLS):
        for line in body.replace("\\\n", " ").splitlines():
            lines += re.split(r"&&|\|\||[|;]", line.strip().removeprefix("$ "))
    lines += re.findall(r"(?<!`)`((?:make|kvflow) [^`\n]+)`(?!`)", FENCE.sub("", text))
    return [words for line in lines if (words := _words(line))]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return words


def problem(words: list[str]) -> str | None:
    """What is wrong with one of our own commands; None if nothing, or if it is not ours."""
    program, *rest = words
    if program == "make":
        asked = [w for w in rest if not w.startswith("-") and "=" not in w]
        return next((f"no make target {w!r}" for w in asked if w not in make_targets()), None)
    if program == "kvflow":
        return _cli_problem(rest)
    if Path(program).name in ("python", "python3") and rest and rest[0].endswith(".py"):
        return _script_problem(rest[0], rest[1:])
    if Path(program).name == "pip":
        asked = ",".join(re.findall(r"(?:kvflow|\.)\[([\w,]+)\]", " ".join(rest)))
        return next((f"no extra {e!r}" for e in asked.split(",") if e and e not in extras()), None)
    return None


def _cli_problem(arguments: list[str]) -> str | None:
    try:
        cli._parser().parse_args(arguments)
    except SystemExit as stopped:
        return f"kvflow refuses {arguments}" if stopped.code else None
    return None


def _script_problem(script: str, arguments: list[str]) -> str | None:
    if not (ROOT / script).is_file():
        return f"no script {script}"
    flags = [w.split("=")[0] for w in arguments if w.startswith("--")]
    known = set(re.findall(r"--[a-z][\w-]*", help_of(script))) if flags else set()
    return next((f"{script} has no option {f}" for f in flags if f not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fault_k11_commands_exist(page, capsys):
    problems = [p for words in commands(page.read_text()) if (p := problem(words))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```sh\nmake nonsense\n```\n", "no make target 'nonsense'"),
        ("run `make nonsense` first", "no make target 'nonsense'"),
        ("```bash\ncd x && make test  # all\n$ make tset\n```\n", "no make target 'tset'"),
        ("```sh\nkvflow doctor --yaml\n```\n", "kvflow refuses ['doctor', '--yaml']"),
        ("```sh\npython examples/none.py\n```\n", "no script examples/none.py"),
        ("```sh\nX=1 python tools/install_torch.py \\\n  --no\n```\n", "has no option --no"),
        ('```sh\npip install "kvflow[nixl,cuda]"\n```\n', "no extra 'cuda'"),
        ("```sh\nmake test TORCH=x.whl | tail -n 3; curl localhost\n```\n", None),
    ],
)
def test_a_wrong_command_is_seen(text, complaint, monkeypatch, capsys):
    monkeypatch.setitem(globals(), "help_of", lambda script: "usage: --yes")
    problems = [p for words in commands(text) if (p := problem(words))]
    if complaint is None:
        assert not problems
    else:
        assert len(problems) == 1
        assert complaint in problems[0]


# --- links ----------------------------------------------------------------------------------------


def dead_links(page: Path, text: str) -> list[str]:
    """Relative targets of links and images that lead nowhere."""
    prose = FENCE.sub("", text)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    return [t for t in local if not (page.parent / t).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert not dead_links(page, page.read_text())


def test_a_dead_link_is_seen():
    text = '[a](docs/none.md) <img src="none.svg"> [b](#here) [c](https://example.com) [d](LICENSE)'
    assert dead_links(ROOT / "README.md", text) == ["docs/none.md", "none.svg"]
