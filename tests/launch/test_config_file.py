"""One TOML file reaches every field, under presets and flags over it; mistakes are named."""

import math
import tomllib
from pathlib import Path
from typing import Literal

import pytest
from attrs import field, frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launch_world import TINY

from kvflow.engine.prefix.config import PrefixConfig
from kvflow.errors import LayoutError
from kvflow.launch.config import LaunchConfig
from kvflow.launch.file import read_toml, to_toml
from kvflow.launch.keys import build, checked_tree, keys_of, merged, tree_of
from kvflow.launch.options import KEYS, parse_options
from kvflow.launch.presets import PRESETS
from kvflow.launch.words import WORDS, flags_of

NAMES = [key.name for key in KEYS.values()]
GIB = 1 << 30

# What a field's other value needs beside it to be lawful.
COMPANIONS = {
    "pcp": {"pcp": 4},
    "dcp": {"pcp": 4, "dcp": 4},
    "tp": {"tp": 2},
    "max_model_len": {"max_model_len": 100},
    "num_drafts": {"num_drafts": 3},
    "hisparse_device_nbytes": {"hisparse": True, "hisparse_device_nbytes": GIB},
    "prefix": {
        "prefix": {"host_nbytes": GIB, "disk_directory": "tier", "disk_nbytes": 2 * GIB},
    },
    "prefix.enabled": {"prefix": {"enabled": False}},
    "prefix.block_size": {"prefix": {"block_size": 8}},
}


def parse(*argv):
    return parse_options(argv, default_model=TINY)


def read_back(tmp_path, text, *argv):
    path = tmp_path / "options.toml"
    path.write_text(text, encoding="utf-8")
    return parse("--config", str(path), *argv)


def value_at(options, name):
    """By getattr alone: the way there shares nothing with the code that set it."""
    value = options if name.startswith("server.") else options.launch
    for part in name.split("."):
        value = getattr(value, part)
    return value


def other_value(key, tmp_path):
    """A lawful value that is not the default."""
    if key.choices:
        return next(c for c in key.choices if c != key.default)
    if key.kind is Path:
        (tmp_path / "costs.json").write_text("{}")
        return str(tmp_path / "costs.json") if key.name == "transfer_costs" else "some/where"
    others = {bool: lambda d: not d, int: lambda d: (d or 0) + 1, float: lambda d: (d or 0) + 0.5}
    return others.get(key.kind, lambda d: "a name")(key.default)


def tree_with(name, value):
    *tables, last = name.split(".")
    tree = {last: value}
    for table in reversed(tables):
        tree = {table: tree}
    return tree


def companions(name):
    return COMPANIONS.get(name, COMPANIONS.get(name.partition(".")[0], {}))


def dig(tree, name):
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


# --- every field is reachable


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_set_by_its_key_and_by_each_of_its_flags(name, tmp_path):
    key, beside = KEYS[tuple(name.split("."))], companions(name)
    value = dig(beside, name)
    value = other_value(key, tmp_path) if value is None else value
    options = read_back(tmp_path, to_toml(merged(beside, tree_with(name, value))))
    assert value_at(options, name) == key.kind(value) != key.default
    rest = to_toml(without(beside, name))
    for flag in flags_of(name):
        word = str(value / GIB) if flag.endswith("-gib") else str(value)
        argv = f"{flag}={word}"
        if key.kind is bool:
            argv = flag if value else "--no-" + flag.removeprefix("--")
        expected = math.ceil(float(word) * GIB) if flag.endswith("-gib") else key.kind(value)
        assert value_at(read_back(tmp_path, rest, argv), name) == expected


def without(tree, name):
    """The tree without one leaf."""
    head, _, rest = name.partition(".")
    kept = {k: v for k, v in tree.items() if k != head}
    if rest and head in tree:
        kept[head] = without(tree[head], rest)
    return kept


def without_words(names):
    return sorted(set(names) - set(WORDS)), sorted(set(WORDS) - set(names))


def test_every_field_has_words_and_all_words_a_field():
    assert without_words(NAMES) == ([], [])
    assert all(WORDS[name].about for name in NAMES)
    numbers = [key.name for key in KEYS.values() if key.kind in (int, float)]
    assert [name for name in numbers if not WORDS[name].unit] == ["server.port"]


def test_a_new_field_is_reachable_and_asks_for_words():
    @frozen
    class Inner:
        rate: float = 1.5
        way: Literal["a", "b"] = "a"

    @frozen
    class Outer:
        count: int = 1
        inner: Inner = field(factory=Inner)

    keys = keys_of(Outer)
    assert [key.name for key in keys.values()] == ["count", "inner.rate", "inner.way"]
    assert without_words([key.name for key in keys.values()])[0] == [
        "count",
        "inner.rate",
        "inner.way",
    ]
    tree = checked_tree({"count": 3, "inner": {"rate": 2}}, keys)
    assert build(Outer, tree) == Outer(3, Inner(2.0))
    assert flags_of("inner.rate") == ("--inner-rate",)


def test_a_field_of_a_type_that_no_file_holds_is_refused():
    @frozen
    class Odd:
        shape: complex = 1j

    with pytest.raises(TypeError, match=r"shape is a .*complex"):
        keys_of(Odd)


def test_a_table_keeps_what_its_default_says():
    """A default that is not that of the table's own class."""

    @frozen
    class Inner:
        a: int = 1
        b: int = 2

    @frozen
    class Outer:
        inner: Inner = field(factory=lambda: Inner(7, 8))

    assert build(Outer, {}) == Outer(Inner(7, 8))
    assert build(Outer, {"inner": {"b": 3}}) == Outer(Inner(7, 3))


def test_flags_are_one_to_a_key():
    flags = [flag for name in NAMES for flag in flags_of(name)]
    assert len(flags) == len(set(flags))


# --- precedence


def test_flags_are_over_the_file_and_the_file_over_the_preset(tmp_path):
    text = 'pcp = 4\ndcp = 2\n[prefix]\nblock_size = 32\n[server]\nport = 9\nhost = "::1"\n'
    options = read_back(tmp_path, text, "--preset", "article", "--dcp", "4", "--port", "10")
    launch = options.launch
    assert (launch.pcp, launch.dcp, launch.decode_ranks) == (4, 4, 8)
    assert launch.prefix == PrefixConfig(True, 32, PRESETS["article"]["prefix"]["host_nbytes"])
    assert (options.server.host, options.server.port) == ("::1", 10)
    assert launch.model == TINY


def test_a_flag_switches_off_what_a_file_switches_on(tmp_path):
    text = "hisparse = true\n[access]\noverlap = false\n"
    assert read_back(tmp_path, text).launch.hisparse
    options = read_back(tmp_path, text, "--no-hisparse", "--overlap")
    assert not options.launch.hisparse
    assert options.launch.access.overlap


def test_context_flags_mean_both_engines_unless_decode_has_its_own(tmp_path):
    options = read_back(
        tmp_path,
        '[decode_access]\nattention = "whole"\nindex = "keys"\n',
        *("--context-attention", "union", "--decode-context-index", "queries"),
        *("--context-index", "auto", "--workspace-tokens", "99"),
    ).launch
    assert (options.access.attention, options.decode_access.attention) == ("union", "union")
    assert (options.access.index, options.decode_access.index) == ("auto", "queries")
    assert options.access.workspace_tokens == options.decode_access.workspace_tokens == 99


# --- refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pcpp = 4", "pcpp is no key of a configuration, is pcp meant?"),
        ("[prefix]\nblok_size = 4", "prefix.blok_size is no key .*, is prefix.block_size meant?"),
        ("block_size = 4", "block_size is no key of a configuration"),
        ("[launch]\npcp = 4", "launch is no key"),
        ("demo = true", "demo is no key"),
        ('pcp = "4"', "pcp = '4', must be an integer"),
        ("pcp = 4.0", "pcp = 4.0, must be an integer"),
        ("pcp = true", "pcp = True, must be an integer"),
        ("pcp = {a = 1}", "pcp = {'a': 1}, must be an integer"),
        ("pcp = [4]", r"pcp = \[4\], must be an integer"),
        ("hisparse = 1", "hisparse = 1, must be true or false"),
        ("model = 3", "model = 3, must be a path"),
        ('model = ""', "model = '', must be a path"),
        ("served_model_name = 1979-05-27", "served_model_name = .*1979.*, must be a text"),
        ('kv_dtype = "int4"', "kv_dtype = 'int4', must be one of .*'fp8'"),
        ("kv_dtype = 8", "kv_dtype = 8, must be one of .*'fp8'"),
        ('[access]\nindex = "rows"', "access.index = 'rows', must be one of .*'keys'"),
        ("prefix = 4", "prefix = 4, must be a table"),
        ("[[prefix]]\nblock_size = 4", r"prefix = \[.*\], must be a table"),
        ("pcp = ", "options.toml: Invalid value"),
        ("pcp = 1\npcp = 2", "options.toml: Cannot overwrite a value"),
        ("pcp = 0", r"^LaunchConfig.pcp = 0, must be at least 1"),
        ("pcp = 4\ndcp = 3", "dcp 3 must divide pcp 4"),
        ("[prefix]\nblock_size = 0", "^prefix: PrefixConfig.block_size = 0, must be at least 1"),
        ("[access]\nworkspace_tokens = 0", "^access: .*workspace_tokens is 0, must be at least 1"),
        ("[server]\nport = 65536", r"^server: port = 65536, must be in \[0, 65536\)"),
        (f"pcp = {2**63}", f"pcp = {2**63}, must be at most"),
    ],
)
def test_mistakes_in_a_file_are_named(text, message, tmp_path):
    with pytest.raises(LayoutError, match=message):
        read_back(tmp_path, text)


def test_a_file_that_is_no_text_or_not_there(tmp_path):
    path = tmp_path / "options.toml"
    path.write_bytes(b"model = '\xff'")
    with pytest.raises(LayoutError, match=r"options\.toml: .*utf-8"):
        read_toml(path, KEYS)
    with pytest.raises(FileNotFoundError):
        parse("--config", str(tmp_path / "none.toml"))


def test_an_unknown_preset_ends_the_program(capsys):
    with pytest.raises(SystemExit):
        parse("--preset", "articel")
    assert "invalid choice: 'articel' (choose from" in capsys.readouterr().err


# --- round trip

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNTS = st.integers(1, 2**40)


@st.composite
def configurations(draw):
    """Lawful values for most fields, of all kinds."""
    dcp, tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    length = draw(st.integers(2, 2**40))
    host = draw(st.sampled_from([0, 1, GIB]))
    hisparse = draw(st.booleans())
    drawn = {
        "model": Path(draw(TEXTS.filter(lambda t: "\0" not in t)) or "m"),
        "served_model_name": draw(TEXTS),
        "pcp": dcp * draw(st.integers(1, 3)),
        "dcp": dcp,
        "tp": tp,
        "interleave": draw(COUNTS),
        "kv_dtype": draw(st.sampled_from(["fp8", "float32"])),
        "dtype": draw(st.sampled_from(["float32", "float64"])),
        "max_model_len": length,
        "prefill_kv_tokens": length + draw(st.integers(0, 9)),
        "decode_kv_tokens": length,
        "num_drafts": draw(st.integers(0, 4)),
        "hisparse": hisparse,
        "verify_transfers": draw(st.booleans()),
    }
    if hisparse and draw(st.booleans()):
        drawn["hisparse_device_nbytes"] = draw(COUNTS)
    if draw(st.booleans()):
        disk = {"disk_nbytes": 1, "disk_directory": Path("no/such") / "x\ty"} if host else {}
        drawn["prefix"] = PrefixConfig(
            block_size=draw(st.none() | COUNTS), host_nbytes=host, **disk
        )
    return LaunchConfig(**drawn)


@settings(max_examples=40)
@given(configurations(), TEXTS, st.integers(0, 65535))
def test_what_is_printed_reads_back_as_the_same(tmp_path_factory, launch, host, port):
    options = parse_with(launch, host, port)
    text = options.as_toml()
    again = read_back(tmp_path_factory.getbasetemp(), text)
    assert again == options
    assert again.as_toml() == text


def parse_with(launch, host, port):
    options = parse()
    return type(options)(launch, type(options.server)(host, port))


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True),
        st.recursive(
            st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
            lambda inner: st.dictionaries(
                st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), inner, min_size=1, max_size=3
            ),
            max_leaves=6,
        ),
        max_size=5,
    )
)
@example({"a": '\x7f"\\\n', "b": {"c": 1e22, "d": {"e": -0.0}}})
def test_any_tree_is_written_as_toml_that_means_the_same(tree):
    assert repr(in_order(tomllib.loads(to_toml(tree)))) == repr(in_order(tree))


def in_order(tree):
    """By name: tables come after values in a file."""
    return {k: in_order(v) if isinstance(v, dict) else v for k, v in sorted(tree.items())}


def test_a_text_that_utf8_cannot_carry_is_not_written():
    with pytest.raises(LayoutError, match="must be text of UTF-8"):
        to_toml({"model": Path("a\udcff")})


def test_what_is_none_is_not_written_and_read_as_none():
    tree = tree_of(parse().launch)
    absent = {key.name for key in KEYS.values() if dig(tree, key.name) is None}
    absent -= {"server.host", "server.port"}  # the other half of the file
    assert {"transfer_costs", "prefix.block_size"} <= absent
    assert all(key.default is None for key in KEYS.values() if key.name in absent)
