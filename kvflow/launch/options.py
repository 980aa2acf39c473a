"""The command line of a deployment, over a file, over a preset: the later ones give what the
earlier ones have not said."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from kvflow.errors import LayoutError
from kvflow.launch.config import LaunchConfig
from kvflow.launch.file import read_toml, to_toml
from kvflow.launch.keys import Key, build, keys_of, merged, nested, tree_of
from kvflow.launch.presets import PRESETS
from kvflow.launch.words import flags_of, words_of
from kvflow.layouts.values import MOST, integer

_GIB = 1 << 30
_MODES = ("demo", "session", "print_config", "listen", "key_file")


@frozen
class ServerOptions:
    """Where to listen. Raises `LayoutError` for a port that is none."""

    host: str = "127.0.0.1"
    port: int = field(default=8000, converter=integer)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise LayoutError(f"port = {self.port}, must be in [0, 65536)")


KEYS: Mapping[tuple[str, ...], Key] = keys_of(LaunchConfig) | keys_of(ServerOptions, ("server",))
"""Every key of a configuration by its path: the fields of `LaunchConfig` and their tables, then
the table "server"."""


@frozen
class ServeOptions:
    """What to launch and where to listen. `demo`: send prompts to itself and end; `session`: the
    same with the requests of a file. `print_config`: write `as_toml` and end. `listen`: start no
    ranks, but admit those that join at this address and hold the key of `key_file`."""

    launch: LaunchConfig
    server: ServerOptions
    demo: bool = False
    session: Path | None = None
    print_config: bool = False
    listen: str | None = None
    key_file: Path | None = None

    def __attrs_post_init__(self) -> None:
        if (self.listen is None) != (self.key_file is None):
            raise LayoutError(
                f"listen = {self.listen!r} and key_file = {str(self.key_file)!r}: one needs the "
                f"other"
            )

    def as_toml(self) -> str:
        """The file that says all of it, without a preset or another flag."""
        return to_toml(tree_of(self.launch) | {"server": tree_of(self.server)})


def parse_options(argv: Sequence[str], *, default_model: Path) -> ServeOptions:
    """Parses the command line and the file that it names; argparse ends the program for flags it
    does not know. Raises `LayoutError` for values that make no lawful deployment, and `OSError`
    for a file that cannot be read."""
    args = vars(command_line(default_model).parse_args(argv))
    args.pop("enable_expert_parallel")
    modes = {name: args.pop(name) for name in _MODES}
    preset, path = args.pop("preset"), args.pop("config")
    tree = merged(
        {"model": default_model},
        PRESETS[preset] if preset else {},
        read_toml(path, KEYS) if path else {},
        _from_flags(args),
    )
    server = build(ServerOptions, tree.pop("server", {}), ("server",))
    return ServeOptions(build(LaunchConfig, tree), server, **modes)


def _from_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of the flags that were given: those of one key after those of several."""
    several = {words_of(name).sets: value for name, value in args.items() if words_of(name).sets}
    return nested({tuple(name.split(".")): value for name, value in (several | dict(args)).items()})


def command_line(default_model: Path) -> argparse.ArgumentParser:
    """The flags, none of which leaves a trace unless it is given."""
    parser = argparse.ArgumentParser(
        description="Serve a glm_moe_dsa model from prefill engines and decode ranks.",
        epilog="docs/configuration.md says more of every option.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of options")
    parser.add_argument("--preset", choices=PRESETS, help="named options, below those of the file")
    for key in KEYS.values():
        _add(parser, key, default_model)
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="accepted for familiarity: experts are always split over the prefill ranks",
    )
    parser.add_argument("--demo", action="store_true", help="send a few prompts, report and end")
    parser.add_argument(
        "--session", type=Path, metavar="FILE", help="play an agent session, verify it and end"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="write the resolved options as TOML and end"
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://<IPv4 of this host>:<port>: start no ranks, admit those that join",
    )
    parser.add_argument("--key-file", type=Path, help="what ranks that join must hold, too")
    return parser


def _add(parser: argparse.ArgumentParser, key: Key, default_model: Path) -> None:
    """The flags of one key; one that is not given leaves no trace."""
    words, kind = words_of(key.name), key.kind
    default = default_model if key.name == "model" else key.default
    about = f"{words.about} (default: {'none' if default in (None, '') else default})"
    options: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS}
    options["help"] = about.replace("%", "%%")
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif key.choices:
        options["choices"], options["type"] = key.choices, kind
    else:
        options["type"] = _gib if words.gib else _port if key.name == "server.port" else kind
        options["metavar"] = "GIB" if words.gib else kind.__name__.upper()
    parser.add_argument(*flags_of(key.name), **options)


def _gib(text: str) -> int:
    """Bytes; any part of one is one, lest a size above 0 become none."""
    nbytes = float(text) * _GIB
    if not 0 <= nbytes <= MOST:
        raise argparse.ArgumentTypeError(f"{text} GiB, must be in [0, {MOST // _GIB}]")
    return math.ceil(nbytes)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise argparse.ArgumentTypeError(f"port {port}, must be in [0, 65536)")
    return port
