"""docs/configuration.md from the fields of `LaunchConfig`, their words and the command line.

``python tools/configuration_doc.py`` writes the page; ``--check`` exits 1 if the committed one
differs.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvflow.launch.file import to_toml
from kvflow.launch.keys import Key
from kvflow.launch.options import KEYS, command_line
from kvflow.launch.presets import PRESETS
from kvflow.launch.words import flags_of, words_of

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

Every option of a deployment has a key in a TOML file and a flag of `examples/serve_glm.py`; both
are made from the fields of `LaunchConfig`, so none has only one of them. Written by
`tools/configuration_doc.py`; a test compares this page with a fresh one.

```sh
python examples/serve_glm.py --preset article --config options.toml --port 8001
```

```toml
# options.toml
max_model_len = 4096
prefill_kv_tokens = 8192
decode_kv_tokens = 8192

[prefix]
host_nbytes = 268435456

[server]
host = "127.0.0.1"
```

- Flags are over the file, the file over the preset, the preset over the defaults. `--print-config`
  writes the result as a file and ends; that file says the same without preset and flags.
- A key that is unknown, a value of a wrong type (`4.0` and `"4"` are no integers) and a value that
  breaks a rule are refused with the key, the value and the rule. What only the model decides, say
  whether it has an MTP layer to draft with, is held against its own files next. No rank has been
  started then.
- Switches have a second flag that begins with `--no-`. Paths, in a file too, are relative to the
  working directory. TOML has no null: a key whose default is none is left out. YAML is not read:
  kvflow depends on no parser of it.
- `--context-attention`, `--context-index`, `--workspace-tokens` and `--overlap` set `access` and
  `decode_access`; the flags that begin with `--decode-` set the latter alone.
- `--host-tier-gib` and `--disk-tier-gib` take GiB, their keys bytes.

A deployment in Python takes the same names:

```python
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.launch.config import LaunchConfig

model = "examples/models/tiny-glm-python"
launch = LaunchConfig(model, pcp=4, dcp=2, prefix=PrefixConfig(block_size=16))
assert (launch.prefill_size, launch.max_model_len) == (4, 8192)
```
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_tables(), *_modes(), *_presets()])


def _tables() -> Iterator[str]:
    for table in dict.fromkeys(key.path[:-1] for key in KEYS.values()):
        name = ".".join(table)
        title = f"Table `[{name}]`" if name else "Top level"
        yield f"## {title}\n"
        yield "| key | flag | unit | default | meaning |\n|---|---|---|---|---|"
        yield from (_row(key) for key in KEYS.values() if key.path[:-1] == table)
        yield ""


def _row(key: Key) -> str:
    words = words_of(key.name)
    flags = ", ".join(f"`{flag}`" for flag in flags_of(key.name))
    about = words.about
    if key.choices:
        about += ": " + ", ".join(f"`{choice}`" for choice in key.choices)
    return f"| `{key.path[-1]}` | {flags} | {words.unit} | {_default(key)} | {about} |"


def _default(key: Key) -> str:
    if key.name == "model":
        return "of `serve_glm.py`: the tiny model beside it"
    return "none" if key.default in (None, "") else f"`{_toml(key.default)}`"


def _toml(value: object) -> str:
    return to_toml({"x": value}).removeprefix("x = ")


def _modes() -> Iterator[str]:
    yield "## Flags of the program that no file has\n"
    yield "| flag | meaning |\n|---|---|"
    names = {key.name for key in KEYS.values()} | {"help"}
    for action in command_line(Path("model"))._actions:
        if action.dest not in names:
            flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
            yield f"| {flags} | {(action.help or '').replace('<', '&lt;')} |"
    yield ""


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield "`demo` is what `make demo` runs; [another page](preset-article.md) is about `article`.\n"
    for name, tree in PRESETS.items():
        yield f"`--preset {name}`:\n\n```toml\n{to_toml(tree)}\n```\n"


def main(arguments: Iterable[str] | None = None) -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(None if arguments is None else list(arguments))
    text = page()
    if options.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
